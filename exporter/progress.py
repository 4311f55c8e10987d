"""Progress reports of an export."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

Advance = Callable[[int], None]


class Progress:
    """Collector of notes and times without output; the command line subclasses it to draw bars."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.seconds: dict[str, float] = {}

    def note(self, text: str) -> None:
        """Record a message for the user that does not stop the export."""
        if text not in self.notes:
            self.notes.append(text)

    @contextlib.contextmanager
    def step(self, description: str, total: int | None = None) -> Iterator[Advance]:
        """Time a step; call the yielded function with each amount of `total` that is done.

        Steps with the same description are added up.
        """
        start = time.perf_counter()
        with self.shown(description, total) as advance:
            yield advance
        elapsed = time.perf_counter() - start
        self.seconds[description] = self.seconds.get(description, 0.0) + elapsed

    @contextlib.contextmanager
    def shown(self, description: str, total: int | None) -> Iterator[Advance]:
        """Display a step; overridden by callers with a display."""
        yield lambda amount: None
