"""What a pipeline knows of its costs: stored ones, else an estimate that its requests replace."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from specedge import store
from specedge.bundle import Bundle
from specedge.errors import SpecEdgeError
from specedge.options import MAX_EXPORTED_DRAFT_TOKENS

from . import cost_files
from .cost_table import EXPECTED, CostTable, ModeCosts, estimate, typical

LEAST = 3  # passes of a kind that count as measured; what is expected counts as so many tests


@dataclass(frozen=True)
class Seen:
    """What one request measured, in seconds.

    target: passes, by their tokens
    draft: all passes of a round, by the tokens of the first and how many there were
    firsts: rounds' first draft passes, by their tokens
    host: a round's work outside the graphs
    num_tested, num_accepted: tokens of the draft model
    """

    greedy: bool
    target: Mapping[int, Sequence[float]]
    draft: Mapping[tuple[int, int], Sequence[float]]
    firsts: Mapping[int, Sequence[float]]
    host: float
    num_tested: int
    num_accepted: int


class KnownCosts:
    """The table of a bundle on a device. Without a `key` nothing is stored, and nothing learnt.

    The table is read when it is first needed. A request that began keeps the table it began with.
    """

    def __init__(self, bundle: Bundle, key: cost_files.Key | None = None) -> None:
        self._bundle = bundle
        self._key = key

    @cached_property
    def table(self) -> CostTable:
        """The costs to plan with."""
        return self._stored[0] or self._estimate

    @property
    def settled_table(self) -> CostTable:
        """The costs to plan drawn text with: no request changes them, so that a seed repeats.

        Where K differs a seed gives another text of the same distribution; at temperature 0 it does
        not.
        """
        return self.table if self.table.origin != "use" else self._estimate

    @cached_property
    def _estimate(self) -> CostTable:
        return estimate(self._bundle, MAX_EXPORTED_DRAFT_TOKENS)

    @property
    def note(self) -> str | None:
        """Why stored costs are not used, in one line."""
        return self._stored[1]

    def remember(self, table: CostTable) -> Path:
        """Use these costs from now on, in later processes too. Raises SpecEdgeError."""
        if self._key is None:
            raise SpecEdgeError("costs of a pipeline that was not loaded are not stored")
        path = cost_files.write(self._key, table)
        self.table = table
        return path

    def remember_as_default(self, table: CostTable) -> Path:
        """Store costs for pipelines that are given no number of threads. Raises SpecEdgeError."""
        if self._key is None:
            raise SpecEdgeError("costs of a pipeline that was not loaded are not stored")
        return cost_files.write(replace(self._key, threads=0), table)

    def check_writable(self) -> None:
        """Raise OSError where costs could not be remembered now."""
        if self._key is not None:
            store.check_writable(self._key.path)

    def learn(self, seen: Seen) -> None:
        """Replace an estimate by what a request measured; where that cannot be stored, for now."""
        if self._key is None or self.table.origin != "bytes":
            return
        table = measured(self.table, seen)
        if table is not None:
            with contextlib.suppress(OSError):
                self.remember(table)
            self.table = table

    @cached_property
    def _stored(self) -> tuple[CostTable | None, str | None]:
        return (None, None) if self._key is None else cost_files.read(self._key)


def measured(table: CostTable, seen: Seen) -> CostTable | None:
    """An estimate with what was seen in place of it; None if that was too little.

    What was not seen is scaled as its nearest neighbours are. One request's acceptance may raise
    what later ones expect, not lower it: its text may have been an odd one.
    """
    known = table.mode(seen.greedy)
    target, ratio = _scaled(table.rows, known.target[0], seen.target), _draft_ratio(known, seen)
    if target is None or ratio is None:
        return None
    passes = ModeCosts(
        target=(target,),
        draft=(tuple(ratio * cost for cost in known.draft[0]),),
        pending=(ratio * known.pending[0],),
        reading=(ratio * known.reading[0],),
        host=tuple(seen.host + host - known.host[0] for host in known.host),
        acceptance=known.acceptance,
    )
    expected = known.acceptance.get("model", EXPECTED)
    rate = (seen.num_accepted + LEAST * expected) / (seen.num_tested + LEAST)
    raised = known.acceptance | {"model": max(expected, rate)}
    this, other = replace(passes, acceptance=raised), replace(passes, host=known.host)
    greedy, sampled = (this, other) if seen.greedy else (other, this)
    return replace(table, origin="use", greedy=greedy, sampled=sampled)


def _draft_ratio(known: ModeCosts, seen: Seen) -> float | None:
    """Seconds of all rounds' draft passes over what they should have taken; the first of a kind
    does not count. None if there were too few.
    """
    took: list[float] = []
    expected: list[float] = []
    for (first, k), seconds in seen.draft.items():
        if k <= len(known.draft[0]):
            took += seconds[1:]
            cost = known.draft[0][k - 1] + (known.pending[0] if first == 2 else 0.0)
            expected += [cost] * len(seconds[1:])
    return sum(took) / sum(expected) if len(took) >= LEAST else None


def _scaled(
    kinds: Sequence[int], known: Sequence[float], seen: Mapping[int, Sequence[float]]
) -> tuple[float, ...] | None:
    """What is known, scaled to what was seen often enough; more of a kind never costs less. The
    first of a kind binds buffers, and does not count. None if nothing was seen often enough.
    """
    ratios = {
        kind: typical(seen[kind][1:]) / cost
        for kind, cost in zip(kinds, known, strict=True)
        if len(seen.get(kind, ())) > LEAST
    }
    if not ratios:
        return None
    costs = [
        cost * ratios[min(ratios, key=lambda timed: (abs(timed - kind), timed))]
        for kind, cost in zip(kinds, known, strict=True)
    ]
    return tuple(min(costs[i:]) for i in range(len(costs)))
