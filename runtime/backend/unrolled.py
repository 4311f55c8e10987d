"""Drafting in one call of a device: a graph of K greedy steps over the cache that passes use.

A device that computes apart from its host waits for it twice a pass, once to be told that a pass is
over and once to hand over its best logits. Such a graph needs no host between its steps.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from .cache import Cache
from .model_session import ModelSession, Pass

_RUNS = 5  # of each way, of which the median counts


class Unrolled:
    """A session of such a graph, bound to one cache."""

    def __init__(self, session: ModelSession, cache: Cache) -> None:
        self._session, self._cache = session, cache
        self._passes: dict[int, Pass] = {}
        self.least = 1  # the fewest tokens that it drafts faster than passes do

    def over(self, cache: Cache) -> Unrolled:
        """The same over another cache."""
        other = Unrolled(self._session, cache)
        other.least = self.least
        return other

    @property
    def num_steps(self) -> int:
        """K."""
        return self._session.num_drafted

    def draft(self, tokens: Sequence[int], count: int) -> list[int]:
        """The `count` likeliest tokens after these, 1 or 2, each after those before it. All that
        was fed is then in the cache, which the last token was not.

        Steps beyond `count` run, too; their rows are stale.
        """
        drafted: list[int] = []
        while len(drafted) < count:
            fed = drafted[-1:] or tokens
            found = self._run(fed)[: count - len(drafted)]
            self._cache.extend(found[:-1])
            drafted += found
        return drafted

    def _run(self, tokens: Sequence[int]) -> list[int]:
        """The K tokens of one call, the rows of whose beginning alone are counted."""
        length = len(tokens)
        if length not in self._passes:
            self._passes[length] = self._session.bind(self._cache, length, 1, captured=True)
        bound = self._passes[length]
        self._session.run(bound, tokens)
        found: list[int] = self._session.buffers.fetch(bound.arrays["drafted"])[0].tolist()
        return found

    def warm_up(self) -> None:
        """Let a GPU capture the graph for every number of tokens; the cache is then empty."""
        for length in (2, 1):
            self._cache.truncate(0)
            self.draft([0] * length, self.num_steps)
        self._cache.truncate(0)

    def measure(self, step: Callable[[], object]) -> None:
        """Compare a call with as many steps of the other way; the cache is then empty."""
        self.warm_up()
        seconds = [self._median(way) for way in (lambda: self.draft([0], 1), step)]
        self.least = 1 + int(seconds[0] / seconds[1])

    def _median(self, run: Callable[[], object]) -> float:
        found = []
        for _ in range(_RUNS):
            self._cache.truncate(0)
            start = time.perf_counter()
            run()
            found.append(time.perf_counter() - start)
        self._cache.truncate(0)
        return statistics.median(found)
