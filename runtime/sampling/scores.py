"""The logits of a pass, asked for by what is needed of them.

These hold arrays in the host's memory; a device that keeps the rest to itself derives classes of
its own from them. T rows of n columns, one for each of the V vocabulary entries unless a draft's
head was cut to some of them.
"""

from __future__ import annotations

import numpy as np

from .distribution import Floats, Ids
from .top_k_p import top


class Row:
    """One row of logits, of the tokens `ids`, ascending, without ids 0 to n - 1. [n], [n]"""

    def __init__(self, logits: Floats, ids: Ids | None = None) -> None:
        self._logits = logits
        self.ids = ids

    def __len__(self) -> int:
        return len(self._logits)

    def largest(self, count: int) -> tuple[Ids, Floats]:
        """The `count` largest logits, fewer if n is smaller: their tokens and values, the largest
        first, the lower token first among equals. One that is not a number counts as the largest.
        -> [count], [count]
        """
        logits = self._logits
        best = int(logits.argmax())
        if count == 1 or np.isnan(logits[best]):
            columns = np.array([best], np.intp)
        else:
            columns = top(logits, min(count, len(logits)))
            columns = columns[np.argsort(-logits[columns], kind="stable")][:count]
        return columns if self.ids is None else self.ids[columns], logits[columns]

    def array(self) -> Floats:
        """All logits of the row. -> [n]"""
        return self._logits

    def for_top_k(self, k: int) -> Row:
        """The row, or no more of it than the k largest logits and all that tie with the last."""
        return self


class Scores:
    """The logits of a pass, to be asked before the next pass of its model or of any twin, whose
    passes may share memory on a device. [T, n]

    What was asked for is the host's: it is valid until the next pass of this model itself.
    `ids` [n] are the columns' tokens, as in a row.
    """

    def __init__(self, logits: Floats, ids: Ids | None = None) -> None:
        self._logits = logits
        self.ids = ids

    def __getitem__(self, row: int) -> Row:
        return Row(self._logits[row], self.ids)

    def array(self) -> Floats:
        """All of them. -> [T, n]"""
        return self._logits
