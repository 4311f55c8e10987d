"""llama.cpp as a peer: its server, its own converter and quantiser.

LLAMA_CPP names the source folder, built in `build`: docs/peers.md has the commands. A K other than
the last one starts the server anew, because K is an argument of it; that is not timed.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

from serving import FirstToken, each_model, peak_bytes, serve

TREE = Path(os.environ["LLAMA_CPP"])
PROGRAMS = TREE / "build/bin"
TYPES = {"int8": "Q8_0", "int4": "Q4_0"}
# Prompts are ids, so how the converted model would split text does not matter.
CONVERT = """
import runpy, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
START_SECONDS = 120
WARM_UP = 8  # tokens after a start


class Server(NamedTuple):
    """A running server and its K."""

    process: subprocess.Popen[bytes]
    port: int
    k: int
    log: str


class LlamaCpp:
    """float32 caches in float32; quantised models keep the defaults."""

    def __init__(self) -> None:
        self.server: Server | None = None

    def convert(self, request: dict[str, Any]) -> dict[str, Any]:
        return each_model(request, "llamacpp", _convert)

    def load(self, target: str, draft: str | None, threads: int) -> dict[str, Any]:
        self.target, self.draft, self.threads = target, draft, threads
        self._serve(2 if draft else 0)
        said = subprocess.run(
            [PROGRAMS / "llama-server", "--version"], capture_output=True, text=True, check=True
        )
        return {"version": (said.stderr + said.stdout).strip().splitlines()[0]}

    def generate(self, prompt: list[int], tokens: int, k: int) -> dict[str, Any]:
        if self.server is None or self.server.k != k:
            self._serve(k)
            self._ask(prompt, WARM_UP)
        found = self._ask(prompt, tokens)
        return {**found, "peak_bytes": peak_bytes(self.server.process.pid)}

    def _ask(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        body = {
            "prompt": prompt, "n_predict": tokens, "temperature": 0, "ignore_eos": True,
            "cache_prompt": False, "stream": True, "return_tokens": True,
        }  # fmt: skip
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.server.port}/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        times, ids, last = FirstToken(), [], {}
        with urllib.request.urlopen(request) as answer:
            for line in answer:
                if line.startswith(b"data: "):
                    last = json.loads(line[6:])
                    if not last.get("stop"):
                        ids += last["tokens"]
                        times.came()
        counts = last.get("timings", {})
        kept = {"accepted": "draft_n_accepted", "drafted": "draft_n"}
        return {
            "tokens": ids,
            **times.split(),
            **{name: counts[key] for name, key in kept.items() if key in counts},
        }

    def _serve(self, k: int) -> None:
        self.close()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [
            PROGRAMS / "llama-server", "--host", "127.0.0.1", "--port", port, "--parallel", 1,
            "--ctx-size", 1024, "--threads", self.threads, "--model", _file(self.target),
            "--cache-ram", 0,
        ]  # fmt: skip
        if "-fp32-" in Path(self.target).name:
            command += ["--cache-type-k", "f32", "--cache-type-v", "f32"]
        if self.draft and k:
            command += ["--spec-type", "draft-simple", "--spec-draft-n-max", k]
            command += ["--spec-draft-model", _file(self.draft)]
        number, log = tempfile.mkstemp()
        process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.DEVNULL, stdout=number, stderr=number
        )
        os.close(number)
        self.server = Server(process, port, k, log)
        self._wait()

    def _wait(self) -> None:
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self.server.process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.server.port}/health"):
                    return
            except OSError:
                time.sleep(0.05)
        lines = Path(self.server.log).read_text("utf-8", "replace").strip().splitlines()
        self.close()
        raise RuntimeError(f"llama-server does not answer: {(lines or ['it said nothing'])[-1]}")

    def close(self) -> None:
        if self.server is not None:
            self.server.process.kill()
            self.server.process.wait()
            Path(self.server.log).unlink()
            self.server = None


def _file(folder: str) -> str:
    return str(Path(folder, "model.gguf"))


def _convert(place: Path, source: str, precision: str) -> None:
    place.mkdir()
    whole = place / "whole.gguf"
    script = str(TREE / "convert_hf_to_gguf.py")
    command = [sys.executable, "-c", CONVERT, str(TREE), script, source]
    _run([*command, "--outtype", "f32", "--outfile", str(whole)])
    if precision == "fp32":
        whole.rename(place / "model.gguf")
    else:
        quantise = str(PROGRAMS / "llama-quantize")
        _run([quantise, str(whole), str(place / "model.gguf"), TYPES[precision]])
        whole.unlink()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["it said nothing"])[-1])


if __name__ == "__main__":
    peer = LlamaCpp()
    try:
        serve(peer)
    finally:
        peer.close()
