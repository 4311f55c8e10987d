"""What a pipeline knows of its costs: stored ones, else an estimate that its requests replace."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from specedge.bundle import Bundle
from specedge.errors import SpecEdgeError
from specedge.options import MAX_EXPORTED_DRAFT_TOKENS

from . import cost_files
from .acceptance import PRIOR
from .costs import ROW, CostTable, ModeCosts, estimate, typical

LEAST = 3  # passes of a kind that count as measured


@dataclass(frozen=True)
class Seen:
    """What one request measured: seconds of each round's first pass, by its tokens, of the `later`
    draft passes, and of the host a round; how many draft tokens were tested, and how many stood.
    """

    greedy: bool
    target: Mapping[int, Sequence[float]]
    draft: Mapping[int, Sequence[float]]
    later: Sequence[float]
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
        self._table: CostTable | None = None

    @property
    def table(self) -> CostTable:
        """The costs to plan with."""
        if self._table is None:
            self._table = self._stored[0] or self._estimate
        return self._table

    @table.setter
    def table(self, table: CostTable) -> None:
        self._table = table

    @property
    def settled_table(self) -> CostTable:
        """The costs to plan drawn text with: no request changes them, so that a seed repeats.

        Where K differs a seed gives another text of the same law; at temperature 0 it does not.
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
        self._table = table
        return path

    def learn(self, seen: Seen) -> None:
        """Replace an estimate by what a request measured; where that cannot be stored, for now."""
        if self._key is None or self.table.origin != "bytes":
            return
        table = measured(self.table, seen)
        if table is not None:
            with contextlib.suppress(OSError):
                self.remember(table)
            self._table = table

    @cached_property
    def _stored(self) -> tuple[CostTable | None, str | None]:
        return (None, None) if self._key is None else cost_files.read(self._key)


def measured(table: CostTable, seen: Seen) -> CostTable | None:
    """An estimate with what was seen in place of it; None if that was too little.

    What was not seen is scaled as its nearest neighbours are. One request's acceptance may raise
    what later ones expect, not lower it: its text may have been an odd one.
    """
    known = table.mode(seen.greedy)
    target = _costs(seen.target, table.rows)
    draft = _costs(seen.draft, (1, 2))
    if not target or 1 not in draft:
        return None
    ratios = {t: cost / known.target[0][table.rows.index(t)] for t, cost in target.items()}
    costs = [
        cost * ratios[min(ratios, key=lambda seen: (abs(seen - t), seen))]
        for t, cost in zip(table.rows, known.target[0], strict=True)
    ]
    one = draft[1]
    two = max(one, draft.get(2, one * (1 + ROW)))
    later = typical(seen.later) if len(seen.later) >= LEAST else one
    passes = ModeCosts(
        target=(tuple(min(costs[i:]) for i in range(len(costs))),),
        draft=((one, two, later),),
        reading=(later * ROW,),
        host=(seen.host, known.host[1]),
        acceptance={},
    )
    expected = {"model": max(PRIOR, seen.num_accepted / max(1, seen.num_tested))}
    this, other = replace(passes, acceptance=expected), replace(passes, host=known.host)
    greedy, sampled = (this, other) if seen.greedy else (other, this)
    return replace(table, origin="use", greedy=greedy, sampled=sampled)


def _costs(seconds: Mapping[int, Sequence[float]], rows: Sequence[int]) -> dict[int, float]:
    """Of the passes that were seen often enough; the first of a kind binds buffers."""
    return {t: typical(seconds[t][1:]) for t in rows if len(seconds.get(t, ())) > LEAST}
