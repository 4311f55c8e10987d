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
    """Executor of up to `MAX_CONCURRENT` compilations, first in, first out.

    A compilation of more than `PATIENCE` seconds lets the next one begin and continues at the
    lowest priority (on Linux, where threads have priorities). At most `MAX_OVERRUNS` may do so.
    """

    def __init__(self) -> None:
        self.permits = threading.Semaphore(MAX_CONCURRENT)
        self.lock = threading.Lock()
        self.num_overruns = 0

    def begin(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` in a daemon thread, unless its future is cancelled before it begins."""
        future: Future[T] = Future()
        threading.Thread(target=self._run, args=(work, future), daemon=True).start()
        return future

    def _run(self, work: Callable[[], T], future: Future[T]) -> None:
        with _Permit(self):
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)


class _Permit:
    """Permission of one thread to compile."""

    def __init__(self, compilations: Compilations) -> None:
        self._all = compilations
        self._thread = threading.get_native_id()
        self._overran = self._ended = False

    def __enter__(self) -> None:
        self._all.permits.acquire()
        self._start_timer()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._all.lock:
            self._ended = True
            if self._overran:
                self._all.num_overruns -= 1
            else:
                self._all.permits.release()

    def _start_timer(self) -> None:
        self._timer = threading.Timer(PATIENCE, self._overrun)
        self._timer.daemon = True
        self._timer.start()

    def _overrun(self) -> None:
        """Let the next compilation begin, or retry later if too many run."""
        with self._all.lock:
            if self._ended:
                return
            if self._all.num_overruns == MAX_OVERRUNS:
                self._start_timer()
                return
            self._overran = True
            self._all.num_overruns += 1
            self._all.permits.release()
            if sys.platform == "linux":
                with suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, self._thread, LOWEST_PRIORITY)
