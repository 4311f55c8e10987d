"""Measurement of pass costs and host work of a loaded bundle, at load and by `specedge tune`."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, product
from pathlib import Path
from statistics import fmean, median, median_high
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
SECONDS = 0.12  # time limit at load
MIN_SWEEPS, BUSY_SWEEPS = 2, 3  # minimum without and with contention
BUSY_FACTOR = 3  # factor of the time limit with contention
SLOW_SECONDS = 0.5  # if the passes of the self-test took longer, they are not timed again
PASS_LENGTHS = (1, 2, 3, 5, 9)  # in addition to the longest; kernels use tiles of a few rows
# K of timed rounds with the draft model. Those of multi-step graphs are timed at K + 1 = each row:
# a draft is some launches of a fixed number of steps, or passes where these are faster.
DRAFT_LENGTHS, DRAFT_LENGTHS_IF_SLOW = (1, 4), (2,)
NUM_ROUNDS = 1  # timed rounds for each K and mode in a sweep, after one warm-up round
PREFILL_LENGTH = 64  # tokens of the draft model's timed prefill
MIN_CONTEXT = 10  # context length that these rounds need
GRID_RATIO = 1.1  # ratio of neighboring values on the grid that costs are rounded to
BUSY_RATIO = 1.5  # mean ratio of medians to minima that indicates contention
BUSY_SHARE = 0.25  # ratio of time waited for cores, over all threads, to elapsed time that does
MIN_SECONDS = 1e-7  # lower bound of a draft pass, against noise
TASKS = Path("/proc/self/task")  # threads of this process, on Linux
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
    draft model. Each sweep times everything once, so that contention affects all costs alike. A
    cost is the minimum over sweeps, rounded to a grid: contention only adds time, and the first
    passes of a process take up to twice as long.

    The cost of a draft is the time of its round without the target pass. A target pass takes longer
    after draft passes, which is attributed to the draft.

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
    ks = sorted({min(k, rows[-1] - 1) for k in candidates})
    ks = [k for k in ks if 1 + (1 + NUM_ROUNDS) * (k + 1) < max_tokens]
    num_new = max(longest, 1 + (1 + NUM_ROUNDS) * (ks[-1] + 1))
    timings = [
        _Timings(target, drafter, context_length, length, rows, ks)
        for length in sorted({max(1, min(length, max_tokens - num_new)) for length in lengths})
    ]
    begin, waited, sweeps, share = time.perf_counter(), _seconds_waited(), 0, 0.0
    while share < 1:
        for timing in timings:
            timing.sweep(samples if is_slow else None)
        sweeps += 1
        elapsed = time.perf_counter() - begin
        is_busy = fmean(timing.disturbance for timing in timings) > BUSY_RATIO
        is_busy |= _seconds_waited() - waited > BUSY_SHARE * elapsed
        num_sweeps = BUSY_SWEEPS if is_busy else MIN_SWEEPS
        limit = seconds * (BUSY_FACTOR if is_busy else 1)
        share = 1.0 if is_slow else min(elapsed / limit, sweeps / num_sweeps, 1.0)
        on_progress(share)
    target.truncate(0)
    if drafter is not None:
        drafter.model.truncate(0)
    greedy, sampled = (_mode_costs(mode, timings, times_launches) for mode in MODES)
    cache_lengths = tuple(timing.length for timing in timings)
    return Measurement(CostTable(origin, cache_lengths, tuple(rows), greedy, sampled, 0), is_busy)


class _Timings:
    """Timings at one cache length.

    Attributes:
        passes: Seconds of target passes without a draft, by pass length.
        verify: Seconds of target passes after a draft, by pass length.
        rounds: Seconds of rounds without the target pass, and numbers of new tokens, by mode and K.
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
        self.passes: dict[int, list[float]] = {t: [] for t in rows}
        self.verify: defaultdict[int, list[float]] = defaultdict(list)
        self.rounds: defaultdict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)
        self.prefill: list[float] = []

    def sweep(self, passes: Mapping[int, float] | None) -> None:
        """Time everything once, except target passes whose seconds are passed in."""
        for length, seconds in (passes or self._time_passes()).items():
            self.passes[length].append(seconds)
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

    def _time_passes(self) -> dict[int, float]:
        """Time a pass of each length, after a warm-up pass over one token."""
        times = {}
        for length in (1, *self.rows):
            _fill(self._target, self.length)
            begin = time.perf_counter()
            self._target.forward([0] * length)[0].largest(1)
            times[length] = time.perf_counter() - begin
        return times

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
            seconds = stopwatch.seconds["verify"] - before
            (self.verify if k else self.passes)[k + 1].append(seconds)
            self.rounds[mode, k].append((duration - seconds, len(tokens)))

    @property
    def target(self) -> list[float]:
        """Seconds of target passes, ascending. [rows]"""
        return _ascending([*map(min, self.passes.values())])

    @property
    def disturbance(self) -> float:
        """Mean ratio of the median to the minimum, over passes and drafts timed more than once."""
        times = [*self.passes.values()]
        times += [[rest for rest, _ in self.rounds[mode, k]] for mode in MODES for k in self.ks[1:]]
        return fmean(median(seconds) / min(seconds) for seconds in times if len(seconds) > 1)

    @property
    def host(self) -> float:
        """Seconds of a plain round without its target pass, at most those of other rounds."""
        return min(rest for times in self.rounds.values() for rest, _ in times)

    def token(self, mode: str) -> float:
        """Return the seconds of host work per new token, in addition to `host`."""
        rounds = (times for k in self.ks for times in self.rounds[mode, k])
        return min((rest - self.host) / count for rest, count in rounds)

    def drafting(self, mode: str, k: int, token: float) -> float:
        """Return the seconds of K draft tokens, given the host cost per new token.

        Greedy drafts take at most as long as sampled ones. The slowdown of the target pass by the
        draft is included, relative to the median pass without a draft (of two, the slower one) and
        at most as long as the draft, since contention may add more to either pass.
        """
        modes = MODES if mode == "greedy" else (mode,)
        rest = min(rest - token * count for m in modes for rest, count in self.rounds[m, k])
        seconds = rest - self.host
        passes = [*map(median_high, self.passes.values())]
        slowdown = min(self.verify[k + 1]) - interpolate(self.rows, passes, k + 1)
        return seconds + min(max(slowdown, 0.0), seconds)


