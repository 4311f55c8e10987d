"""Whose turn it is: the caches of a pipeline serve one request at a time, from whatever thread."""

from __future__ import annotations

import threading
import weakref

from specedge.errors import SpecEdgeError

_PAUSE = 0.02  # seconds between looks whether a turn was abandoned, which nothing tells


class Turns:
    """Gives requests the right to the caches, in no order. It ends when it is given back, taken
    over, or its owner is dropped. `round` is to be held while they are used, and no longer.
    """

    def __init__(self) -> None:
        self.round = threading.Lock()
        self._changed = threading.Condition()
        self._owner: weakref.ref[object] | None = None
        self._thread = threading.current_thread()

    def take(self, owner: object, wait: bool) -> None:
        """Take a turn for the calling thread, which loses the one it has, or waits for another's.

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
            self._owner, self._thread = weakref.ref(owner), threading.current_thread()

    def has(self, owner: object) -> bool:
        """Whether the turn is still its owner's."""
        return self._owner is not None and self._owner() is owner

    def give_back(self, owner: object) -> None:
        """End a turn; of one that was taken over nothing is left to end."""
        with self._changed:
            if self.has(owner):
                self._owner = None
                self._changed.notify_all()

    def _is_anothers(self) -> bool:
        if self._owner is None or self._owner() is None or not self._thread.is_alive():
            return False
        return self._thread is not threading.current_thread()
