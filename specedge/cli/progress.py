"""How far a long command is: a bar if stderr is a terminal, else a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

EVERY = 10.0  # seconds


@contextmanager
def bar(
    what: str, total: float, *columns: ProgressColumn, off: bool = False, **options: Any
) -> Iterator[tuple[Callable[..., None], bool]]:
    """rich's `update` of a bar with more columns, and whether nothing is shown."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True)
    options |= {"console": console, "transient": True}
    off = off or not console.is_terminal  # rich would leave an empty line
    every = (TextColumn("{task.description}"), BarColumn(), *columns)
    with Progress(*every, disable=off, **options) as shown:
        yield partial(shown.update, shown.add_task(what, total=total)), off


@contextmanager
def told(what: str) -> Iterator[Callable[..., None]]:
    """A bar or lines; takes which share of the work is done, or what is done next."""
    from rich.progress import TimeRemainingColumn

    with bar(what, 1.0, TimeRemainingColumn()) as (update, off):
        lines = Lines(off=not off)

        def tell(share: float | None = None, next_: str | None = None) -> None:
            nonlocal what
            what = next_ or what
            update(completed=share, description=next_)
            if share is not None:
                lines.tell(what, share)

        yield tell


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
