"""What passes cost on one device, in seconds: a table, measured or estimated.

A pass of T tokens is timed with several numbers of tokens in the cache (`lengths`). What was not
timed is interpolated; beyond the last length costs grow as between the last two.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from specedge.bundle import Bundle

READ_LENGTH = 64  # tokens of the pass that `reading` is timed with
PLACES = 64  # costs are looked up once for so many places in the text
ORIGINS = ("tune", "use", "bytes")
BANDWIDTH = 10e9  # bytes a second: a guess, but choices hang on ratios of costs
ROW = 0.1  # what a row more costs a pass, in passes: CPUs that read weights from memory need less
HOST = (1e-4, 5e-5)  # the host's seconds a round, and a draft token


@dataclass(frozen=True)
class CostTable:
    """Seconds on one device.

    target: a pass over `rows` tokens. [lengths][rows]
    draft: a pass over 1 token, and over 2, with which a round begins after a full acceptance
    reading: a token of the draft's prefill
    host: a round's work outside the graphs: alone, and for each draft token
    acceptance: the chance that a draft token stands, by drafter; may be empty
    host and acceptance: each for "greedy" and "sampled"
    origin: "tune" if all was measured, "use" if a request measured some, "bytes" if nothing was
    """

    origin: str
    lengths: tuple[int, ...]
    rows: tuple[int, ...]
    target: tuple[tuple[float, ...], ...]
    draft: tuple[tuple[float, ...], ...]
    reading: tuple[float, ...]
    host: dict[str, tuple[float, ...]]
    acceptance: dict[str, dict[str, float]]

    def __post_init__(self) -> None:
        if self.origin not in ORIGINS:
            raise ValueError(f"origin is one of {', '.join(ORIGINS)}, got '{self.origin}'")
        _check_ascending("lengths", self.lengths, 0)
        _check_ascending("rows", self.rows, 1)
        if self.rows[0] != 1:
            raise ValueError("rows begin with 1")
        shapes = ((self.target, len(self.rows)), (self.draft, 2))
        for name, (values, width) in zip(("target", "draft"), shapes, strict=True):
            if len(values) != len(self.lengths) or any(len(row) != width for row in values):
                raise ValueError(f"{name} has {width} costs for each of lengths")
        if len(self.reading) != len(self.lengths):
            raise ValueError("reading has a cost for each of lengths")
        if self.host.keys() != {"greedy", "sampled"} or any(
            len(h) != 2 for h in self.host.values()
        ):
            raise ValueError("host has two costs for 'greedy' and for 'sampled'")
        timed = [*sum(self.target, ()), *sum(self.draft, ()), *self.reading]
        if not all(0 < cost < math.inf for cost in timed):
            raise ValueError("a pass costs more than 0 seconds")
        if not all(0 <= cost < math.inf for cost in sum(self.host.values(), ())):
            raise ValueError("the host's costs are at least 0")
        if self.acceptance and self.acceptance.keys() != {"greedy", "sampled"}:
            raise ValueError("acceptance is empty or has 'greedy' and 'sampled'")
        if not all(0 <= rate <= 1 for by in self.acceptance.values() for rate in by.values()):
            raise ValueError("acceptance is between 0 and 1")

    @property
    def max_draft_tokens(self) -> int:
        """The largest K whose verify pass is known."""
        return self.rows[-1] - 1

    def at(self, length: int, greedy: bool) -> Costs:
        """The costs of a round with `length` tokens in the cache."""
        target = self._between(self.target, length)
        base, each = self.host["greedy" if greedy else "sampled"]
        rounds = [
            _interpolate(self.rows, target, k + 1) + base + k * each
            for k in range(self.max_draft_tokens + 1)
        ]
        one, two = self._between(self.draft, length)
        return Costs(
            rounds, one, max(one, two), self._between([(r,) for r in self.reading], length)[0]
        )

    def _between(self, rows: Sequence[Sequence[float]], length: int) -> list[float]:
        columns = zip(*rows, strict=True)
        return [_interpolate(self.lengths, column, length) for column in columns]


@dataclass(frozen=True)
class Costs:
    """Seconds at one place of the text.

    `rounds[k]` is a round's verify pass over k + 1 tokens with what the host does in it; `draft`
    a draft pass, `draft_two` one over two tokens, `reading` a token of the draft's prefill.
    """

    rounds: list[float]
    draft: float
    draft_two: float
    reading: float

    @property
    def plain(self) -> float:
        """A round without a draft: one token."""
        return self.rounds[0]

    def catching_up(self, behind: int) -> float:
        """What a draft model reads before its first pass, which takes one token or two."""
        return 0.0 if behind <= 2 else self.draft + (behind - 1) * self.reading

    def first(self, behind: int) -> float:
        """The first draft pass of a round."""
        return self.draft_two if behind == 2 else self.draft


def undisturbed(seconds: Sequence[float]) -> float:
    """What a pass takes when nothing else wants the cores: other programs only ever slow it."""
    return min(seconds)


def estimate(bundle: Bundle, max_draft_tokens: int) -> CostTable:
    """A table from the weights' bytes alone, with costs of speculation that are rather too high.

    Only ratios matter to a choice, so the unknown speed of the memory hardly does.
    """
    sizes: dict[str, float] = {r: bundle.files[m.weights].size for r, m in bundle.models.items()}
    if bundle.shares_weights:  # a draft of the target's own layers reads a part of them
        sizes["draft"] *= bundle.draft.num_parameters / max(1, bundle.target.num_parameters)
    target, draft = (max(sizes[role], 1) / BANDWIDTH for role in ("target", "draft"))
    rows = tuple(range(1, max_draft_tokens + 2))
    return CostTable(
        origin="bytes",
        lengths=(0,),
        rows=rows,
        target=(tuple(target * (1 + ROW * (t - 1)) for t in rows),),
        draft=((draft, draft * (1 + ROW)),),
        reading=(draft * ROW,),
        host={"greedy": HOST, "sampled": HOST},
        acceptance={},
    )


def _interpolate(xs: Sequence[int], values: Sequence[float], x: float) -> float:
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


def _check_ascending(name: str, values: tuple[int, ...], least: int) -> None:
    if not values or values[0] < least or any(a >= b for a, b in pairwise(values)):
        raise ValueError(f"{name} ascend, from at least {least}")
