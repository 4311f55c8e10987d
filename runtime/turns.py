"""Whose turn it is: the caches of a pipeline serve one request at a time, from whatever thread."""

from __future__ import annotations

import threading
import weakref

from specedge.errors import SpecEdgeError

_PAUSE = 0.02  # seconds between looks whether a turn was abandoned, which nothing tells


class Turn:
    """A request's right to the caches; it ends when it is given back, taken over or dropped."""


class Turns:
    """Gives turns in no order. `round` is to be held while the caches are used, and no longer."""

    def __init__(self) -> None:
        self.round = threading.Lock()
        self._changed = threading.Condition()
        self._turn: weakref.ref[Turn] | None = None
        self._thread = threading.current_thread()

    def take(self, wait: bool) -> Turn:
        """A turn for the calling thread, which loses the one it has, or waits for another thread's.

        Raises SpecEdgeError where it would have to wait and must not.
        """
        with self._changed:
            while self._is_anothers():
                if not wait:
                    raise SpecEdgeError(
                        "another thread's request is running on this pipeline; wait for its end, "
                        "cancel it, or load a pipeline of your own"
                    )
                self._changed.wait(_PAUSE)
            turn = Turn()
            self._turn, self._thread = weakref.ref(turn), threading.current_thread()
        return turn

    def is_held(self, turn: Turn) -> bool:
        """Whether a turn is still its owner's."""
        return self._turn is not None and self._turn() is turn

    def give_back(self, turn: Turn) -> None:
        """End a turn; of one that was taken over nothing is left to end."""
        with self._changed:
            if self.is_held(turn):
                self._turn = None
                self._changed.notify_all()

    def _is_anothers(self) -> bool:
        if self._turn is None or self._turn() is None or not self._thread.is_alive():
            return False
        return self._thread is not threading.current_thread()
