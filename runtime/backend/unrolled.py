"""Drafting in one call of a device: a graph of K steps over the cache that passes use.

A device that computes apart from its host waits for it twice a pass, once to be told that a pass is
over and once to hand over its best logits. Such a graph needs no host between its steps.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import numpy as np

from specedge.options import Sampling

from ..decoding.verify import Draft
from ..sampling.distribution import Floats
from ..sampling.history import History
from .cache import Cache
from .model_session import ModelSession, Pass

_RUNS = 5  # of each way, of which the median counts


class OneCall(ABC):
    """A session of such a graph, bound to one cache."""

    examples: Sequence[Sampling]  # one of each kind of settings for which passes cost otherwise

    def __init__(self, session: ModelSession, cache: Cache) -> None:
        self._session, self._cache = session, cache
        self._passes: dict[int, Pass] = {}
        self._costs: dict[bool, float] = {}  # of a call in passes, by kind of settings

    def over(self, cache: Cache) -> Self:
        """The same over another cache."""
        other = copy.copy(self)
        other._cache, other._passes = cache, {}
        return other

    @property
    def num_steps(self) -> int:
        """K."""
        return self._session.num_drafted

    @abstractmethod
    def knows(self, history: History, sampling: Sampling) -> bool:
        """Whether its nodes are all that these settings ask for after a text."""

    @abstractmethod
    def draft(
        self,
        tokens: Sequence[int],
        count: int,
        history: History,
        sampling: Sampling,
        uniforms: Floats,
    ) -> Draft | None:
        """A draft of `count` tokens after these, 1 or 2, which end a text. All that was fed is then
        in the cache, which the last token was not. None, and nothing done, where it fails.

        Steps beyond `count` run, too; their rows are stale.
        """

    def is_faster(self, count: int, sampling: Sampling) -> bool:
        """Whether it drafts so many tokens faster than passes do; not under settings of a kind that
        was not measured, as a head of a few tokens has no examples of each.
        """
        num_calls = -(-count // self.num_steps)
        return num_calls * self._costs.get(self._kind(sampling), math.inf) < count

    def _kind(self, sampling: Sampling) -> bool:
        """What the cost of passes depends on."""
        return False

    def warm_up(self) -> None:
        """Let a GPU capture the graph for every number of tokens; the cache is then empty."""
        for length in (2, 1):
            self._cache.truncate(0)
            self._run([0] * length)
        self._cache.truncate(0)

    def _run(self, tokens: Sequence[int], told: Mapping[str, Any] | None = None) -> Pass:
        """Call it once. Of the rows that it writes those of these tokens alone are counted."""
        length = len(tokens)
        if length not in self._passes:
            self._passes[length] = self._session.bind(self._cache, length, 1, captured=True)
        bound = self._passes[length]
        self._session.run(bound, tokens, told)
        return bound

    def measure(self, step: Callable[[Sampling], object]) -> bool:
        """Compare a call with as many steps of the other way; the cache is then empty. Whether it
        is ever faster.
        """
        self.warm_up()
        numbers = np.full(self.num_steps, 0.5)
        for sampling in self.examples:
            call = partial(self.draft, [0], 1, History([0]), sampling, numbers)
            seconds = [self._median(way) for way in (call, partial(step, sampling))]
            self._costs[self._kind(sampling)] = seconds[0] / seconds[1]
        return min(self._costs.values()) < self.num_steps

    def _median(self, run: Callable[[], object]) -> float:
        found = []
        for _ in range(_RUNS):
            self._cache.truncate(0)
            start = time.perf_counter()
            run()
            found.append(time.perf_counter() - start)
        self._cache.truncate(0)
        return statistics.median(found)


class Unrolled(OneCall):
    """A graph of greedy steps."""

    examples = (Sampling(),)

    def knows(self, history: History, sampling: Sampling) -> bool:
        return sampling.greedy and not sampling.edits

    def draft(
        self,
        tokens: Sequence[int],
        count: int,
        history: History,
        sampling: Sampling,
        uniforms: Floats,
    ) -> Draft:
        """The `count` likeliest tokens, each after those before it."""
        drafted: list[int] = []
        while len(drafted) < count:
            bound = self._run(drafted[-1:] or tokens)
            found = self._session.buffers.fetch(bound.arrays["drafted"])[0].tolist()
            found = found[: count - len(drafted)]
            self._cache.extend(found[:-1])
            drafted += found
        return Draft(drafted)
