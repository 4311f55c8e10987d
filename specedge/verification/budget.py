"""Time limit of an audit, and its distribution among checks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


class Clock:
    """Seconds since creation; `watch` is called with them whenever a check reads the time."""

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


@dataclass
class Budget:
    """Time up to an end, in seconds of a clock."""

    end: float
    clock: Clock

    def extend(self, seconds: float) -> None:
        """Move the end to a later time of the clock."""
        self.end = max(self.end, seconds)

    @property
    def left(self) -> float:
        """Seconds until the end; negative after it."""
        return self.end - self.clock.used

    @property
    def over(self) -> bool:
        """True if the time is up."""
        return self.left <= 0

    def share(self, fraction: float) -> Budget:
        """Return a budget of a fraction of the remaining time."""
        used = self.clock.used
        return Budget(used + fraction * max(0.0, self.end - used), self.clock)
