"""Worker processes with a protocol of JSON lines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

PATIENCE = 3600.0  # seconds for an answer; a conversion takes the longest


class WorkerError(Exception):
    """Error of a failed request, or of a worker that ended."""


class Worker:
    """Process group of a worker, as a context manager."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str]) -> None:
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
        self._log, self._is_late = log, False

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and return its answer.

        Raises:
            WorkerError: The request failed or timed out, or the worker ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        alarm = threading.Timer(PATIENCE, self._give_up)
        alarm.start()
        try:
            self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except (BrokenPipeError, ValueError):  # it has ended, or was closed
            line = ""
        finally:
            alarm.cancel()
        if not line:
            self.close()
            if self._is_late:
                raise WorkerError(f"no answer to {op} in {PATIENCE:g} seconds")
            raise WorkerError(f"ended with {self._process.returncode}: {self._last_line()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"].strip().splitlines()[0])
        return answer

    def close(self) -> None:
        """End the process by closing its input, or by a signal if it does not end."""
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

    def _last_line(self) -> str:
        lines = self._log.read_text("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else "its log is empty"
