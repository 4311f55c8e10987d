"""Table of measured pass costs on one device, in seconds.

A pass of T tokens is timed with one or several numbers of tokens in the cache (`lengths`). Other
costs are interpolated; beyond the last length they grow as between the last two.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

COSTS_INTERVAL = 64  # tokens of the text for which costs are looked up once
ORIGINS = ("tune", "load", "assumed")


@dataclass(frozen=True)
class ModeCosts:
    """Costs in seconds in one mode, greedy or sampled.

    Attributes:
        target: A target pass of each length in `rows`. [lengths][rows]
        draft: The draft passes of a round that drafts one token fewer than `rows`; empty without a
            draft model. [lengths][rows - 1]
        reading: A token of the draft model's prefill. [lengths]
        host: The host's work in a round; drafting is part of `draft`.
        token: The host's work for each token that a round yields.
        acceptance: Expected acceptance rate by drafter; empty if it was not measured.
    """

    target: tuple[tuple[float, ...], ...]
    draft: tuple[tuple[float, ...], ...]
    reading: tuple[float, ...]
    host: float
    token: float
    acceptance: dict[str, float]


@dataclass(frozen=True)
class CostTable:
    """Pass costs on one device.

    Attributes:
        origin: Origin of the costs: "tune", "load" or "assumed".
        lengths: Numbers of tokens in the cache at which passes were timed.
        rows: Pass lengths that were timed.
        greedy: Costs at temperature 0.
        sampled: Costs above temperature 0.
        threads: Fastest number of CPU threads, the default of sessions; 0 for one per core.
        exact_length: Longest pass-length-invariant pass of the target as tested here; 0 if only the
            lengths were tested that every load tests.
    """

    origin: str
    lengths: tuple[int, ...]
    rows: tuple[int, ...]
    greedy: ModeCosts
    sampled: ModeCosts
    threads: int
    exact_length: int = 0

    def __post_init__(self) -> None:
        if min(self.threads, self.exact_length) < 0:
            raise ValueError("threads and exact_length must be at least 0")
        if self.origin not in ORIGINS:
            raise ValueError(f"origin must be one of {', '.join(ORIGINS)}, got '{self.origin}'")
        _check_ascending("lengths", self.lengths, 0)
        _check_ascending("rows", self.rows, 1)
        if self.rows[0] != 1:
            raise ValueError("rows must begin with 1")
        for mode in (self.greedy, self.sampled):
            _check(mode, len(self.lengths), len(self.rows))

    @property
    def max_draft_tokens(self) -> int:
        """Largest K whose verify pass was timed."""
        return self.rows[-1] - 1

    def mode(self, greedy: bool) -> ModeCosts:
        """Return the costs of a mode."""
        return self.greedy if greedy else self.sampled

    def at(self, length: int, greedy: bool) -> RoundCosts:
        """Return the costs of a round with `length` tokens in the cache."""
        mode = self.mode(greedy)
        target = self._between(mode.target, length)
        pass_lengths = range(1, self.rows[-1] + 1)
        rounds = [mode.host + interpolate(self.rows, target, tokens) for tokens in pass_lengths]
        if not mode.draft:
            return RoundCosts(rounds, [0.0] * len(pass_lengths), 0.0, mode.token)
        drafting = [0.0, *self._between(mode.draft, length)]
        return RoundCosts(
            rounds,
            [interpolate(self.rows, drafting, tokens) for tokens in pass_lengths],
            interpolate(self.lengths, mode.reading, length),
            mode.token,
        )

    def _between(self, rows: Sequence[Sequence[float]], length: int) -> list[float]:
        columns = zip(*rows, strict=True)
        return [interpolate(self.lengths, column, length) for column in columns]


@dataclass(frozen=True)
class RoundCosts:
    """Costs of a round in seconds, for one number of tokens in the cache.

    `rounds[k]` is the verify pass over k + 1 tokens with the host's work; `passes[k]` the draft
    passes for k tokens; `reading` a token of the draft model's prefill; `token` the host's work for
    each token that a round yields, in plain decoding, too.
    """

    rounds: list[float]
    passes: list[float]
    reading: float
    token: float = 0.0

    @property
    def plain(self) -> float:
        """Cost of a round without a draft, without `token`."""
        return self.rounds[0]

    def catch_up(self, behind: int) -> float:
        """Return the cost of a draft model's catch-up before its first pass of 1 or 2 tokens."""
        return 0.0 if behind <= 2 else self.passes[1] + (behind - 1) * self.reading


def assumed_costs(max_draft_tokens: int) -> CostTable:
    """Return costs for models without a measurement, with pessimistic draft passes."""
    rows = range(1, max_draft_tokens + 2)
    mode = ModeCosts(
        target=(tuple(1e-2 + 1e-3 * (t - 1) for t in rows),),
        draft=(tuple(2e-3 * (t - 1) for t in rows[1:]),),
        reading=(2e-4,),
        host=0.0,
        token=0.0,
        acceptance={},
    )
    return CostTable("assumed", (0,), tuple(rows), mode, mode, threads=0)


def interpolate(xs: Sequence[int], values: Sequence[float], x: float) -> float:
    """Interpolate linearly; below the first x the first value."""
    if x <= xs[0] or len(xs) == 1:
        return values[0]
    right = min(bisect_left(xs, x), len(xs) - 1)
    left = right - 1
    slope = (values[right] - values[left]) / (xs[right] - xs[left])
    if x > xs[-1]:
        slope = max(slope, 0.0)
        left = right
    return values[left] + slope * (x - xs[left])


def _check(mode: ModeCosts, num_lengths: int, num_rows: int) -> None:
    shapes = {"target": (mode.target, num_rows), "draft": (mode.draft, num_rows - 1)}
    for name, (values, width) in shapes.items():
        absent = name == "draft" and not values
        if (len(values) != num_lengths and not absent) or any(len(row) != width for row in values):
            raise ValueError(f"{name} must have {width} costs for each of lengths")
    if len(mode.reading) != len(mode.draft):
        raise ValueError("draft and reading must have costs for the same lengths")
    timed = [*sum(mode.target, ()), *sum(mode.draft, ()), *mode.reading]
    if not all(0 < cost < math.inf for cost in timed):
        raise ValueError("a pass must cost more than 0 seconds")
    if not all(0 <= cost < math.inf for cost in (mode.host, mode.token)):
        raise ValueError("the host's work must cost at least 0 seconds")
    if not all(0 <= rate <= 1 for rate in mode.acceptance.values()):
        raise ValueError("acceptance must be between 0 and 1")


def _check_ascending(name: str, values: tuple[int, ...], least: int) -> None:
    if not values or values[0] < least or any(a >= b for a, b in pairwise(values)):
        raise ValueError(f"{name} must ascend from at least {least}")
