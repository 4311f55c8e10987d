"""Logits that stay on a device; the host fetches only what it needs.

They are valid until the next pass with the same weights. A scored graph returns the best logits
of each row, their columns, and whether all logits are finite. T rows of n columns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np

from ...sampling.distribution import Floats, Ids
from ...sampling.logits import Logits, Row


class DeviceLogits(Logits):
    """Logits that are fetched on first use.

    `fetch_all` returns the logits, [T, n], `fetch_best` the output of a scored graph,
    [T, 2 m + 1]; each is called once at most.
    """

    def __init__(
        self,
        fetch_all: Callable[[], Floats],
        fetch_best: Callable[[], Floats],
        num_columns: int,
        ids: Ids | None = None,
    ) -> None:
        self._fetch_all = fetch_all
        self._fetch_best = fetch_best
        self.num_columns = num_columns
        self.ids = ids

    def __getitem__(self, row: int) -> Row:
        return DeviceRow(self, row)

    def array(self) -> Floats:
        return self._all

    @cached_property
    def _all(self) -> Floats:
        return self._fetch_all()

    @cached_property
    def best(self) -> Floats:
        """The best logits of each row, their columns, and 0 if all logits are finite."""
        return self._fetch_best()


class DeviceRow(Row):
    """Row of logits on a device; the best logits are used where they suffice."""

    def __init__(self, logits: DeviceLogits, index: int) -> None:
        self._pass, self._index = logits, index
        self.ids = logits.ids

    def __len__(self) -> int:
        return self._pass.num_columns

    def array(self) -> Floats:
        row: Floats = self._pass.array()[self._index]
        return row

    def largest(self, count: int) -> tuple[Ids, Floats]:
        best = self._best(count)
        if best is None:
            return Row(self.array(), self.ids).largest(count)
        columns, values = best
        order = np.lexsort((columns, -values))[:count]
        columns, values = columns[order], values[order]
        return columns if self.ids is None else self.ids[columns], values

    def for_top_k(self, k: int) -> Row:
        best = self._best(k)
        if best is None:
            return Row(self.array(), self.ids)
        columns, values = best
        order = np.argsort(columns)
        columns, values = columns[order], values[order]
        return Row(values, columns if self.ids is None else self.ids[columns])

    def _best(self, count: int) -> tuple[Ids, Floats] | None:
        """Return columns and values of the `count` largest logits and of all ties with the last.

        None if they are not all among the best logits, or if a logit is not finite.
        """
        row = self._pass.best[self._index]
        num = len(row) // 2
        values, columns, non_finite = row[:num], row[num:-1].astype(np.intp), row[-1]
        if non_finite != 0:
            return None
        if count >= num:
            return (columns, values) if num == len(self) else None
        tied = values >= values[count - 1]
        return None if tied[-1] and num < len(self) else (columns[tied], values[tied])
