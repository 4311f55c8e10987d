"""Logits of a pass.

These classes hold arrays in host memory; subclasses keep logits in device memory until they are
read. T rows of n columns, one for each of the V vocabulary entries unless a draft model has a
reduced vocabulary (pruned LM head).
"""

from __future__ import annotations

import numpy as np

from .distribution import Floats, Ids
from .top_k_p import top


class Row:
    """Row of logits [n] of the tokens `ids` [n], which are ascending; None means 0 to n - 1."""

    def __init__(self, logits: Floats, ids: Ids | None = None) -> None:
        self._logits = logits
        self.ids = ids

    def __len__(self) -> int:
        return len(self._logits)

    def largest(self, count: int) -> tuple[Ids, Floats]:
        """Return the tokens and values of the `count` largest logits, fewer if n is smaller.

        The largest comes first, the lower token id first on ties. NaN counts as the largest.
        -> [count], [count]
        """
        logits = self._logits
        columns: Ids = logits.argmax(axis=0, keepdims=True)
        if count > 1 and not np.isnan(logits[columns[0]]):
            columns = top(logits, min(count, len(logits)))
            columns = columns[np.argsort(-logits[columns], kind="stable")][:count]
        return columns if self.ids is None else self.ids[columns], logits[columns]

    def array(self) -> Floats:
        """Return all logits of the row. -> [n]"""
        return self._logits

    def for_top_k(self, k: int) -> Row:
        """Return a row with at least the k largest logits and all that tie with the k-th."""
        return self


class Logits:
    """Logits of a pass [T, n], valid until the next pass with the same weights.

    Models with the same weights may share device memory. Arrays in host memory are valid until the
    next pass of this model. `ids` [n] are the token ids of the columns, as in `Row`.
    """

    def __init__(self, logits: Floats, ids: Ids | None = None) -> None:
        self._logits = logits
        self.ids = ids

    def __getitem__(self, row: int) -> Row:
        return Row(self._logits[row], self.ids)

    def array(self) -> Floats:
        """Return all logits. -> [T, n]"""
        return self._logits
