"""Measurement of a loaded bundle's pass costs and host work, at load and by `specedge tune`."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from statistics import fmean, median
from typing import Any

from specedge.bundle import Bundle
from specedge.sampling_options import Sampling

from ..decoding.decoding import SpeculativeDecoder
from ..decoding.protocols import Drafter
from ..decoding.timing import Stopwatch, TimedModel
from ..drafters.baselines import Random
from ..drafters.draft_model import DraftModel
from .cost_table import CostTable, ModeCosts, interpolate
from .plans import Fixed

LENGTH = 64  # tokens in the caches at load
SECONDS, MIN_SWEEPS = 0.12, 2  # at load; up to PATIENCE times as long while others have the cores
PATIENCE = 3
SLOW = 0.5  # seconds of the self-test's passes from which on they are not timed again
PASS_LENGTHS = (1, 2, 3, 5, 9)  # and the longest: kernels work on tiles of a few rows
DRAFTED, DRAFTED_IF_SLOW = (1, 4), (2,)  # K of the rounds that are timed with the draft model
ROUNDS = 1  # of each kind in a sweep, after one that warms up
READ_LENGTH = 64  # tokens of the draft's timed prefill
MIN_CONTEXT = 10  # tokens that these rounds need
STEP = 1.1  # ratio of neighboring values on the grid that costs are rounded to
BUSY = 1.5  # mean ratio of a pass's median to its minimum from which on others have the cores
LEAST = 1e-7  # seconds of a draft pass where noise makes it less
MODES = {"greedy": Sampling(), "sampled": Sampling(1.0)}

Progress = Callable[[float], None]  # called with the share of the work that is done


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

    Passes of the target are timed by themselves, and rounds in the decoding loop, plain and drafted
    by the model: after the draft's passes a pass of the target takes longer, which counts as the
    draft's. Sweeps go through everything, so that a busy moment slows no cost alone. A cost is the
    least of all sweeps, on a grid: the first passes of a process take up to twice as long.

    Args:
        models: Models to measure, with contexts of at least MIN_CONTEXT tokens.
        max_draft_tokens: Largest K to plan with.
        lengths: Numbers of tokens in the caches to measure at.
        seconds: Time for sweeps.
        samples: Seconds of the target's passes by length, from the self-test at load.
    """
    room = models.context - 1
    longest = min(max_draft_tokens + 1, room)
    samples = samples or {}
    is_slow = 1 in samples and len(samples) > 1 and sum(samples.values()) > SLOW
    rows = sorted(samples if is_slow else {t for t in PASS_LENGTHS if t < longest} | {longest})
    tried = [0, *(DRAFTED_IF_SLOW if is_slow else DRAFTED)] if models.draft is not None else [0]
    ks = [k for k in tried if k < rows[-1] and (1 + ROUNDS) * (k + 1) < room]
    most = max(longest, (1 + ROUNDS) * (ks[-1] + 1))
    places = [
        _Place(models, length, rows, ks)
        for length in sorted({max(1, min(length, room - most)) for length in lengths})
    ]
    begin, sweeps, share = time.perf_counter(), 0, 0.0
    while share < 1:
        for place in places:
            place.sweep(samples if is_slow else None)
        sweeps += 1
        is_busy = fmean(place.disturbance for place in places) > BUSY
        patience = PATIENCE if sweeps >= MIN_SWEEPS and is_busy else 1
        share = (time.perf_counter() - begin) / (patience * seconds)
        share = 1.0 if is_slow else min(share, sweeps / MIN_SWEEPS)
        on_progress(min(share, 1.0))
    models.target.truncate(0)
    if models.draft is not None:
        models.draft.truncate(0)
    greedy, sampled = (_mode_costs(mode, places) for mode in MODES)
    numbers = tuple(place.length for place in places)
    return Measurement(CostTable(origin, numbers, tuple(rows), greedy, sampled, 0), is_busy)


