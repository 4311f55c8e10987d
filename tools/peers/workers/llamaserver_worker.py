"""llama.cpp's server with the published files: draft model, prompt lookup and n-gram cache.

A server has one setting, so each has a server of its own. They map the same files into memory.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
import urllib.request
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from llamacpp_worker import CONTEXT, LlamaCpp
from server_process import running_server
from serving import linked, serve, size_of

MATCH = 3  # tokens of a match of prompt lookup


class LlamaServer(LlamaCpp):
    """Links to the files of target and draft model; logits are computed by the library."""

    def convert(self, source: str, precision: str, cache: str, draft: str = "") -> Path:
        files = {"model.gguf": source, "draft.gguf": draft}
        return linked(cache, source, f"llamaserver-{Path(draft).stem}", files)

    def num_bytes(self, model: Path) -> int:
        return size_of(model / "model.gguf", model / "draft.gguf")

    def load(self, model: Path, threads: int) -> str:
        self._folder, self._threads, self._urls = model, threads, dict[tuple[str, int], str]()
        self._program = os.path.join(os.environ["LLAMA_CPP_LIB_PATH"], "llama-server")
        self._servers = ExitStack()
        atexit.register(self._servers.close)
        self.model = None
        return version("llama-cpp-python")

    def generate(
        self, prompt: list[int], tokens: int, k: int, drafter: str = "model"
    ) -> dict[str, Any]:
        setting = (drafter, k) if k else ("", 0)
        if setting not in self._urls:
            self._urls[setting] = self._start(*setting)
        fields = {
            "prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True,
            "cache_prompt": False, "return_tokens": True,
        }  # fmt: skip
        request = urllib.request.Request(
            f"{self._urls[setting]}/completion",
            json.dumps(fields).encode(),
            {"Content-Type": "application/json"},
        )
        start = time.perf_counter()
        with urllib.request.urlopen(request) as response:
            answer = json.load(response)
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

    def _start(self, drafter: str, k: int) -> str:
        """Start a server and return its address once it has loaded the models."""
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
        command = [
            self._program, "--model", self._folder / "model.gguf", "--host", "127.0.0.1",
            "--port", "{port}", "--threads", self._threads, "--ctx-size", CONTEXT, "--parallel", 1,
            "--cache-ram", 0, "--offline", *speculation,
        ]  # fmt: skip
        return self._servers.enter_context(running_server(command, stdout=sys.stderr))[0]


if __name__ == "__main__":
    serve(LlamaServer())