def _mode_costs(mode: str, timings: Sequence[_Timings], times_launches: bool) -> ModeCosts:
    """Return the costs of a mode, rounded to the grid."""
    host = fmean(timing.host for timing in timings)
    token = 0.0 if mode == "greedy" else fmean(timing.token(mode) for timing in timings)
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
    ascending = _ascending([max(seconds, MIN_SECONDS) for seconds in times])
    return _rounded([interpolate(ks, ascending, k) for k in all_ks])


def _costs_of_passes(
    ks: Sequence[int], times: Sequence[float], all_ks: Sequence[int]
) -> tuple[float, ...]:
    """Return the rounded cost of each K in `all_ks`, a line through one or two timed K.

    A later pass takes at most as long as the first one, which reads more tokens.
    """
    low, high = ks[0], ks[-1]
    mean = max(times[0] / low, MIN_SECONDS)
    later = (times[-1] - times[0]) / (high - low) if high > low else mean
    later = on_grid(max(min(later, mean), MIN_SECONDS))
    first = on_grid(low * mean - (low - 1) * later)
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


def _ascending(times: Sequence[float]) -> list[float]:
    """Return the minimum of each time and those after it, of longer passes.

    This assumes that a pass takes at most as long as a longer one; kernels may differ by a few
    percent.
    """
    return [*accumulate(reversed(times), min)][::-1]


def _seconds_waited() -> float:
    """Return the seconds that this process has waited for a core, the sum over its threads.

    Waiting for a CPU quota counts. 0 without the scheduler statistics of Linux
    (`/proc/PID/schedstat`).
    """
    nanoseconds = 0
    for path in TASKS.glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # a thread that has ended
            nanoseconds += int(path.read_text().split()[1])
    return nanoseconds / 1e9


def on_grid(seconds: float) -> float:
    """Round to a geometric grid, so that noise seldom changes the value; 0 stays 0."""
    return GRID_RATIO ** round(math.log(seconds, GRID_RATIO)) if seconds else 0.0


def _rounded(costs: Sequence[float]) -> tuple[float, ...]:
    """Round the first of ascending costs, and the differences from it, on which choices depend."""
    first = on_grid(costs[0])
    return tuple(first + on_grid(cost - costs[0]) for cost in costs)
