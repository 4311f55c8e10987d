"""The random numbers of a request, replayable in any language.

splitmix64 (Steele, Lea and Flood 2014) is a pure function of a stream's seed and the index, so any
number is had without those before it. 53 bits, not fewer: a token of probability p is drawn with an
error of at most 2^-53, which keeps the tail of a large vocabulary right.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_BLOCK = 256  # numbers
_STEP = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def word(stream: int, index: int) -> int:
    """Return number `index` of a stream as 64 bits. It may be the seed of another stream."""
    z = (stream + (index + 1) * _STEP) % 2**64
    z = (z ^ (z >> 30)) * _MIX_1 % 2**64
    z = (z ^ (z >> 27)) * _MIX_2 % 2**64
    return z ^ (z >> 31)


def words(stream: int, indexes: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
    """Return the numbers of these indexes of a stream, as `word` gives them. [n] -> [n]"""
    z = indexes.astype(np.uint64)
    z += np.uint64(1)
    z *= np.uint64(_STEP)
    z += np.uint64(stream % 2**64)
    z ^= z >> np.uint64(30)
    z *= np.uint64(_MIX_1)
    z ^= z >> np.uint64(27)
    z *= np.uint64(_MIX_2)
    z ^= z >> np.uint64(31)
    return z


def uniforms(seed: int, start: int, count: int) -> NDArray[np.float64]:
    """Numbers `start` to `start + count - 1` of a seed's stream, each in [0, 1). -> [count]"""
    bits = words(seed, np.arange(start, start + count)) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


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
