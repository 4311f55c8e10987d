"""Slots of a pipeline: each has caches of its own, all share the weights."""

from __future__ import annotations

import asyncio
import gc
import itertools
import queue
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from specedge.errors import SpecEdgeError

from ..decoding.invariance import Noise
from ..decoding.protocols import LoadedModel, TargetModel
from ..decoding.timing import Stopwatch
from .turns import Turns

_CLOSED = "this pipeline is closed; load the bundle again"
COLLECTION_DELAY = 1.0  # seconds without progress, until what may be abandoned is collected
IDLE_TIMEOUT = 30.0  # seconds that a request waits for a slot while no stream makes progress


@dataclass(eq=False)
class Slot:
    """A cache of each model, which one stream owns at a time.

    `lease` frees the slot, once: when it is called, or when the owner is garbage-collected.
    """

    target: TargetModel
    draft: LoadedModel | None
    noise: Noise
    lease: weakref.finalize[..., object] | None = field(default=None, init=False)
    last_used: int = field(default=0, init=False)

    @property
    def is_free(self) -> bool:
        """Return True if no stream owns it."""
        return self.lease is None

    def is_owned_by(self, owner: object) -> bool:
        """Return True if it is this object's."""
        alive = self.lease.peek() if self.lease is not None else None
        return alive is not None and alive[0] is owner


class Slots:
    """The slots, which requests get in no order. Hold `turns` for a round, and no longer."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.all = tuple(slots)
        self.turns = Turns()
        self._lock = threading.Lock()
        self._clock = itertools.count(1)
        # Wakes requests that wait. A queue of this type may be put to wherever garbage is
        # collected, even inside its own `get`, which no lock and no condition allows.
        self._freed: queue.SimpleQueue[None] = queue.SimpleQueue()

    def take(self, owner: object, prompt: Sequence[int], wait: bool) -> Slot:
        """Give the owner a free slot until it is freed or its owner is collected.

        Prefers the slot whose cache shares the longest prefix with the prompt, then the least
        recently used one. If none is free, waits for one. No thread and no task owns a slot, so a
        request never ends a stream, not even one that its own thread began.

        Raises:
            SpecEdgeError: The pipeline is closed; or no slot is free and `wait` is False, waiting
                would block an event loop or could never end, or no stream made progress for
                `IDLE_TIMEOUT` seconds.
        """
        slot = self._leased(owner, prompt)
        if slot is not None:
            with suppress(queue.Empty):
                self._freed.get_nowait()  # this slot's wake-up, which nobody needs any more
            return slot
        while slot is None:
            if not wait:
                raise SpecEdgeError(self._taken("; wait for a stream to end, close one"))
            self._wait()
            slot = self._leased(owner, prompt)
        return slot

    def has_others(self, owner: object) -> bool:
        """Return True if streams other than the owner have slots."""
        return any(not slot.is_free and not slot.is_owned_by(owner) for slot in self.all)

    def give_back(self, owner: object) -> None:
        """Free the owner's slot, if it still has one."""
        for slot in self.all:
            if slot.is_owned_by(owner) and (lease := slot.lease):
                lease()

    @contextmanager
    def outside_turn(self, watch: Stopwatch) -> Iterator[None]:
        """Let other streams have turns during a block inside a round, which does not count it.

        Raises:
            SpecEdgeError: The pipeline was closed meanwhile.
        """
        with watch.part("waiting"), self.turns.released():
            yield
        if not self.all:
            raise SpecEdgeError(_CLOSED)

    def close(self) -> tuple[Slot, ...]:
        """Take all slots from their owners for good, between rounds."""
        with self.turns, self._lock:
            closed, self.all = self.all, ()
        self._freed.put(None)
        return closed

    def _leased(self, owner: object, prompt: Sequence[int]) -> Slot | None:
        """Return a slot that is now the owner's, None if none is free."""
        with self._lock:
            if not self.all:
                self._freed.put(None)  # for the next one that waits
                raise SpecEdgeError(_CLOSED)
            free = [slot for slot in self.all if slot.is_free]
            if not free:
                return None
            slot = free[0]
            if len(free) > 1:
                slot = max(free, key=lambda slot: (slot.target.shared(prompt), -slot.last_used))
            slot.lease = weakref.finalize(owner, self._free, slot)
            slot.lease.atexit = False
            slot.last_used = next(self._clock)
        return slot

    def _free(self, slot: Slot) -> None:
        """Run by a lease, perhaps in the midst of anything in any thread, so it takes no lock."""
        slot.last_used = next(self._clock)
        slot.lease = None
        self._freed.put(None)

    def _wait(self) -> None:
        """Wait until a slot may be free."""
        reason = None
        if _runs_event_loop():
            reason = "; waiting would block this thread's event loop: use `astream`, close a stream"
        elif threading.active_count() == 1:
            reason = (
                "; waiting in this process's only thread would never end: finish or close a stream"
            )
        elif self._has_progress(COLLECTION_DELAY):
            return
        gc.collect()  # what nobody reads any more may be in a reference cycle
        if not self.all or any(slot.is_free for slot in self.all):
            return
        if reason is None:
            if self._has_progress(IDLE_TIMEOUT):
                return
            reason = f"; nobody read a stream for {IDLE_TIMEOUT:g} seconds: finish or close one"
        raise SpecEdgeError(self._taken(reason))

    def _has_progress(self, seconds: float) -> bool:
        """Wait for a slot; return False if no round ran for as long as that may take."""
        num_before = self.turns.num_begun
        try:
            self._freed.get(timeout=seconds)
        except queue.Empty:
            return self.turns.is_taken or self.turns.num_begun > num_before
        return True

    def _taken(self, reason: str) -> str:
        count = len(self.all)
        taken = "the slot" if count == 1 else f"all {count} slots"
        by = "is taken by an unfinished stream" if count == 1 else "are taken by unfinished streams"
        return f"{taken} of this pipeline {by}{reason}, or load the pipeline with more slots"


def _runs_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
