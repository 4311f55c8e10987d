"""llama.cpp's server with the published files: draft model, prompt lookup and n-gram cache.

A server has one setting, so each has a server of its own. They map the same files into memory.
"""

from __future__ import annotations

import atexit
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import closing
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
        answer = _post(self._ports[setting], "/completion", request)
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
        while not _is_healthy(port):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"llama-server did not load with {drafter or 'no drafter'}")
            time.sleep(0.2)
        return port


def _is_healthy(port: int) -> bool:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False


def _post(port: int, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(fields), headers)
        response = connection.getresponse()
        text = response.read().decode()
    if response.status != 200:
        raise RuntimeError(f"llama-server answered {response.status}: {text}")
    answer: dict[str, Any] = json.loads(text)
    return answer


if __name__ == "__main__":
    serve(LlamaServer())
