"""The stream of uniform random numbers of a request, replayable in any language.

splitmix64 (Steele, Lea and Flood 2014) is a pure function of the seed and the index, so any
number is had without those before it. 53 bits, not fewer: a token of probability p is drawn with an
error of at most 2^-53, which keeps the tail of a large vocabulary right.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_BLOCK = 256  # numbers
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniforms(seed: int, start: int, count: int) -> NDArray[np.float64]:
    """Numbers `start` to `start + count - 1` of a seed's stream, each in [0, 1). -> [count]"""
    index = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    z = np.uint64(seed % 2**64) + index * _STEP
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Uniforms:
    """A seed's stream from its beginning on, a block at a time, which costs as much as a number."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._computed = 0
        self._left = np.empty(0)

    def take(self, count: int) -> NDArray[np.float64]:
        """The next numbers. -> [count]"""
        if count > len(self._left):
            more = uniforms(self._seed, self._computed, max(_BLOCK, count))
            self._computed += len(more)
            self._left = np.concatenate([self._left, more])
        taken, self._left = self._left[:count], self._left[count:]
        return taken
