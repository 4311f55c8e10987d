"""Source of a text: the input of an encoder-decoder's encoder."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Source:
    """Token ids [N], or a log-mel spectrogram [mel bins, frames]; equal if the contents are.

    Raises:
        TypeError: The values are neither integers nor a two-dimensional array.
        OverflowError: An integer has more than 64 bits.
    """

    values: Sequence[int] | NDArray[Any] = field(compare=False)
    _content: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.values, np.ndarray) and self.values.ndim == 2:
            values = np.array(self.values, np.float32)
        else:
            values = np.array(list(map(operator.index, self.values)), np.int64)
        values.setflags(write=False)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "_content", values.tobytes())

    @property
    def tokens(self) -> list[int]:
        """Token ids; empty for a spectrogram."""
        values = np.asarray(self.values)
        tokens: list[int] = values.tolist() if values.ndim == 1 else []
        return tokens

    @property
    def length(self) -> int:
        """Number of tokens, or of frames."""
        return int(np.shape(self.values)[-1])
