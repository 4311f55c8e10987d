"""What an export tells its caller while it works."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

Advance = Callable[[int], None]


class Progress:
    """Collects notes and shows nothing; the command line has one that draws bars."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        """Something the user should know that stops nothing."""
        if text not in self.notes:
            self.notes.append(text)

    @contextlib.contextmanager
    def step(self, description: str, total: int | None = None) -> Iterator[Advance]:
        """A long step; call what is yielded with how much was done of `total`."""
        yield lambda amount: None
