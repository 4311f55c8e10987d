"""Measurement of pass costs and host work of a loaded bundle, at load and by `specedge tune`."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, product
from statistics import fmean, median
from typing import Any

import numpy as np

from specedge.sampling_options import Sampling

from ..decoding.decoding import SpeculativeDecoder
from ..decoding.protocols import Drafter
from ..decoding.timing import Stopwatch, TimedModel
from ..drafters.draft_head import MAX_CONTEXT, DraftHead
from ..drafters.draft_model import DraftModel, ParallelDraftModel
from ..drafters.suffix import Suffix
from ..sampling.history import History
from .cost_table import CostTable, Measurement, ModeCosts, interpolate
from .plans import FixedPlan

LENGTH = 64  # cache length at load
SECONDS, MIN_SWEEPS = 0.12, 2  # time limit at load
PATIENCE = 3  # factor of the time limit while other programs use the cores
SLOW_SECONDS = 0.5  # if the passes of the self-test took longer, they are not timed again
PASS_LENGTHS = (1, 2, 3, 5, 9)  # in addition to the longest; kernels use tiles of a few rows
# K of timed rounds with the draft model. Those of multi-step graphs are timed at K + 1 = each row:
# a draft is some launches of a fixed number of steps, or passes where these are faster.
DRAFT_LENGTHS, DRAFT_LENGTHS_IF_SLOW = (1, 4), (2,)
NUM_ROUNDS = 1  # timed rounds for each K and mode in a sweep, after one warm-up round
PREFILL_LENGTH = 64  # tokens of the draft model's timed prefill
MIN_CONTEXT = 10  # context length that these rounds need
GRID_RATIO = 1.1  # ratio of neighboring values on the grid that costs are rounded to
BUSY_RATIO = 1.5  # ratio of a pass's median to its minimum that indicates other load
MIN_SECONDS = 1e-7  # lower bound of a draft pass, against noise
MODES = {"greedy": Sampling(), "sampled": Sampling(1.0)}

Progress = Callable[[float], None]  # called with the completed share of the work


def measure(
    target: Any,
    drafter: DraftModel | None,
    context_length: int,
    max_draft_tokens: int,
    *,
    origin: str = "load",
    lengths: Sequence[int] = (LENGTH,),
    seconds: float = SECONDS,
    samples: Mapping[int, float] | None = None,
    on_progress: Progress = lambda share: None,
) -> Measurement:
    """Time the passes and the host work of a bundle. Both caches are empty afterwards.

    Target passes are timed alone, and complete rounds in the decoding loop, with and without the
    draft model: a target pass takes longer after draft passes, and the difference is attributed to
    the draft. Each sweep times everything once, so that other load affects all costs alike. A cost
    is the minimum over sweeps, rounded to a grid, since the first passes of a process take up to
    twice as long.

    Args:
        target: Target model.
        drafter: Draft model; None in a bundle without one.
        context_length: Context length that both support, at least MIN_CONTEXT.
        max_draft_tokens: Largest K to plan with.
        lengths: Cache lengths to measure at.
        seconds: Time limit.
        samples: Seconds of target passes by length, from the self-test at load.
        origin: Origin recorded in the table.
        on_progress: Callback with the completed share of the work.
    """
    max_tokens = context_length - 1
    longest = min(max_draft_tokens + 1, max_tokens)
    samples = samples or {}
    is_slow = 1 in samples and len(samples) > 1 and sum(samples.values()) > SLOW_SECONDS
    rows = sorted(samples if is_slow else {t for t in PASS_LENGTHS if t < longest} | {longest})
    candidates = [0]
    times_launches = drafter is not None and drafter.drafts_on_device and not is_slow
    if times_launches:
        candidates += [t - 1 for t in rows[1:]]
    elif drafter is not None:
        # One K shows the cost of a pass for each token, but not of one pass for all.
        is_parallel = isinstance(drafter, ParallelDraftModel)
        candidates += DRAFT_LENGTHS_IF_SLOW if is_slow and not is_parallel else DRAFT_LENGTHS
    ks = [k for k in candidates if k < rows[-1] and 1 + (1 + NUM_ROUNDS) * (k + 1) < max_tokens]
    num_new = max(longest, 1 + (1 + NUM_ROUNDS) * (ks[-1] + 1))
    timings = [
        _Timings(target, drafter, context_length, length, rows, ks)
        for length in sorted({max(1, min(length, max_tokens - num_new)) for length in lengths})
    ]
    begin, sweeps, share = time.perf_counter(), 0, 0.0
    while share < 1:
        for timing in timings:
            timing.sweep(samples if is_slow else None)
        sweeps += 1
        is_busy = fmean(timing.disturbance for timing in timings) > BUSY_RATIO
        patience = PATIENCE if sweeps >= MIN_SWEEPS and is_busy else 1
        share = (time.perf_counter() - begin) / (patience * seconds)
        share = 1.0 if is_slow else min(share, sweeps / MIN_SWEEPS)
        on_progress(min(share, 1.0))
    target.truncate(0)
    if drafter is not None:
        drafter.model.truncate(0)
    greedy, sampled = (_mode_costs(mode, timings, times_launches) for mode in MODES)
    cache_lengths = tuple(timing.length for timing in timings)
    return Measurement(CostTable(origin, cache_lengths, tuple(rows), greedy, sampled, 0), is_busy)


class _Timings:
    """Timings at one cache length.

    Attributes:
        passes: Seconds of target passes. [sweeps][rows]
        rounds: Seconds of each round, seconds without its target pass, and its number of new
            tokens, by mode and K.
        prefill: Seconds per token of draft model prefill. [sweeps]
    """

    def __init__(
        self,
        target: Any,
        drafter: DraftModel | None,
        context_length: int,
        length: int,
        rows: Sequence[int],
        ks: Sequence[int],
    ) -> None:
        self._target, self._drafter, self._context_length = target, drafter, context_length
        self.length, self.rows, self.ks = length, rows, ks
        self.passes: list[list[float]] = []
        self.rounds: defaultdict[tuple[str, int], list[tuple[float, float, int]]]
        self.rounds = defaultdict(list)
        self.prefill: list[float] = []

    def sweep(self, passes: Mapping[int, float] | None) -> None:
        """Time everything once, except target passes whose seconds are passed in."""
        self.passes.append([passes[t] for t in self.rows] if passes else self._time_passes())
        for mode, k in product(MODES, self.ks):
            self._time_rounds(mode, k)
        if self._drafter is not None:
            _fill_draft(self._drafter, self.length)
            count = min(PREFILL_LENGTH, self._context_length - self.length)
            tokens = [0] * count
            begin = time.perf_counter()
            if isinstance(self._drafter, DraftHead):
                head = self._drafter.model
                states = np.zeros((count, head.observed.num_channels), np.float32)
                head.prefill(tokens, head.fuse(states))
            else:
                self._drafter.model.prefill(tokens)
            self.prefill.append((time.perf_counter() - begin) / count)

    def _time_passes(self) -> list[float]:
        """Time a pass of each length, after a warm-up pass."""
        times = []
        for length in (1, *self.rows):
            _fill(self._target, self.length)
            begin = time.perf_counter()
            self._target.forward([0] * length)[0].largest(1)
            times.append(time.perf_counter() - begin)
        return times[1:]

    def _time_rounds(self, mode: str, k: int) -> None:
        """Time a few rounds in the decoding loop, after a warm-up round.

        The first round of a draft head, which has no draft, precedes it.
        """
        stopwatch = Stopwatch()
        target = TimedModel(self._target, stopwatch, "verify")
        _fill(self._target, self.length)
        drafter: Drafter = Suffix()
        if self._drafter is not None and k:
            drafter = self._drafter
            _fill_draft(self._drafter, self.length)
        decoder = SpeculativeDecoder(target, FixedPlan(drafter, k), stopwatch)
        rounds = decoder.rounds([0] * (self.length + 1), MODES[mode], 0, 1 << 20)
        for _ in range(1 if drafter.observer is None else 2):
            next(rounds)
        for _ in range(NUM_ROUNDS):
            begin, before = time.perf_counter(), stopwatch.seconds["verify"]
            tokens = next(rounds).tokens
            duration = time.perf_counter() - begin
            pass_seconds = stopwatch.seconds["verify"] - before
            self.rounds[mode, k].append((duration, duration - pass_seconds, len(tokens)))

    @property
    def target(self) -> list[float]:
        """Seconds of target passes, monotonic in the pass length. [rows]"""
        fastest = [*map(min, zip(*self.passes, strict=True))]
        plain = min(total - rest for mode in MODES for total, rest, _ in self.rounds[mode, 0])
        return list(accumulate([min(fastest[0], plain), *fastest[1:]], max))

    @property
    def disturbance(self) -> float:
        """Mean ratio of a pass's median to its minimum, over the passes timed more than once.

        Passes of plain rounds count, too: those of slow models are not timed again otherwise.
        """
        columns = [list(column) for column in zip(*self.passes, strict=True)]
        columns[0] += [total - rest for mode in MODES for total, rest, _ in self.rounds[mode, 0]]
        return fmean(median(column) / min(column) for column in columns if len(column) > 1)

    def host(self, mode: str) -> float:
        """Return the seconds of a plain round without its target pass."""
        return min(rest for _, rest, _ in self.rounds[mode, 0])

    def drafting(self, mode: str, k: int, token: float) -> float:
        """Return the seconds of K draft tokens, given the host cost per new token."""
        total = min(total - token * count for total, _, count in self.rounds[mode, k])
        return total - interpolate(self.rows, self.target, k + 1) - self.host("greedy")


def _mode_costs(mode: str, timings: Sequence[_Timings], times_launches: bool) -> ModeCosts:
    """Return the costs of a mode, rounded to the grid."""
    host = fmean(timing.host("greedy") for timing in timings)
    token = max(0.0, fmean(timing.host(mode) for timing in timings) - host)
    draft, prefill = [], []
    for timing in timings:
        ks = timing.ks[1:]
        if ks:
            times = [timing.drafting(mode, k, token) for k in ks]
            estimate = _costs_of_launches if times_launches else _costs_of_passes
            draft.append(estimate(ks, times, [t - 1 for t in timing.rows[1:]]))
            prefill.append(on_grid(min(timing.prefill)))
    return ModeCosts(
        target=tuple(_rounded(timing.target) for timing in timings),
        draft=tuple(draft),
        prefill=tuple(prefill),
        host=on_grid(host),
        token=on_grid(token),
        acceptance={},
    )


def _costs_of_launches(
    ks: Sequence[int], times: Sequence[float], all_ks: Sequence[int]
) -> tuple[float, ...]:
    """Return the rounded cost of each K in `all_ks`, between those that were timed."""
    ascending = [*accumulate((max(seconds, MIN_SECONDS) for seconds in times), max)]
    return _rounded([interpolate(ks, ascending, k) for k in all_ks])


def _costs_of_passes(
    ks: Sequence[int], times: Sequence[float], all_ks: Sequence[int]
) -> tuple[float, ...]:
    """Return the rounded cost of each K in `all_ks`, a line through one or two timed K."""
    low, high = ks[0], ks[-1]
    later = (times[-1] - times[0]) / (high - low) if high > low else times[0] / high
    later = on_grid(max(later, MIN_SECONDS))
    first = on_grid(max(times[0] - (low - 1) * later, later))
    return tuple(first + later * (k - 1) for k in all_ks)


def _fill(model: Any, length: int) -> None:
    """Mark cache rows as filled; their values do not affect the time of a pass."""
    model.truncate(0)
    model.cache.extend([0] * length)


def _fill_draft(drafter: DraftModel, length: int) -> None:
    if isinstance(drafter, DraftHead):
        observed = drafter.model.observed
        observed.history = History([0] * (length + 1))
        observed.start = max(0, length - MAX_CONTEXT // 2)
        length = observed.num_rows = length - observed.start
    _fill(drafter.model, length)


def on_grid(seconds: float) -> float:
    """Round to a geometric grid, so that noise seldom changes the value; 0 stays 0."""
    return GRID_RATIO ** round(math.log(seconds, GRID_RATIO)) if seconds else 0.0


def _rounded(costs: Sequence[float]) -> tuple[float, ...]:
    """Round the first of ascending costs, and the differences from it, on which choices depend."""
    first = on_grid(costs[0])
    return tuple(first + on_grid(cost - costs[0]) for cost in costs)
