"""Table of measured pass costs on one device, in seconds.

A pass of T tokens is timed at one or more cache lengths (`lengths`). Other costs are interpolated
linearly, and extrapolated beyond the last cache length.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

COSTS_INTERVAL = 64  # tokens of text that share one lookup of costs
ORIGINS = ("tune", "load", "assumed")


@dataclass(frozen=True)
class ModeCosts:
    """Costs in seconds in one mode, greedy or sampled.

    Attributes:
        target: Target pass of each length in `rows`. [lengths][rows]
        draft: Draft passes of a round with K + 1 = each length in `rows` but the first; empty
            without a draft model. [lengths][rows - 1]
        prefill: Draft model prefill, per token; the key `reading` in files. [lengths]
        host: Host work per round, without the drafting, which is part of `draft`.
        token: Host work per new token.
        acceptance: Expected acceptance rate by drafter; empty if it was not measured.
    """

    target: tuple[tuple[float, ...], ...]
    draft: tuple[tuple[float, ...], ...]
    prefill: tuple[float, ...] = field(metadata={"key": "reading"})
    host: float
    token: float
    acceptance: dict[str, float]

    def minimum(self, other: ModeCosts) -> ModeCosts:
        """Return the lower one of each cost, for the same passes.

        Drafts and tokens are compared together with the host work that was subtracted from them.
        """
        host = min(self.host, other.host)
        work, other_work = self.host + self.token, other.host + other.token
        lower_work = min(work, other_work)
        return replace(
            self,
            target=_minimum(self.target, other.target),
            draft=_minimum(self.draft, other.draft, work - lower_work, other_work - lower_work),
            prefill=tuple(map(min, self.prefill, other.prefill)),
            host=host,
            token=min(self.token + (self.host - host), other.token + (other.host - host)),
        )


@dataclass(frozen=True)
class CostTable:
    """Pass costs on one device.

    Attributes:
        origin: Origin of the costs: "tune", "load" or "assumed".
        lengths: Cache lengths at which passes were timed.
        rows: Pass lengths that were timed.
        greedy: Costs at temperature 0.
        sampled: Costs above temperature 0.
        threads: Fastest number of CPU threads, the default of sessions; 0 for one per core.
        invariant_length: Longest batch-invariant pass of the target on this machine; 0 if only the
            short lengths of the self-test were tested. The key `exact_length` in files.
        is_invariant: True if the self-test found the short lengths of the export invariant.
    """

    origin: str
    lengths: tuple[int, ...]
    rows: tuple[int, ...]
    greedy: ModeCosts
    sampled: ModeCosts
    threads: int
    invariant_length: int = field(default=0, metadata={"key": "exact_length"})
    is_invariant: bool = False

    def __post_init__(self) -> None:
        if min(self.threads, self.invariant_length) < 0:
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

    def minimum(self, other: CostTable) -> CostTable:
        """Return the lower one of each cost, or the faster one of two tables of different passes.

        Contention only adds time, so the lower one of two disturbed costs is more accurate. Tables
        of different passes are compared by the pass over one token.
        """
        tables = self, other
        passes, others = ((t.lengths, t.rows, len(t.greedy.draft)) for t in tables)
        if passes != others:
            return min(tables, key=lambda table: table.greedy.target[0][0])
        greedy, sampled = self.greedy.minimum(other.greedy), self.sampled.minimum(other.sampled)
        return replace(self, greedy=greedy, sampled=sampled)

    def mode(self, greedy: bool) -> ModeCosts:
        """Return the costs of a mode."""
        return self.greedy if greedy else self.sampled

    def at(self, length: int, greedy: bool, num_requests: int = 1) -> RoundCosts:
        """Return the costs of a round with `length` tokens in the cache.

        If requests share passes, the cost of a verify pass is a request's share. That of a draft
        pass is not shared: other requests wait for it, whether or not they draft, too.
        """
        key = length, greedy, num_requests
        costs = self._costs.get(key)
        if costs is None:
            costs = self._costs[key] = self._interpolate(*key)
        return costs

    @cached_property
    def _costs(self) -> dict[tuple[int, bool, int], RoundCosts]:
        """Costs by length, mode and number of requests, shared by all requests."""
        return {}

    def _interpolate(self, length: int, greedy: bool, num_requests: int) -> RoundCosts:
        mode = self.mode(greedy)
        target = self._interpolate_rows(mode.target, length)
        pass_lengths = range(1, self.rows[-1] + 1)
        passes = [
            interpolate(self.rows, target, num_requests * tokens) / num_requests
            for tokens in pass_lengths
        ]
        verify = [mode.host + seconds for seconds in passes]
        if not mode.draft:
            return RoundCosts(verify, [0.0] * len(pass_lengths), 0.0, mode.token)
        draft = [0.0, *self._interpolate_rows(mode.draft, length)]
        return RoundCosts(
            verify,
            [interpolate(self.rows, draft, tokens) for tokens in pass_lengths],
            interpolate(self.lengths, mode.prefill, length),
            mode.token,
        )

    def _interpolate_rows(self, rows: Sequence[Sequence[float]], length: int) -> list[float]:
        """Interpolate costs between cache lengths. [lengths][n] -> [n]"""
        columns = zip(*rows, strict=True)
        return [interpolate(self.lengths, column, length) for column in columns]


@dataclass(frozen=True)
class Measurement:
    """Measured costs; `busy` if contention makes them unreliable."""

    costs: CostTable
    busy: bool


@dataclass(frozen=True)
class RoundCosts:
    """Costs of a round in seconds, at one cache length.

    Attributes:
        verify: Verify pass over k + 1 tokens and host work per round, by k.
        draft: Draft passes for k tokens, by k.
        prefill: Draft model prefill, per token.
        token: Host work per new token, in plain decoding, too.
    """

    verify: list[float]
    draft: list[float]
    prefill: float
    token: float = 0.0

    @property
    def plain(self) -> float:
        """Cost of a round of plain decoding, without `token`."""
        return self.verify[0]

    def catch_up(self, num_unread: int, max_unread: int = 2) -> float:
        """Return the cost of a draft model's catch-up before its first pass.

        Args:
            num_unread: Tokens of the text that are not in its cache.
            max_unread: Maximum number of them that the first pass reads.
        """
        if num_unread <= max_unread:
            return 0.0
        return self.draft[1] + (num_unread - 1) * self.prefill


def assumed_costs(max_draft_tokens: int) -> CostTable:
    """Return placeholder costs for models without a measurement, with pessimistic draft passes."""
    rows = range(1, max_draft_tokens + 2)
    mode = ModeCosts(
        target=(tuple(1e-2 + 1e-3 * (t - 1) for t in rows),),
        draft=(tuple(2e-3 * (t - 1) for t in rows[1:]),),
        prefill=(2e-4,),
        host=0.0,
        token=0.0,
        acceptance={},
    )
    return CostTable("assumed", (0,), tuple(rows), mode, mode, threads=0)


def interpolate(xs: Sequence[int], values: Sequence[float], x: float) -> float:
    """Interpolate linearly; return the first value below the first x."""
    if x <= xs[0] or len(xs) == 1:
        return values[0]
    right = min(bisect_left(xs, x), len(xs) - 1)
    left = right - 1
    slope = (values[right] - values[left]) / (xs[right] - xs[left])
    if x > xs[-1]:
        slope = max(slope, 0.0)
        left = right
    return values[left] + slope * (x - xs[left])


def _minimum(
    rows: Sequence[Sequence[float]],
    others: Sequence[Sequence[float]],
    offset: float = 0.0,
    other_offset: float = 0.0,
) -> tuple[tuple[float, ...], ...]:
    return tuple(
        tuple(min(a + offset, b + other_offset) for a, b in zip(row, other, strict=True))
        for row, other in zip(rows, others, strict=True)
    )


def _check(mode: ModeCosts, num_lengths: int, num_rows: int) -> None:
    shapes = {"target": (mode.target, num_rows), "draft": (mode.draft, num_rows - 1)}
    for name, (values, width) in shapes.items():
        absent = name == "draft" and not values
        if (len(values) != num_lengths and not absent) or any(len(row) != width for row in values):
            raise ValueError(f"{name} must have {width} costs for each of lengths")
    if len(mode.prefill) != len(mode.draft):
        raise ValueError("draft and reading must have costs for the same lengths")
    timed = [*sum(mode.target, ()), *sum(mode.draft, ()), *mode.prefill]
    if not all(0 < cost < math.inf for cost in timed):
        raise ValueError("costs of passes must be positive and finite")
    if not all(0 <= cost < math.inf for cost in (mode.host, mode.token)):
        raise ValueError("host and token must be at least 0 and finite")
    if not all(0 <= rate <= 1 for rate in mode.acceptance.values()):
        raise ValueError("acceptance must be between 0 and 1")


def _check_ascending(name: str, values: tuple[int, ...], minimum: int) -> None:
    if not values or values[0] < minimum or any(a >= b for a, b in pairwise(values)):
        raise ValueError(f"{name} must be strictly ascending, from at least {minimum}")
