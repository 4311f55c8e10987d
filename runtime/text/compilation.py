"""Compilation of grammars in background threads.

llguidance takes from a millisecond to minutes, cannot be interrupted, and releases the GIL.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

MAX_CONCURRENT = 2
PATIENCE = 1.0  # seconds until a compilation no longer delays the next one
MAX_OVERRUNS = 6  # compilations beyond PATIENCE that may run in addition
LOWEST_PRIORITY = 19


class Compilations:
    """Executor of up to `MAX_CONCURRENT` compilations.

    A compilation of more than `PATIENCE` seconds lets another one begin and continues at the lowest
    priority (on Linux, where threads have priorities). At most `MAX_OVERRUNS` may do so.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: set[int] = set()  # threads that compile
        self._overrunning: set[int] = set()  # those that exceeded `PATIENCE`

    def begin(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` in a daemon thread, unless its future is cancelled before it begins."""
        future: Future[T] = Future()
        threading.Thread(target=self._run, args=(work, future), daemon=True).start()
        return future

    def _run(self, work: Callable[[], T], future: Future[T]) -> None:
        thread = threading.get_native_id()
        with self._changed:
            self._changed.wait_for(self._may_begin)
            self._running.add(thread)
        timer = threading.Timer(PATIENCE, self._overrun, [thread])
        timer.daemon = True
        timer.start()
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        finally:
            timer.cancel()
            with self._changed:
                self._running.discard(thread)
                self._overrunning.discard(thread)
                self._changed.notify_all()

    def _may_begin(self) -> bool:
        num_overruns = min(len(self._overrunning), MAX_OVERRUNS)
        return len(self._running) - num_overruns < MAX_CONCURRENT

    def _overrun(self, thread: int) -> None:
        """Let another compilation begin beside that of a thread."""
        with self._changed:
            if thread not in self._running:
                return
            self._overrunning.add(thread)
            self._changed.notify_all()
            if sys.platform == "linux":
                with suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, thread, LOWEST_PRIORITY)
