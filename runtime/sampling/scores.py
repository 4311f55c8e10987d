"""The logits of a pass, asked for by what is needed of them.

These hold arrays in the host's memory; a device that keeps the rest to itself derives classes of
its own from them. T rows, V vocabulary entries.
"""

from __future__ import annotations

import numpy as np

from .distribution import Floats, Ids
from .top_k_p import top


class Row:
    """One row of logits. [V]"""

    def __init__(self, logits: Floats) -> None:
        self._logits = logits

    def largest(self, count: int) -> tuple[Ids, Floats]:
        """The `count` largest logits, fewer if V is smaller: their tokens and values, the largest
        first, the lower token first among equals. One that is not a number counts as the largest.
        -> [count], [count]
        """
        logits = self._logits
        best = int(logits.argmax())
        if count == 1 or np.isnan(logits[best]):
            ids = np.array([best], np.intp)
        else:
            ids = top(logits, min(count, len(logits)))
            ids = ids[np.argsort(-logits[ids], kind="stable")][:count]
        return ids, logits[ids]

    def array(self) -> Floats:
        """All logits of the row. -> [V]"""
        return self._logits


class Scores:
    """The logits of a pass, valid until the next pass of its model. [T, V]"""

    def __init__(self, logits: Floats) -> None:
        self._logits = logits

    def __getitem__(self, row: int) -> Row:
        return Row(self._logits[row])

    def array(self) -> Floats:
        """All of them. -> [T, V]"""
        return self._logits
