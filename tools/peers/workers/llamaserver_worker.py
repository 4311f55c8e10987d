"""llama.cpp's server with the published files: draft model, prompt lookup and n-gram cache.

A server has one setting, so each has a server of its own. They map the same files into memory.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import closing, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from llamacpp_worker import CONTEXT, LlamaCpp
from serving import linked, serve, size_of

LOADING = 300.0  # seconds at most
MATCH = 3  # tokens of a match of prompt lookup


class LlamaServer(LlamaCpp):
    """Links to the files of target and draft model; logits are computed by the library."""

    def convert(
        self, gguf: str, checkpoint: str, precision: str, cache: str, draft: str = ""
    ) -> Path:
        return linked(
            cache,
            gguf,
            f"llamaserver-{Path(draft).stem}",
            {"model.gguf": gguf, "draft.gguf": draft},
        )

    def num_bytes(self, model: Path) -> int:
        return size_of(model / "model.gguf", model / "draft.gguf")

    def load(self, model: Path, threads: int) -> str:
        self._folder, self._threads, self._ports = model, threads, dict[tuple[str, int], int]()
        self._program = os.path.join(os.environ["LLAMA_CPP_LIB_PATH"], "llama-server")
        self.model = None
        return version("llama-cpp-python")

    def generate(
        self, prompt: list[int], tokens: int, k: int, drafter: str = "model"
    ) -> dict[str, Any]:
        setting = (drafter, k) if k else ("", 0)
        if setting not in self._ports:
            self._ports[setting] = self._start(*setting)
        request = {
            "prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True,
            "cache_prompt": False, "return_tokens": True,
        }  # fmt: skip
        start = time.perf_counter()
        answer = json.loads(_request(self._ports[setting], "/completion", request))
        seconds = time.perf_counter() - start
        times = answer["timings"]
        prefill = times["prompt_ms"] / 1000
        return {
            "tokens": answer["tokens"],
            "prefill_seconds": prefill,
            "decode_seconds": seconds - prefill,
            "accepted": times.get("draft_n_accepted", 0),
            "drafted": times.get("draft_n", 0),
        }

    def logits(self, tokens: list[int]) -> np.ndarray:
        if self.model is None:
            super().load(self._folder, self._threads)
        return super().logits(tokens)

    def _start(self, drafter: str, k: int) -> int:
        """Start a server and return its port once it has loaded the models."""
        speculation = {
            "": [],
            "model": [
                "--spec-type", "draft-simple", "--spec-draft-n-max", k,
                "--model-draft", self._folder / "draft.gguf", "--threads-draft", self._threads,
            ],
            "lookup": [
                "--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", MATCH,
                "--spec-ngram-simple-size-m", k,
            ],
            "cache": ["--spec-type", "ngram-cache", "--spec-draft-n-max", k],
        }[drafter]  # fmt: skip
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            port: int = free.getsockname()[1]
        command = [
            self._program, "--model", self._folder / "model.gguf", "--host", "127.0.0.1",
            "--port", port, "--threads", self._threads, "--ctx-size", CONTEXT, "--parallel", 1,
            "--cache-ram", 0, "--offline", *speculation,
        ]  # fmt: skip
        process = subprocess.Popen(list(map(str, command)), stdout=sys.stderr)
        atexit.register(process.kill)
        end = time.monotonic() + LOADING
        while process.poll() is None and time.monotonic() < end:
            with suppress(OSError):  # it does not answer yet
                _request(port, "/health")
                return port
            time.sleep(0.2)
        raise RuntimeError(f"llama-server did not load with {drafter or 'no drafter'}")


def _request(port: int, path: str, fields: dict[str, Any] | None = None) -> bytes:
    """Return the answer to a GET request, or to a POST request with fields."""
    data = None if fields is None else json.dumps(fields).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data)
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as answer:
        content: bytes = answer.read()
    return content


if __name__ == "__main__":
    serve(LlamaServer())
