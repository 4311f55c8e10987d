"""Progress reports of an export."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Advance = Callable[[int], None]

_RELIABLE_SHARE = 0.1  # part of a step after which its own pace predicts its end
_PREDICTED_SECONDS = 10.0  # predicted time after which the machine's measured speed has half weight


@dataclass
class _RunningStep:
    description: str
    start: float
    total: int | None
    amount: int = 0

    @property
    def share(self) -> float:
        """Completed share of the step; 0 if it does not report amounts."""
        return self.amount / self.total if self.total else 0.0


class Progress:
    """Collector of notes and times without output; the command line subclasses it to show them.

    Attributes:
        notes: Messages for the user.
        seconds: Durations of finished steps; steps with the same description are added up.
        predicted: Predicted durations of the steps, in order; some may be skipped.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.notes: list[str] = []
        self.seconds: dict[str, float] = {}
        self._clock, self._start = clock, clock()
        self.predicted: dict[str, float] = {}
        self._position = 0  # of the current step among the predicted ones
        self._running: _RunningStep | None = None
        self._fraction = 0.0

    def note(self, text: str) -> None:
        """Record a message for the user that does not stop the export."""
        if text not in self.notes:
            self.notes.append(text)

    @contextlib.contextmanager
    def step(self, description: str, total: int | None = None) -> Iterator[Advance]:
        """Time a step; call the yielded function with each amount of `total` that is done.

        The time of a step inside another one is its own only.
        """
        outer, running = self._running, _RunningStep(description, self._clock(), total)
        self._running = running
        if description in self.predicted:
            self._position = [*self.predicted].index(description)
        with self.shown(description, total) as advance:

            def record(amount: int) -> None:
                running.amount += amount
                advance(amount)

            yield record
        elapsed = self._clock() - running.start
        self.seconds[description] = self.seconds.get(description, 0.0) + elapsed
        if outer is not None:
            outer.start += elapsed
        self._running = outer

    @contextlib.contextmanager
    def shown(self, description: str, total: int | None) -> Iterator[Advance]:
        """Display a step; overridden by callers with a display."""
        yield lambda amount: None

    def remaining(self) -> float | None:
        """Return the predicted seconds until the end; None without predictions.

        The times of finished steps scale the predictions of the others.
        """
        if not self.predicted:
            return None
        steps, slowness = [*self.predicted.items()], self._slowness()
        (current, predicted), later = steps[self._position], steps[self._position + 1 :]
        left = slowness * predicted - self.seconds.get(current, 0.0)
        if (running := self._running) is not None:
            elapsed = self._clock() - running.start
            if running.share > _RELIABLE_SHARE:
                rest = elapsed * (1 - running.share) / running.share
                left = rest if running.description == current else left + rest
            elif running.description == current:
                left -= elapsed
        return max(left, 0.0) + slowness * sum(seconds for _, seconds in later)

    def fraction(self) -> float:
        """Return the completed share of the export, which never decreases."""
        elapsed, remaining = self._clock() - self._start, self.remaining()
        if remaining is not None and elapsed:
            self._fraction = max(self._fraction, elapsed / (elapsed + remaining))
        return self._fraction

    def _slowness(self) -> float:
        """Return the ratio of measured to predicted durations of the finished steps."""
        finished = [name for name in [*self.predicted][: self._position] if name in self.seconds]
        spent = sum(self.seconds[name] for name in finished)
        expected = sum(self.predicted[name] for name in finished)
        return (spent + _PREDICTED_SECONDS) / (expected + _PREDICTED_SECONDS)
