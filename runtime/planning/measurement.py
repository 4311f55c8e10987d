"""Measurement of a loaded bundle's pass costs and host work, at load and by `specedge tune`."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, median
from typing import Any

import numpy as np

from specedge.bundle import Bundle
from specedge.options import Sampling

from ..drafters.draft_model import DraftModel
from ..loop.decoding import SpeculativeDecoder
from ..loop.timing import Stopwatch
from ..sampling.history import History
from ..sampling.scores import Scores
from .cost_table import CostTable, ModeCosts
from .plans import Fixed

LENGTH = 64  # tokens in the caches at load
SECONDS, MIN_SWEEPS = 0.06, 3  # at load; up to PATIENCE times as long while others have the cores
PATIENCE = 5
SLOW = 0.5  # seconds of the self-test's passes from which on they are not timed again
PASS_LENGTHS = (1, 2, 3, 4, 5, 7, 9)  # and the longest: kernels work on tiles of a few rows
READ_LENGTH = 64  # tokens of the draft's timed prefill
MIN_CONTEXT = 4  # tokens that the shortest drafted round needs
STEP = 1.1  # ratio of neighboring values on the grid that costs are rounded to
BUSY = 1.5  # mean ratio of a pass's median to its minimum from which on others have the cores
HOST_DRAFT_TOKENS, HOST_ROUNDS = 8, 5  # of the rounds that the host's work is measured with

Progress = Callable[[float], None]  # called with the share of the work that is done
Kind = tuple[str, int, int]  # of a pass: its use, the tokens in the cache, and its own


@dataclass(frozen=True)
class Models:
    """The models to measure and their context lengths; `draft` is None in a bundle without one."""

    target: Any
    target_context: int
    draft: Any = None
    draft_context: int = 0

    @classmethod
    def of(cls, bundle: Bundle, target: Any, draft: Any) -> Models:
        """Return the models of a bundle, which are loaded."""
        if bundle.draft is None:
            return cls(target, bundle.target.context_length)
        return cls(target, bundle.target.context_length, draft, bundle.draft.context_length)

    @property
    def context(self) -> int:
        """The number of tokens that fit into every cache."""
        contexts = [self.target_context, self.draft_context]
        return self.target_context if self.draft is None else min(contexts)


@dataclass(frozen=True)
class Measurement:
    """A complete cost table; `busy` if other programs used so much CPU that it is unreliable."""

    costs: CostTable
    busy: bool


def measure(
    models: Models,
    max_draft_tokens: int,
    *,
    origin: str = "load",
    lengths: Sequence[int] = (LENGTH,),
    seconds: float = SECONDS,
    samples: Mapping[int, float] | None = None,
    on_progress: Progress = lambda share: None,
) -> Measurement:
    """Time the passes and the host work of a bundle. Both caches are empty afterwards.

    Passes of the target follow passes of the draft, as in a round: alone they would find other
    data in the processor's caches. Sweeps go through all pass lengths, so that a busy moment slows
    none alone; a cost is the lower quartile over them, rounded to a grid.

    Args:
        models: Models to measure, with contexts of at least MIN_CONTEXT tokens.
        max_draft_tokens: Largest K to plan with.
        lengths: Numbers of tokens in the caches to measure at.
        seconds: Time for sweeps.
        samples: Seconds of the target's passes by length, from the self-test at load.
    """
    longest = min(max_draft_tokens, models.context - 1) + 1
    places = sorted({max(0, min(length, models.context - longest)) for length in lengths})
    known = samples or {}
    is_slow = 1 in known and len(known) > 1 and sum(known.values()) > SLOW
    rows = sorted(known if is_slow else {t for t in PASS_LENGTHS if t < longest} | {longest})
    times: defaultdict[Kind, list[float]] = defaultdict(list)
    begin, sweeps, share = time.perf_counter(), 0, 0.0
    while share < 1:
        for place in places:
            _sweep(models, place, rows[:2] if is_slow else rows, not is_slow, times)
        sweeps += 1
        patience = PATIENCE if sweeps >= MIN_SWEEPS and _is_busy(times) else 1
        share = (time.perf_counter() - begin) / (patience * seconds)
        share = 1.0 if is_slow else min(share, sweeps / MIN_SWEEPS)
        on_progress(min(share, 1.0))
    for place in places if is_slow else ():
        times |= {("target", place, t): [known[t]] for t in rows}
    _empty(models)
    modes = {
        mode: _mode_costs(times, places, rows, _host_costs(models.target, sampling, rows))
        for mode, sampling in (("greedy", Sampling()), ("sampled", Sampling(1.0)))
    }
    return Measurement(
        CostTable(origin, tuple(places), tuple(rows), **modes, threads=0), _is_busy(times)
    )


def _sweep(
    models: Models,
    place: int,
    rows: Sequence[int],
    with_target: bool,
    times: defaultdict[Kind, list[float]],
) -> None:
    """Time a round of each pass length behind `place` cached tokens, and the draft's prefill."""
    target, draft = models.target, models.draft
    for i, length in enumerate(rows):
        if draft is not None:
            num_fed = 1 + i % 2
            _fill(draft, place)
            first, later = _draft_seconds(models, place, num_fed)
            times["first", place, num_fed].append(first)
            times["later", place, 1].append(later)
        if with_target:
            _fill(target, place)
            times["target", place, length].append(_seconds(target.forward, [0] * length))
    if draft is not None:
        _fill(draft, place)
        count = min(READ_LENGTH, models.draft_context - place)
        times["reading", place, 1].append(_seconds(draft.prefill, [0] * count) / count)


