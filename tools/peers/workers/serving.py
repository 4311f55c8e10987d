"""Protocol of the workers: JSON requests as lines on stdin, JSON answers as lines on stdout.

    {"op": "convert", "source": PATH, "precision": NAME, "cache": FOLDER, "draft": PATH}
    {"op": "load", "model": PATH, "threads": N, options of the library}
    {"op": "generate", "prompt": [ids], "tokens": N, "k": K or "auto", "drafter": NAME}
    {"op": "passes", "prompt": [ids], "lengths": [T, ...], "repeats": N}
    {"op": "reference", "windows": FILE, "folder": FOLDER}
    {"op": "quality", "windows": FILE, "reference": FOLDER}

A worker passes a `Peer` to `serve`. The module requires only the standard library and NumPy, so
that it runs in the environment of any library. The answer to a failed request has an "error".
"draft" (a draft model) and "drafter" are for libraries of which speculative decoding is measured: a
drafter is "model", "lookup" (prompt lookup) or another one of the library.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import quality

WARM_UP = 2  # passes of each length before timing


class Peer(Protocol):
    """Library with at most one loaded model."""

    def convert(self, source: str, precision: str, cache: str) -> Path:
        """Return the converted model's path, from the cache if it exists.

        Args:
            source: The published GGUF file, or the same weights as a float32 checkpoint folder.
            precision: One of the library's precisions.
            cache: Folder of converted models.
        """

    def num_bytes(self, model: Path) -> int:
        """Return the size of the weights on disk."""

    def load(self, model: Path, threads: int) -> str:
        """Load a converted model and return the library's version."""

    def generate(self, prompt: list[int], tokens: int, k: int | str) -> dict[str, Any]:
        """Generate greedily past end tokens without reusing an earlier request's cache.

        Returns:
            "tokens", "prefill_seconds" (until the first token), "decode_seconds", and "accepted"
            and "drafted" where the library counts them.
        """

    def prefill(self, tokens: list[int]) -> None:
        """Process the tokens with an empty cache."""

    def run_pass(self, tokens: list[int]) -> None:
        """Run one pass after the prefill, and roll it back if the library supports that."""

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Return the logits of a text with an empty cache, [T, V]."""


def serve(peer: Peer) -> None:
    """Answer requests until stdin ends; redirect other output to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(_answer(peer, json.loads(line))) + "\n")


def _answer(peer: Peer, request: dict[str, Any]) -> dict[str, Any]:
    arguments = {key: value for key, value in request.items() if key != "op"}
    try:
        match request["op"]:
            case "convert":
                model = peer.convert(**arguments)
                return {"model": str(model), "bytes": peer.num_bytes(model)}
            case "load":
                model = Path(arguments.pop("model"))
                return {"version": peer.load(model, **arguments)}
            case "generate":
                return peer.generate(**arguments)
            case "passes":
                return {"seconds_by_length": time_passes(peer, **arguments)}
            case "reference":
                paths = map(Path, (arguments["windows"], arguments["folder"]))
                quality.write_reference(peer.logits, *paths, dtype=np.float32)
                return {}
            case "quality":
                return quality.measure(peer.logits, **arguments)
            case other:
                raise ValueError(f"unknown op {other}")
    except Exception as error:  # any error of a library is the answer
        return {"error": f"{type(error).__name__}: {error}"}


def time_passes(
    peer: Peer, prompt: list[int], lengths: Sequence[int], repeats: int
) -> list[list[float]]:
    """Return the seconds of alternating passes of each length after a prompt."""
    peer.prefill(prompt)
    times: list[list[float]] = [[] for _ in lengths]
    for repeat in range(WARM_UP + repeats):
        for length, seconds in zip(lengths, times, strict=True):
            start = time.perf_counter()
            peer.run_pass(prompt[:length])
            if repeat >= WARM_UP:
                seconds.append(time.perf_counter() - start)
    return times


def cached(cache: str, source: str, name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder that `make` creates, once for each state of the source."""
    files = sorted(Path(source).iterdir()) if Path(source).is_dir() else [Path(source)]
    digest = hashlib.sha256()
    for path in files:
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    folder = Path(cache, f"{name}-{digest.hexdigest()[:12]}")
    if not folder.exists():
        Path(cache).mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=cache, prefix=".new."))
        try:
            make(temporary / "model")
            os.rename(temporary / "model", folder)
        finally:
            shutil.rmtree(temporary)
    return folder


def linked(cache: str, source: str, name: str, links: dict[str, str]) -> Path:
    """Return a folder with links by name, once for each state of the source."""

    def make(folder: Path) -> None:
        folder.mkdir()
        for link, target in links.items():
            (folder / link).symlink_to(target)

    return cached(cache, source, name, make)


def size_of(*paths: Path) -> int:
    """Return the bytes of files."""
    return sum(path.stat().st_size for path in paths)


def run_converter(command: list[str]) -> None:
    """Run a command of a library's converter; raise RuntimeError with its last line if it fails."""
    process = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    sys.stderr.write(process.stderr)
    if process.returncode:
        raise RuntimeError(process.stderr.strip().splitlines()[-1])


class FirstToken:
    """Clock that separates prefill from decoding."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._first: float | None = None

    def arrived(self) -> None:
        """Record the arrival of a token; only the first call counts."""
        if self._first is None:
            self._first = time.perf_counter()

    def split(self) -> dict[str, float]:
        """Return the seconds until the first token and after it."""
        end = time.perf_counter()
        first = end if self._first is None else self._first
        return {"prefill_seconds": first - self._start, "decode_seconds": end - first}
