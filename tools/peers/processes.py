"""Workers as processes: requests as lines of JSON, and as many at a time as fit in memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATIENCE = 3600.0  # seconds for an answer; a conversion takes the longest
GUESS = 3  # times the size of the files is what a model takes, before it was measured


class WorkerError(Exception):
    """A request that failed, or a worker that ended."""


@dataclass(frozen=True)
class Loaded:
    """What a process holds. Without `draft_precision` there is no draft."""

    peer: str
    precision: str
    draft_precision: str | None
    threads: int


class Worker:
    """A worker's process and those that it starts; use it as a context."""

    def __init__(
        self,
        command: list[str],
        log: Path,
        environment: dict[str, str],
        patience: float = PATIENCE,
    ) -> None:
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environment,
                start_new_session=True,
            )
        self._log, self._patience, self._is_late = log, patience, False

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and wait for its answer. Raises WorkerError."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        alarm = threading.Timer(self._patience, self._give_up)
        alarm.start()
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            alarm.cancel()
        if not line:
            self.close()
            if self._is_late:
                raise WorkerError(f"no answer to {op} in {self._patience:g} seconds")
            raise WorkerError(f"ended with {self._process.returncode}: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"].strip().splitlines()[0])
        return answer

    def close(self) -> None:
        """End the process by the end of its input, and by force where that does not help."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(60)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _give_up(self) -> None:
        self._is_late = True
        self._kill()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _last_words(self) -> str:
        lines = self._log.read_text("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


class Pool:
    """Loaded workers; the one that was used longest ago makes room."""

    def __init__(
        self,
        start: Callable[[Loaded], tuple[Worker, dict[str, Any]]],
        guess: Callable[[Loaded], float],
        limit: float,
    ) -> None:
        """`start` gives a loaded worker and its answer; `guess` and `limit` are bytes."""
        self._start, self._guess, self._limit = start, guess, limit
        self._live: OrderedDict[Loaded, Worker] = OrderedDict()
        self._bytes: dict[Loaded, float] = {}
        self.answers: dict[Loaded, list[dict[str, Any]]] = {}

    def ask(self, loaded: Loaded, **request: Any) -> dict[str, Any]:
        """A generation by what is loaded, or now is. Raises WorkerError."""
        worker = self._get(loaded)
        try:
            answer = worker.ask("generate", **request)
        except WorkerError:
            del self._live[loaded]
            worker.close()
            raise
        self._bytes[loaded] = answer["peak_bytes"]
        return answer

    def peak_bytes(self, loaded: Loaded) -> float:
        """The most that its process had resident."""
        return self._bytes[loaded]

    def close(self) -> None:
        while self._live:
            self._live.popitem(last=False)[1].close()

    def _get(self, loaded: Loaded) -> Worker:
        if loaded in self._live:
            self._live.move_to_end(loaded)
            return self._live[loaded]
        while self._live and self._size(loaded) + sum(map(self._size, self._live)) > self._limit:
            self._live.popitem(last=False)[1].close()
        worker, answer = self._start(loaded)
        self._live[loaded] = worker
        self.answers.setdefault(loaded, []).append(answer)
        return worker

    def _size(self, loaded: Loaded) -> float:
        return self._bytes.get(loaded) or self._guess(loaded)
