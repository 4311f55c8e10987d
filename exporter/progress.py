"""What an export tells its caller while it works."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

Advance = Callable[[int], None]


class Progress:
    """Collects notes and times and shows nothing; the command line has one that draws bars."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.seconds: dict[str, float] = {}

    def note(self, text: str) -> None:
        """Something the user should know that stops nothing."""
        if text not in self.notes:
            self.notes.append(text)

    @contextlib.contextmanager
    def step(self, description: str, total: int | None = None) -> Iterator[Advance]:
        """A long step; call what is yielded with how much was done of `total`.

        Its seconds are added to those of earlier steps with the same description.
        """
        start = time.perf_counter()
        with self.shown(description, total) as advance:
            yield advance
        elapsed = time.perf_counter() - start
        self.seconds[description] = self.seconds.get(description, 0.0) + elapsed

    @contextlib.contextmanager
    def shown(self, description: str, total: int | None) -> Iterator[Advance]:
        """What the caller sees of a step: here nothing."""
        yield lambda amount: None
