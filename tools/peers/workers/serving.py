"""What every worker shares: one request a line on stdin, one answer a line on stdout.

    {"op": "convert", "model": FOLDER, "draft": FOLDER, "precision": P, "draft_precision": Q,
     "cache": FOLDER}
    {"op": "load", "target": PLACE, "draft": PLACE or null, "threads": N}
    {"op": "generate", "prompt": [ids], "tokens": N, "k": K}

A worker is a `Peer` given to `serve`. Only the standard library is needed here, so each peer's own
Python can run it. An answer has "error" where a request failed; after that the next one is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol


class Peer(Protocol):
    """A library: places are what `convert` gave."""

    def convert(self, request: dict[str, Any]) -> dict[str, Any]:
        """{"target": place, "draft": place or None}, made in `request["cache"]` or found there."""

    def load(self, target: str, draft: str | None, threads: int) -> dict[str, Any]:
        """Facts to keep, such as versions."""

    def generate(self, prompt: list[int], tokens: int, k: int | str) -> dict[str, Any]:
        """{"tokens": ids, "prefill_seconds": s, "decode_seconds": s} and perhaps counts.

        Greedy, past end tokens; `k` is 0 without a draft, "auto" where the library chooses. The
        prefill ends with the first token.
        """


def serve(peer: Peer) -> None:
    """Answer until stdin ends. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(_answer(peer, json.loads(line))) + "\n")


def _answer(peer: Peer, request: dict[str, Any]) -> dict[str, Any]:
    start = time.perf_counter()
    arguments = {key: value for key, value in request.items() if key != "op"}
    try:
        match request["op"]:
            case "convert":
                found = peer.convert(arguments)
            case "load":
                found = peer.load(**arguments)
            case "generate":
                found = peer.generate(**arguments)
            case other:
                raise ValueError(f"unknown op {other}")
    except Exception as error:  # whatever a library raises is this request's answer
        return {"error": f"{type(error).__name__}: {error}"}
    return {"seconds": time.perf_counter() - start, "peak_bytes": peak_bytes(), **found}


def peak_bytes(process: int | str = "self") -> int:
    """The most memory that a process had resident, without what its parent had."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def cached(cache: str, sources: list[str], name: str, make: Callable[[Path], object]) -> str:
    """The folder that `make` fills, made once for what the source folders hold."""
    known = hashlib.sha256()
    for source in sources:
        for path in sorted(Path(source).iterdir()):
            facts = path.stat()
            known.update(f"{path.resolve()} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    folder = Path(cache, f"{name}-{known.hexdigest()[:12]}")
    if not folder.exists():
        Path(cache).mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=cache, prefix=".new."))
        try:
            make(temporary / "made")
            os.rename(temporary / "made", folder)
        finally:
            shutil.rmtree(temporary)
    return str(folder)


def each_model(
    request: dict[str, Any], peer: str, make: Callable[[Path, str, str], object]
) -> dict[str, Any]:
    """A conversion of each model on its own: `make(folder to write, source, precision)`."""

    def one(source: str | None, precision: str | None) -> str | None:
        if source is None or precision is None:
            return None
        name = f"{peer}-{precision}"
        return cached(
            request["cache"], [source], name, lambda place: make(place, source, precision)
        )

    return {
        "target": one(request["model"], request["precision"]),
        "draft": one(request["draft"], request["draft_precision"]),
    }


class FirstToken:
    """When the first token came: `prefill` and `decode` seconds of a generation."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._first: float | None = None

    def came(self) -> None:
        """A token is known; only the first time counts."""
        if self._first is None:
            self._first = time.perf_counter()

    def split(self) -> dict[str, float]:
        end = time.perf_counter()
        first = end if self._first is None else self._first
        return {"prefill_seconds": first - self._start, "decode_seconds": end - first}
