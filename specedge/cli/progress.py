"""How far a long command is where stderr is no terminal and shows no bar: a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable

import click

EVERY = 10.0  # seconds


class Lines:
    """Says on stderr how far the work is, at most every ten seconds; `off` beside a bar."""

    def __init__(
        self, off: bool, every: float = EVERY, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._off, self._every, self._clock = off, every, clock
        self._told = clock()

    def tell(self, what: str, share: float) -> None:
        """Say what is done, and which share of all is."""
        if not self._off and self._clock() - self._told >= self._every:
            self._told = self._clock()
            click.echo(f"{what}: {min(share, 1):.0%}", err=True)
