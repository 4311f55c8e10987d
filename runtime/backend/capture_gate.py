"""Keeps apart what CUDA forbids at the same time in a process: captures, and all that breaks one.

While any thread captures a graph, an allocation, a copy or the end of a session in another one
fails, and the capture with it. Passes are captured once, at load as a rule, so the gate is open.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache


class CaptureGate:
    """Lets any number of allocations and copies through, or one capture. Not to be entered twice by
    a thread: a capture that waits keeps new ones out.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._capturing, self._others = False, 0

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Held for a capture, alone."""
        with self._changed:
            self._changed.wait_for(lambda: not self._capturing)
            self._capturing = True
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._others)
            yield
        finally:
            with self._changed:
                self._capturing = False
                self._changed.notify_all()

    @contextmanager
    def others(self) -> Iterator[None]:
        """Held for what would break a capture."""
        with self._changed:
            self._changed.wait_for(lambda: not self._capturing)
            self._others += 1
        try:
            yield
        finally:
            with self._changed:
                self._others -= 1
                self._changed.notify_all()


@cache
def _made(index: int) -> CaptureGate:
    return CaptureGate()


_lock = threading.Lock()


def gate_of(index: int) -> CaptureGate:
    """The gate of a GPU."""
    with _lock:
        return _made(index)
