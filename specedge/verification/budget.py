"""The time that an audit may take, and how its checks share it."""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """Seconds since it was made; `watch` is told of them whenever a check asks for the time."""

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        watch: Callable[[float], None] = lambda used: None,
    ) -> None:
        self._now = now
        self._watch = watch
        self._start = now()

    @property
    def used(self) -> float:
        """Seconds so far."""
        used = self._now() - self._start
        self._watch(used)
        return used


class Budget:
    """Time up to an end, in seconds of a clock."""

    def __init__(self, end: float, clock: Clock) -> None:
        self.clock = clock
        self._end = end

    @property
    def end(self) -> float:
        """Seconds of the clock at which it ends."""
        return self._end

    def extend(self, seconds: float) -> None:
        """Move the end to so many seconds of the clock, unless it is later already."""
        self._end = max(self._end, seconds)

    @property
    def left(self) -> float:
        """Seconds until its end, below 0 behind it."""
        return self._end - self.clock.used

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return self.left <= 0

    def share(self, fraction: float) -> Budget:
        """A part of what is left, from now on."""
        used = self.clock.used
        return Budget(used + fraction * max(0.0, self._end - used), self.clock)