def _draft_seconds(models: Models, place: int, num_fed: int) -> tuple[float, float]:
    """Return the seconds of a round's first draft pass, over `num_fed` tokens, and of its second.

    Where the model drafts several tokens in one call, each is its share of that.
    """
    draft, fed = models.draft, [0] * num_fed
    count = min(HOST_DRAFT_TOKENS, models.draft_context - place - num_fed)
    begin = time.perf_counter()
    history = History([0] * (place + num_fed))
    if draft.draft(fed, count, history, Sampling(), np.zeros(count)) is not None:
        share = (time.perf_counter() - begin) / count
        return share, share
    return _seconds(draft.forward, fed), _seconds(draft.forward, [0])


def _seconds(run: Callable[[list[int]], Any], tokens: list[int]) -> float:
    """Return the seconds of a pass, its likeliest token included, without which none is over."""
    begin = time.perf_counter()
    scores = run(tokens)
    if scores is not None:
        scores[0].largest(1)
    return time.perf_counter() - begin


def _fill(model: Any, place: int) -> None:
    """Take `place` rows of the cache for tokens: their values change no pass's time."""
    model.truncate(0)
    model.cache.extend([0] * place)


def _is_busy(times: Mapping[Kind, Sequence[float]]) -> bool:
    """Return True if other programs had the cores for much of the time."""
    return fmean(median(took) / min(took) for took in times.values()) > BUSY


def typical(times: Sequence[float]) -> float:
    """Return the lower quartile, which neither a cold first pass nor busy cores change."""
    return sorted(times)[len(times) // 4]


def _empty(models: Models) -> None:
    for model in (models.target, models.draft):
        if model is not None:
            model.truncate(0)


def _mode_costs(
    times: Mapping[Kind, Sequence[float]],
    places: Sequence[int],
    rows: Sequence[int],
    host: tuple[float, ...],
) -> ModeCosts:
    """Return the costs on the grid; a longer pass never costs less."""
    target, draft, pending, reading = [], [], [], []
    for place in places:
        passes = accumulate((typical(times["target", place, t]) for t in rows), max)
        target.append(_rounded(list(passes)))
        if ("later", place, 1) not in times:
            continue
        one, two = (
            typical(times.get(("first", place, n), times["later", place, 1])) for n in (1, 2)
        )
        first, later = on_grid(one), on_grid(typical(times["later", place, 1]))
        draft.append(tuple(first + later * (t - 2) for t in rows[1:]))
        pending.append(on_grid(max(0.0, two - one)))
        reading.append(on_grid(typical(times["reading", place, 1])))
    return ModeCosts(tuple(target), tuple(draft), tuple(pending), tuple(reading), host, {})


def _host_costs(target: Any, sampling: Sampling, rows: Sequence[int]) -> tuple[float, ...]:
    """Return the host's seconds of a round by pass length, with passes that take no time.

    They grow by the token, so two K tell them all.
    """
    logits = _logits(target)
    plain, drafted = (_host_seconds(logits, sampling, k) for k in (0, HOST_DRAFT_TOKENS))
    more = max(0.0, drafted - plain) / HOST_DRAFT_TOKENS
    return _rounded([plain + more * (t - 1) for t in rows])


def _logits(target: Any) -> np.ndarray[Any, Any]:
    """Return rows of logits as a drafted round has them."""
    row = target.forward([0]).array()
    target.truncate(0)
    row = np.random.default_rng(0).standard_normal(row.shape[1]).astype(row.dtype)
    return np.tile(4 * row, (HOST_DRAFT_TOKENS + 1, 1))


def _host_seconds(logits: np.ndarray[Any, Any], sampling: Sampling, k: int) -> float:
    """Return the host's seconds of a round with K draft tokens, all of which are accepted."""
    plan = Fixed(DraftModel(_Instant(logits)), k)
    decoder = SpeculativeDecoder(_Instant(logits), plan, Stopwatch())
    rounds = decoder.rounds([0] * 8, sampling, seed=0, max_new_tokens=1 << 20)
    next(rounds)
    times = []
    for _ in range(HOST_ROUNDS):
        begin = time.perf_counter()
        next(rounds)
        times.append(time.perf_counter() - begin)
    return typical(times)


class _Instant:
    """A language model whose passes take no time and always give the same logits."""

    def __init__(self, logits: np.ndarray[Any, Any]) -> None:
        self.length = 0
        self._logits = logits

    def forward(self, tokens: Sequence[int], num_rows: int | None = None) -> Scores:
        self.length += len(tokens)
        return Scores(self._logits[: len(tokens) if num_rows is None else num_rows])

    def prefill(self, tokens: Sequence[int]) -> None:
        self.length += len(tokens)

    def reuse(self, tokens: Sequence[int]) -> int:
        self.length = min(self.length, len(tokens))
        return self.length

    def truncate(self, length: int) -> None:
        self.length = length


def on_grid(seconds: float) -> float:
    """Return the nearest value of a geometric grid, so that noise seldom changes it; 0 is 0."""
    return STEP ** round(math.log(seconds, STEP)) if seconds else 0.0


def _rounded(costs: Sequence[float]) -> tuple[float, ...]:
    """Round the first of ascending costs and what the others take more: choices hang on that."""
    first = on_grid(costs[0])
    return tuple(first + on_grid(cost - costs[0]) for cost in costs)
