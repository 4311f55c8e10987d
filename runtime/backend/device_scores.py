"""The logits of a pass that lie on a device, of which a host fetches no more than it needs.

They lie where passes of the model and of its twins may write again. A scored graph gives the best
logits of each row, their columns, and whether all are finite. T rows of n columns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np

from ..sampling.distribution import Floats, Ids
from ..sampling.scores import Row, Scores


class DeviceScores(Scores):
    """Scores whose `fetch_all` gives the logits, [T, n], and `fetch_best` what a scored graph gives
    of them, [T, 2 m + 1]; each is called once, if at all.
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
        """The best logits of each row, their columns, and 0 where all logits are finite."""
        return self._fetch_best()


class DeviceRow(Row):
    """A row of those, which answers by the best logits where these say enough."""

    def __init__(self, scores: DeviceScores, at: int) -> None:
        self._scores, self._at = scores, at
        self.ids = scores.ids

    def __len__(self) -> int:
        return self._scores.num_columns

    def array(self) -> Floats:
        row: Floats = self._scores.array()[self._at]
        return row

    def largest(self, count: int) -> tuple[Ids, Floats]:
        found = self._best(count)
        if found is None:
            return Row(self.array(), self.ids).largest(count)
        columns, values = found
        order = np.lexsort((columns, -values))[:count]
        columns, values = columns[order], values[order]
        return columns if self.ids is None else self.ids[columns], values

    def for_top_k(self, k: int) -> Row:
        found = self._best(k)
        if found is None:
            return Row(self.array(), self.ids)
        columns, values = found
        order = np.argsort(columns)
        columns, values = columns[order], values[order]
        return Row(values, columns if self.ids is None else self.ids[columns])

    def _best(self, count: int) -> tuple[Ids, Floats] | None:
        """The columns and values of the `count` largest logits and of all that tie with the last;
        None where they are not all among the best, or a logit is not a number.
        """
        row = self._scores.best[self._at]
        num = len(row) // 2
        values, columns, wrong = row[:num], row[num:-1].astype(np.intp), row[-1]
        if wrong != 0:
            return None
        if count >= num:
            return (columns, values) if num == len(self) else None
        tied = values >= values[count - 1]
        return None if tied[-1] and num < len(self) else (columns[tied], values[tied])
