"""Asking a process of its own, which may crash or hang: that is an answer, too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

from specedge.telemetry import VARIABLE

SECONDS = 120.0  # a driver that wakes a GPU takes some, building an engine more
LONGEST = 4000  # characters of what it logged


@dataclass(frozen=True)
class Answer:
    """What a process told: its facts, how it ended if not well, and the end of its log."""

    facts: dict[str, Any] = field(default_factory=dict)
    ended: str | None = None
    log: str = ""


def ask(question: str, *arguments: str, seconds: float = SECONDS) -> Answer:
    """Put a question of `probe` to a new Python, which imports from where this one does."""
    if not sys.executable or getattr(sys, "frozen", False):
        return Answer(ended="cannot be asked: this program is not Python itself")
    command = [sys.executable, "-P", "-X", "faulthandler", "-m", f"{__package__}.probe"]
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    try:
        done = subprocess.run(
            [*command, question, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            env={VARIABLE: "1"} | os.environ | {"PYTHONPATH": paths},
        )
    except subprocess.TimeoutExpired as error:
        return _answer(error.stdout or b"", error.stderr or b"", f"no end in {seconds:g} s")
    ended = None if done.returncode == 0 else _end(done.returncode)
    return _answer(done.stdout, done.stderr, ended)


def _answer(out: bytes, log: bytes, ended: str | None) -> Answer:
    facts: dict[str, Any] = {}
    for line in out.splitlines(keepends=True):
        if line.endswith(b"\n"):  # the last may have been cut
            facts |= json.loads(line)
    if ended and (stage := facts.get("stage")):
        ended = f"{ended} while {stage}"
    return Answer(facts, ended, log.decode("utf-8", "replace")[-LONGEST:])


def _end(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"ended by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"ended by signal {-code}"
