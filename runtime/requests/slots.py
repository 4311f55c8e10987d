"""Slots of a pipeline, their leases, and the scheduler of turns.

Each slot has separate caches; all share the weights.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from specedge.errors import SpecEdgeError

from ..decoding.invariance import LogitNoise
from ..decoding.protocols import ClosableModel, TargetModel
from ..decoding.timing import Stopwatch

_CLOSED = "this pipeline is closed; load the bundle again"
COLLECTION_DELAY = 1.0  # seconds without progress, until abandoned streams are collected
_IDLE_SECONDS = 0.01  # within which a running stream takes its next turn
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


class Slots:
    """Slots, which requests get in no order. Hold `turns` for a round, and no longer."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.all = tuple(slots)
        self.turns = FairLock()
        self._lock = threading.Lock()
        self._clock = itertools.count(1)
        # Wakes requests that wait. A queue of this type may be put to wherever garbage is
        # collected, even inside its own `get`, which no lock and no condition allows.
        self._freed: queue.SimpleQueue[None] = queue.SimpleQueue()

    def lease(self, prompt: Sequence[int], wait: bool) -> Lease:
        """Return a lease of a free slot.

        Prefers the slot whose cache shares the longest prefix with the prompt, then the least
        recently used one. If none is free, waits for one. No thread and no task owns a slot, so a
        request never ends a stream, not even one that its own thread began.

        Raises:
            SpecEdgeError: The pipeline is closed; or no slot is free and `wait` is False, waiting
                would block an event loop or could never end, or no stream made progress for
                `IDLE_TIMEOUT` seconds.
        """
        lease = self._try_lease(prompt)
        if lease is not None:
            with suppress(queue.Empty):
                self._freed.get_nowait()  # this slot's wake-up, which is no longer needed
            return lease
        while lease is None:
            if not wait:
                raise SpecEdgeError(self._taken("; wait for a stream to end, close one"))
            self._wait()
            lease = self._try_lease(prompt)
        return lease

    def share_turns(self, lease: Lease, seconds: float, is_cancelled: Callable[[], bool]) -> None:
        """Let other requests have turns after a chunk of a prompt, for twice as long as it took.

        A stream beside a long prompt then takes 1.5 times as long as alone, and up to two chunks.
        """
        if self.has_others(lease):
            self.turns.wait_for_others(2 * seconds, is_cancelled)

    def has_others(self, lease: Lease) -> bool:
        """Return True if other requests have slots."""
        return any(not slot.is_free and slot is not lease.slot for slot in self.all)

    @contextmanager
    def outside_turn(self, stopwatch: Stopwatch) -> Iterator[None]:
        """Let other streams have turns during a block inside a round, which does not count it.

        Raises:
            SpecEdgeError: The pipeline was closed meanwhile.
        """
        with stopwatch.part("waiting"), self.turns.released():
            yield
        if not self.all:
            raise SpecEdgeError(_CLOSED)

    def close(self) -> tuple[Slot, ...]:
        """Remove all slots between rounds, and return them."""
        with self.turns, self._lock:
            closed, self.all = self.all, ()
        self._freed.put(None)
        return closed

    def _try_lease(self, prompt: Sequence[int]) -> Lease | None:
        """Return a lease, None if no slot is free."""
        with self._lock:
            if not self.all:
                self._freed.put(None)  # wakes the next waiting request
                raise SpecEdgeError(_CLOSED)
            free = [slot for slot in self.all if slot.is_free]
            if not free:
                return None
            slot = free[0]
            if len(free) > 1:
                slot = max(free, key=lambda slot: (slot.target.shared(prompt), -slot.last_used))
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
        subject = "the slot" if count == 1 else f"all {count} slots"
        state = (
            "is occupied by an unfinished stream"
            if count == 1
            else "are occupied by unfinished streams"
        )
        return f"{subject} of this pipeline {state}{reason}, or load the pipeline with more slots"


class FairLock:
    """Lock that goes to the thread that has waited longest: turns of a scheduler.

    A thread that requests it again queues after all others. Python's own lock goes to any thread,
    often to the one that has just released it. `num_begun` counts turns.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_begun = 0
        self.busy_seconds = 0.0  # total seconds of completed turns
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
        except BaseException:  # an interrupt, possibly after the turn was handed over
            if not self._stop_waiting(turn):
                self._hand_over()
            raise

    def __exit__(self, *_: object) -> None:
        self._hand_over()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Release the lock for the block, and wait for another turn after it."""
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
        """Wait until others had turns for some seconds, or no thread takes one any more."""
        end, num_seen = self.busy_seconds + seconds, -1
        while self.busy_seconds < end and not is_cancelled():
            if not self._taken and self.num_begun == num_seen:
                return
            num_seen = self.num_begun
            threading.Event().wait(_IDLE_SECONDS)

    @property
    def is_taken(self) -> bool:
        """True while a thread has a turn."""
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

    def _stop_waiting(self, turn: threading.Lock) -> bool:
        """Return True if the turn was still waiting."""
        with self._lock:
            if turn not in self._waiting:
                return False
            self._waiting.remove(turn)
            return True


def _runs_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
