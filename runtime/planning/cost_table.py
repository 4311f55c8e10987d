"""Table of measured pass costs on one device, in seconds.

A pass of T tokens is timed with one or several numbers of tokens in the cache (`lengths`). What was
not timed is interpolated; beyond the last length costs grow as between the last two.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

PLACES = 64  # costs are looked up once for so many places in the text
ORIGINS = ("tune", "load", "assumed")


@dataclass(frozen=True)
class ModeCosts:
    """Seconds in one mode, greedy or sampled.

    target: a pass over `rows` tokens. [lengths][rows]
    draft: the passes of a round that drafts a token fewer than `rows`; empty without a draft model.
        [lengths][rows - 1]
    reading: a token of the draft's prefill. [lengths]
    host: the host's work in a round, drafting aside, which is in `draft`,
    token: and for each token that a round yields
    acceptance: expected acceptance rate by drafter; empty where it was not measured
    """

    target: tuple[tuple[float, ...], ...]
    draft: tuple[tuple[float, ...], ...]
    reading: tuple[float, ...]
    host: float
    token: float
    acceptance: dict[str, float]


@dataclass(frozen=True)
class CostTable:
    """Seconds on one device.

    origin: who measured them, "tune" or "load"; "assumed" if nobody did
    threads: CPU threads that were the fastest, for sessions that are given no number; 0: one a core
    exact_length: longest pass of the target whose rows have the bits of shorter ones, as tested
        here; 0 where only those were tested that every load tests
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
            raise ValueError("threads and exact_length are at least 0")
        if self.origin not in ORIGINS:
            raise ValueError(f"origin is one of {', '.join(ORIGINS)}, got '{self.origin}'")
        _check_ascending("lengths", self.lengths, 0)
        _check_ascending("rows", self.rows, 1)
        if self.rows[0] != 1:
            raise ValueError("rows begin with 1")
        for mode in (self.greedy, self.sampled):
            _check(mode, len(self.lengths), len(self.rows))

    @property
    def max_draft_tokens(self) -> int:
        """The largest K whose verify pass is known."""
        return self.rows[-1] - 1

    def mode(self, greedy: bool) -> ModeCosts:
        return self.greedy if greedy else self.sampled

    def at(self, length: int, greedy: bool) -> Costs:
        """The costs of a round with `length` tokens in the cache."""
        mode = self.mode(greedy)
        target = self._between(mode.target, length)
        known = range(1, self.rows[-1] + 1)
        rounds = [mode.host + interpolate(self.rows, target, tokens) for tokens in known]
        if not mode.draft:
            return Costs(rounds, [0.0] * len(known), 0.0, mode.token)
        drafting = [0.0, *self._between(mode.draft, length)]
        return Costs(
            rounds,
            [interpolate(self.rows, drafting, tokens) for tokens in known],
            interpolate(self.lengths, mode.reading, length),
            mode.token,
        )

    def _between(self, rows: Sequence[Sequence[float]], length: int) -> list[float]:
        columns = zip(*rows, strict=True)
        return [interpolate(self.lengths, column, length) for column in columns]


@dataclass(frozen=True)
class Costs:
    """Seconds at one place of the text.

    `rounds[k]` is a round's verify pass over k + 1 tokens with the host's work in it; `passes[k]`
    its draft passes; `reading` is a token of the draft's prefill; `token` is the host's work for
    each token that a round yields, in plain decoding, too.
    """

    rounds: list[float]
    passes: list[float]
    reading: float
    token: float = 0.0

    @property
    def plain(self) -> float:
        """A round without a draft, its token aside."""
        return self.rounds[0]

    def catching_up(self, behind: int) -> float:
        """What a draft model reads before its first pass, which takes one token or two."""
        return 0.0 if behind <= 2 else self.passes[1] + (behind - 1) * self.reading


def assumed(max_draft_tokens: int) -> CostTable:
    """Return costs for models that nobody measured, with passes that draft rather too dear."""
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
    """On the line through the neighbours; before the first it is the first."""
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
            raise ValueError(f"{name} has {width} costs for each of lengths")
    if len(mode.reading) != len(mode.draft):
        raise ValueError("draft and reading have costs for the same lengths")
    timed = [*sum(mode.target, ()), *sum(mode.draft, ()), *mode.reading]
    if not all(0 < cost < math.inf for cost in timed):
        raise ValueError("a pass costs more than 0 seconds")
    if not all(0 <= cost < math.inf for cost in (mode.host, mode.token)):
        raise ValueError("the host's work costs at least 0 seconds")
    if not all(0 <= rate <= 1 for rate in mode.acceptance.values()):
        raise ValueError("acceptance is between 0 and 1")


def _check_ascending(name: str, values: tuple[int, ...], least: int) -> None:
    if not values or values[0] < least or any(a >= b for a, b in pairwise(values)):
        raise ValueError(f"{name} ascend, from at least {least}")
