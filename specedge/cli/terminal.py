"""Terminal output: sanitized text and progress of long commands."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from specedge.strict_json import escape_unprintable

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

MAX_LINE_LENGTH = 2000  # characters
REPORT_INTERVAL = 10.0  # seconds


def sanitize_line(text: str, longest: int = MAX_LINE_LENGTH) -> str:
    """Return one line of printable characters, others escaped, with a long middle elided."""
    if len(text) > longest:
        end = longest // 4
        text = f"{text[: longest - end]} [...] {text[-end:]}"
    return escape_unprintable(text)


def sanitize(text: str) -> str:
    """Return text with each line sanitized, of any length."""
    return "\n".join(sanitize_line(line, len(line)) for line in text.split("\n"))


def pluralize(number: int, noun: str) -> str:
    """Return a number with a noun in singular or plural."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@contextmanager
def progress_bar(
    step: str, total: float, *columns: ProgressColumn, hidden: bool = False, **options: Any
) -> Iterator[tuple[Callable[..., None], bool]]:
    """Yield the `update` function of a rich progress bar, and True if it is not shown."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True)
    options |= {"console": console, "transient": True}
    hidden = hidden or not console.is_terminal  # rich would print an empty line
    every = (TextColumn("{task.description}"), BarColumn(), *columns)
    with Progress(*every, disable=hidden, **options) as shown:
        yield partial(shown.update, shown.add_task(step, total=total)), hidden


@contextmanager
def progress_reports(step: str) -> Iterator[Callable[..., None]]:
    """Yield a function that reports progress by a bar, or by lines without a terminal.

    It takes the completed fraction, or the name of the next step as `next_`.
    """
    from rich.progress import TimeRemainingColumn

    with progress_bar(step, 1.0, TimeRemainingColumn()) as (update, hidden):
        lines = ProgressLines(hidden)

        def report(fraction: float | None = None, next_: str | None = None) -> None:
            nonlocal step
            step = next_ or step
            update(completed=fraction, description=next_)
            if fraction is not None:
                lines.report(step, fraction)

        yield report


class ProgressLines:
    """Progress reports on stderr, at most one every ten seconds."""

    def __init__(
        self,
        enabled: bool,
        interval: float = REPORT_INTERVAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._enabled, self._interval, self._clock = enabled, interval, clock
        self._last = clock()

    def report(self, step: str, fraction: float) -> None:
        """Report the completed fraction of a step."""
        if self._enabled and self._clock() - self._last >= self._interval:
            self._last = self._clock()
            click.echo(f"{step}: {min(fraction, 1):.0%}", err=True)
