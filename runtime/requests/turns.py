"""A lock whose holders take turns."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_IDLE_SECONDS = 0.01  # in which a stream that goes on takes its next turn


class Turns:
    """A lock that goes to whoever has waited longest: who wants it again is behind all others.

    Python's own goes to anyone, often to whoever has just released it. `num_begun` counts turns.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_begun = 0
        self.busy_seconds = 0.0  # of turns that have ended
        self._start = 0.0
        self._taken = False
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                self.num_begun += 1
                self._start = time.perf_counter()
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        try:
            turn.acquire()  # until it is handed over
        except BaseException:  # an interrupt, perhaps of one that has its turn by now
            if not self._gave_up(turn):
                self._hand_over()
            raise

    def __exit__(self, *_: object) -> None:
        self._hand_over()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Give one's turn up for the block, and wait for the next one after it."""
        self._hand_over()
        try:
            yield
        finally:
            self._take_again()

    def _take_again(self) -> None:
        """Wait for a turn; an interrupt is raised only once there is one, for its holder to end."""
        interrupt: BaseException | None = None
        while True:
            try:
                self.__enter__()
            except BaseException as error:
                interrupt = error
            else:
                break
        if interrupt is not None:
            raise interrupt

    def wait_for_others(self, seconds: float, is_cancelled: Callable[[], bool]) -> None:
        """Wait until others had turns for some seconds, or nobody takes one any more."""
        end, num_seen = self.busy_seconds + seconds, -1
        while self.busy_seconds < end and not is_cancelled():
            if not self._taken and self.num_begun == num_seen:
                return
            num_seen = self.num_begun
            threading.Event().wait(_IDLE_SECONDS)

    @property
    def is_taken(self) -> bool:
        """Return True while somebody has a turn."""
        return self._taken

    def _hand_over(self) -> None:
        with self._lock:
            now = time.perf_counter()
            self.busy_seconds += now - self._start
            self._start = now
            if self._waiting:
                self.num_begun += 1
                self._waiting.popleft().release()
            else:
                self._taken = False

    def _gave_up(self, turn: threading.Lock) -> bool:
        """Whether it was still waiting."""
        with self._lock:
            if turn not in self._waiting:
                return False
            self._waiting.remove(turn)
            return True
