"""Hidden states of the target that a draft head has observed, and the rows that it read of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specedge.sampling_options import MAX_DRAFT_TOKENS

from ..sampling.history import History

Array = NDArray[Any]

# Observed states that are kept, at most as many as of a prompt's chunk and the verify pass after it
WINDOW = 256 + MAX_DRAFT_TOKENS + 1


class ObservedStates:
    """Hidden states [W, F] of the last tokens of a text, in a ring buffer.

    They belong to the cache of a draft head, and outlast a request as its rows do. Position i is
    that of token i in the text. Row i of the cache reads the state of token `start` + i and the
    token after it.

    Attributes:
        history: The text; None before the first one.
        first: Position of the first state.
        end: Position after the last state.
        start: Position of the state that the first row of the cache has read.
        num_rows: Number of rows that have read states of the target. Rows after them have read the
            head's own states.
    """

    def __init__(self, num_channels: int, window: int = WINDOW) -> None:
        self.history: History | None = None
        self.first = self.end = self.start = self.num_rows = 0
        self._states = np.empty((window, num_channels), np.float32)

    @property
    def num_channels(self) -> int:
        """Number of channels of a state, F."""
        return self._states.shape[1]

    @property
    def window(self) -> int:
        """Number of states that are kept."""
        return len(self._states)

    @property
    def next_row(self) -> int:
        """Position of the state that the next row reads."""
        return self.start + self.num_rows

    def write(self, start: int, states: Array) -> None:
        """Set the states [n, F] from a position on; later ones are dropped."""
        if not self.first <= start <= self.end:
            self.first = start
        self.end = start + len(states)
        self.first = max(self.first, self.end - self.window)
        kept = states[-self.window :]
        self._states[self._slots(self.end - len(kept), self.end)] = kept

    def read(self, start: int, end: int) -> Array:
        """Copy the states of a range of positions. -> [end - start, F]"""
        assert self.first <= start <= end <= self.end
        return self._states[self._slots(start, end)]

    def truncate(self, end: int) -> None:
        """Drop the states from a position on."""
        self.end = min(self.end, end)
        self.first = min(self.first, self.end)

    def _slots(self, start: int, end: int) -> NDArray[np.intp]:
        return np.arange(start, end) % self.window
