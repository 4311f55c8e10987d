"""A pipeline's places for requests: each has caches of its own, all share the weights."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

from specedge.errors import SpecEdgeError

from .exactness.row_noise import Noise
from .loop.model import LoadedModel, TargetModel
from .turns import Turns

_PAUSE = 0.02  # seconds between looks whether a slot was abandoned, which nothing tells


@dataclass(eq=False)
class Slot:
    """A cache of each model. It is its owner's until that gives it back, loses it, or is dropped,
    or the thread that took it has died.
    """

    target: TargetModel
    draft: LoadedModel
    noise: Noise
    owner: weakref.ref[object] | None = field(default=None, init=False)
    thread: threading.Thread | None = field(default=None, init=False)
    last_used: int = field(default=0, init=False)

    @property
    def is_free(self) -> bool:
        if self.owner is None or self.owner() is None or self.thread is None:
            return True
        return not self.thread.is_alive()


class Slots:
    """Gives requests their slots, in no order. `turns` is to be held for a round, and no longer."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.all = tuple(slots)
        self.turns = Turns()
        self._changed = threading.Condition()
        self._clock = 0

    def take(self, owner: object, prompt: Sequence[int], wait: bool) -> Slot:
        """A free slot, the one that has read most of the prompt's beginning; of those alike the one
        that was not used for longest.

        Where none is free, the calling thread's oldest request loses its slot; if that has none, it
        waits for others', or raises SpecEdgeError where it must not.
        """
        with self._changed:
            while (slot := self._best(prompt) or self._own()) is None:
                if not self.all:
                    raise SpecEdgeError("this pipeline is closed; load the bundle again")
                if not wait:
                    raise SpecEdgeError(self._taken())
                self._changed.wait(_PAUSE)
            slot.owner, slot.thread = weakref.ref(owner), threading.current_thread()
            self._used(slot)
            return slot

    def has(self, owner: object) -> bool:
        """Whether one of the slots is still its owner's."""
        return self._of(owner) is not None

    def give_back(self, owner: object) -> None:
        """Free the owner's slot, if it still has one."""
        with self._changed:
            if slot := self._of(owner):
                slot.owner = None
                self._used(slot)
                self._changed.notify_all()

    def close(self) -> tuple[Slot, ...]:
        """Take all slots from their owners for good, between rounds; they are none afterwards."""
        with self.turns, self._changed:
            closed, self.all = self.all, ()
        return closed

    def _of(self, owner: object) -> Slot | None:
        mine = (slot for slot in self.all if slot.owner is not None and slot.owner() is owner)
        return next(mine, None)

    def _best(self, prompt: Sequence[int]) -> Slot | None:
        free = [slot for slot in self.all if slot.is_free]
        if len(free) < 2:
            return next(iter(free), None)
        return max(free, key=lambda slot: (slot.target.shared(prompt), -slot.last_used))

    def _own(self) -> Slot | None:
        own = (slot for slot in self.all if slot.thread is threading.current_thread())
        return min(own, key=lambda slot: slot.last_used, default=None)

    def _used(self, slot: Slot) -> None:
        self._clock += 1
        slot.last_used = self._clock

    def _taken(self) -> str:
        if len(self.all) == 1:
            return (
                "another thread's request is running on this pipeline; wait for its end, "
                "cancel it, or load the pipeline with more slots"
            )
        return (
            f"other threads' requests run in all {len(self.all)} slots of this pipeline; wait for "
            "an end, cancel one, or load the pipeline with more slots"
        )