class _Place:
    """Timings behind one number of cached tokens.

    passes: seconds of the target's passes. [sweeps][rows]
    rounds: seconds of rounds, of that without the target's pass, and the tokens that they yielded,
        by mode and K
    reading: seconds of a token of the draft's prefill. [sweeps]
    """

    def __init__(self, models: Models, length: int, rows: Sequence[int], ks: Sequence[int]) -> None:
        self.length, self.rows, self.ks = length, rows, ks
        self.passes: list[list[float]] = []
        self.rounds: defaultdict[tuple[str, int], list[tuple[float, float, int]]]
        self.rounds = defaultdict(list)
        self.reading: list[float] = []
        self._models = models

    def sweep(self, passes: Mapping[int, float] | None) -> None:
        """Time everything once more, but for the target's passes where their seconds are given."""
        self.passes.append([passes[t] for t in self.rows] if passes else self._time_passes())
        for mode, k in product(MODES, self.ks):
            self._time_rounds(mode, k)
        if (draft := self._models.draft) is not None:
            _fill(draft, self.length)
            count = min(READ_LENGTH, self._models.draft_context - self.length)
            begin = time.perf_counter()
            draft.prefill([0] * count)
            self.reading.append((time.perf_counter() - begin) / count)

    def _time_passes(self) -> list[float]:
        """Time a pass of each length, after one that warms up."""
        target, times = self._models.target, []
        for length in (1, *self.rows):
            _fill(target, self.length)
            begin = time.perf_counter()
            target.forward([0] * length)[0].largest(1)
            times.append(time.perf_counter() - begin)
        return times[1:]

    def _time_rounds(self, mode: str, k: int) -> None:
        """Time a few rounds in the decoding loop, after one that warms up."""
        watch = Stopwatch()
        target = TimedModel(self._models.target, watch, "verify")
        drafter: Drafter = DraftModel(self._models.draft) if k else Random(1)
        for model in (self._models.target, self._models.draft) if k else (self._models.target,):
            _fill(model, self.length)
        decoder = SpeculativeDecoder(target, Fixed(drafter, k), watch)
        rounds = decoder.rounds([0] * (self.length + 1), MODES[mode], 0, 1 << 20)
        next(rounds)
        for _ in range(ROUNDS):
            begin, before = time.perf_counter(), watch.seconds["verify"]
            tokens = next(rounds).tokens
            took, passed = time.perf_counter() - begin, watch.seconds["verify"] - before
            self.rounds[mode, k].append((took, took - passed, len(tokens)))

    @property
    def target(self) -> list[float]:
        """The seconds of the target's passes; a longer one never takes less. [rows]"""
        least = [*map(min, zip(*self.passes, strict=True))]
        plain = min(took - rest for mode in MODES for took, rest, _ in self.rounds[mode, 0])
        return list(accumulate([min(least[0], plain), *least[1:]], max))

    @property
    def disturbance(self) -> float:
        """The mean ratio of a pass's median to its minimum."""
        return fmean(median(column) / min(column) for column in zip(*self.passes, strict=True))

    def host(self, mode: str) -> float:
        """The seconds of a plain round beside its pass."""
        return min(rest for _, rest, _ in self.rounds[mode, 0])

    def drafting(self, mode: str, k: int, token: float) -> float:
        """The seconds that K draft tokens take, where each token that is yielded costs the host so
        much.
        """
        took = min(took - token * count for took, _, count in self.rounds[mode, k])
        return took - interpolate(self.rows, self.target, k + 1) - self.host("greedy")


def _mode_costs(mode: str, places: Sequence[_Place]) -> ModeCosts:
    """Return the costs on the grid."""
    host = fmean(place.host("greedy") for place in places)
    token = max(0.0, fmean(place.host(mode) for place in places) - host)
    draft, reading = [], []
    for place in places:
        if len(place.ks) > 1:
            least, most = place.ks[1], place.ks[-1]
            few, many = (place.drafting(mode, k, token) for k in (least, most))
            later = (many - few) / (most - least) if most > least else many / most
            later = on_grid(max(later, LEAST))
            first = on_grid(max(few - (least - 1) * later, later))
            draft.append(tuple(first + later * (t - 2) for t in place.rows[1:]))
            reading.append(on_grid(min(place.reading)))
    return ModeCosts(
        target=tuple(_rounded(place.target) for place in places),
        draft=tuple(draft),
        reading=tuple(reading),
        host=on_grid(host),
        token=on_grid(token),
        acceptance={},
    )


def _fill(model: Any, length: int) -> None:
    """Take rows of the cache for those of tokens: their values change no pass's time."""
    model.truncate(0)
    model.cache.extend([0] * length)


def on_grid(seconds: float) -> float:
    """Return the nearest value of a geometric grid, so that noise seldom changes it; 0 is 0."""
    return STEP ** round(math.log(seconds, STEP)) if seconds else 0.0


def _rounded(costs: Sequence[float]) -> tuple[float, ...]:
    """Round the first of ascending costs and what the others take more: choices hang on that."""
    first = on_grid(costs[0])
    return tuple(first + on_grid(cost - costs[0]) for cost in costs)
