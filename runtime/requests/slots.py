"""Slots of a pipeline and their leases.

Each slot has separate caches; all share the weights.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import queue
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from specedge.errors import SpecEdgeError

from ..decoding.invariance import LogitNoise
from ..decoding.protocols import ClosableModel, TargetModel
from ..sampling.source import Source
from .engine import CLOSED, Engine

COLLECTION_DELAY = 1.0  # seconds without progress, until abandoned streams are collected
IDLE_TIMEOUT = 30.0  # seconds that a request waits for a slot while no stream makes progress


@dataclass(eq=False)
class Slot:
    """Caches of each model, which one request leases at a time."""

    target: TargetModel
    draft: ClosableModel | None
    noise: LogitNoise
    is_free: bool = field(default=True, init=False)
    last_used: int = field(default=0, init=False)


class Lease:
    """Ownership of a slot until it is released, or the lease is garbage-collected."""

    def __init__(self, slot: Slot, slots: Slots) -> None:
        self.slot = slot
        self._finalizer = weakref.finalize(self, slots._free, slot)
        self._finalizer.atexit = False

    def release(self) -> None:
        """Free the slot, once."""
        self._finalizer()


class NoFreeSlotError(SpecEdgeError):
    """No slot is free for a request."""


class Slots:
    """Slots, which requests get in no order, and the engine that runs the passes in them."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.all = tuple(slots)
        self.engine = Engine()
        self._lock = threading.Lock()
        self._clock = itertools.count(1)
        # Wakes requests that wait. A queue of this type may be put to wherever garbage is
        # collected, even inside its own `get`, which no lock and no condition allows.
        self._freed: queue.SimpleQueue[None] = queue.SimpleQueue()

    def lease(self, prompt: Sequence[int], wait: bool, source: Source | None = None) -> Lease:
        """Return a lease of a free slot.

        Prefers the slot whose cache shares the longest prefix with the prompt, of the same source
        in an encoder-decoder, then the least recently used one. If none is free, waits for one. No
        thread and no task owns a slot, so a request never ends a stream, not even one that its own
        thread began.

        Raises:
            SpecEdgeError: The pipeline is closed; or no slot is free and `wait` is False, waiting
                would block an event loop or could never end, or no stream made progress for
                `IDLE_TIMEOUT` seconds.
        """
        lease = self._try_lease(prompt, source)
        if lease is not None:
            with suppress(queue.Empty):
                self._freed.get_nowait()  # this slot's wake-up, which is no longer needed
            return lease
        while lease is None:
            if not wait:
                raise NoFreeSlotError(self._taken("; wait for a stream to end, close one"))
            self._wait()
            lease = self._try_lease(prompt, source)
        return lease

    def num_sharing(self, slot: Slot) -> int:
        """Return the number of requests that share passes of the target with a slot's."""
        return self.engine.num_requests if getattr(slot.target, "batch", None) else 1

    def has_others(self, lease: Lease) -> bool:
        """Return True if other requests have slots."""
        return any(not slot.is_free and slot is not lease.slot for slot in self.all)

    def close(self) -> tuple[Slot, ...]:
        """End all requests between passes, remove all slots, and return them."""
        self.engine.close()
        with self._lock:
            closed, self.all = self.all, ()
        self._freed.put(None)
        return closed

    def _try_lease(self, prompt: Sequence[int], source: Source | None) -> Lease | None:
        """Return a lease, None if no slot is free."""
        with self._lock:
            if not self.all:
                self._freed.put(None)  # wakes the next waiting request
                raise SpecEdgeError(CLOSED)
            free = [slot for slot in self.all if slot.is_free]
            if not free:
                return None
            slot = free[0]
            if len(free) > 1:
                slot = max(
                    free, key=lambda slot: (slot.target.shared(prompt, source), -slot.last_used)
                )
            slot.is_free = False
            slot.last_used = next(self._clock)
            return Lease(slot, self)

    def _free(self, slot: Slot) -> None:
        """Free a slot. Leases may call it at any point of any thread, so it takes no lock."""
        slot.last_used = next(self._clock)
        slot.is_free = True
        self._freed.put(None)

    def _wait(self) -> None:
        """Wait until a slot may be free."""
        reason = None
        if _runs_event_loop():
            reason = "; waiting would block this thread's event loop: use `astream`, close a stream"
        elif threading.active_count() == 1:
            reason = (
                "; waiting in the only thread of this process would deadlock: finish or close a "
                "stream"
            )
        elif self._has_progress(COLLECTION_DELAY):
            return
        gc.collect()  # an abandoned stream may be in a reference cycle
        if not self.all or any(slot.is_free for slot in self.all):
            return
        if reason is None:
            if self._has_progress(IDLE_TIMEOUT):
                return
            reason = f"; no stream was read for {IDLE_TIMEOUT:g} seconds: finish or close one"
        raise NoFreeSlotError(self._taken(reason))

    def _has_progress(self, seconds: float) -> bool:
        """Wait for a slot; return False if no round ran for as long as that may take."""
        num_before = self.engine.num_passes
        try:
            self._freed.get(timeout=seconds)
        except queue.Empty:
            return self.engine.is_running or self.engine.num_passes > num_before
        return True

    def _taken(self, reason: str) -> str:
        count = len(self.all)
        subject = "the slot" if count == 1 else f"all {count} slots"
        state = (
            "is occupied by an unfinished stream"
            if count == 1
            else "are occupied by unfinished streams"
        )
        return f"{subject} of this pipeline {state}{reason}, or load the pipeline with more slots"


def _runs_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
