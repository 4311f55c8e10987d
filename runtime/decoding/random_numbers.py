"""Counter-based random numbers of a request, reproducible in any language.

Uniforms are computed by splitmix64 (Steele, Lea and Flood 2014), a pure function of a stream's seed
and an index. They have 53 bits: a token of probability p is drawn with an error of at most 2^-53,
which is accurate for the tail of a large vocabulary.

With Gumbel coupling (Daliri, Musco and Suresh 2024, "Coupling without communication and
drafter-invariant speculative decoding"), draft and target choose tokens by the same noise. The
noise of token v at a position is E(v), exponentially distributed and a pure function of seed,
choice, position and v. A model with distribution p chooses the token with the smallest E(v) / p(v),
which has distribution p; it is the argmax of log p(v) + g(v) with Gumbel noise g(v) = -log E(v). A
draft token is accepted if it is the target's choice, so the text equals plain decoding for any
drafter, and P(accept) >= (1 - TV) / (1 + TV).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..sampling.distribution import Distribution, Floats, Ids

_STEP = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_UNIT = 2.0**-53
_UNIFORM_BLOCK = 256  # uniforms computed at a time
_NOISE_BLOCK = 2**14  # ids whose noise is computed at a time, to fit the CPU cache
_MARGIN = 1 + 2.0**-20  # more than the float32 rounding error of a bound


def word(stream: int, index: int) -> int:
    """Return number `index` of a stream as 64 bits, which may seed another stream."""
    z = (stream + (index + 1) * _STEP) % 2**64
    z = (z ^ (z >> 30)) * _MIX_1 % 2**64
    z = (z ^ (z >> 27)) * _MIX_2 % 2**64
    return z ^ (z >> 31)


def words(stream: int, indexes: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
    """Return the numbers at these indices of a stream, as `word` does. [n] -> [n]"""
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
    """Return numbers `start` to `start + count - 1` of a seed's stream, in [0, 1). -> [count]"""
    bits = words(seed, np.arange(start, start + count)) >> np.uint64(11)
    return bits.astype(np.float64) * _UNIT


class Uniforms:
    """Sequential reader of a seed's stream, which computes a block at a time."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._num_computed = 0
        self._buffer = np.empty(0)

    def take(self, count: int) -> NDArray[np.float64]:
        """Return the next numbers. -> [count]"""
        if count > len(self._buffer):
            more = uniforms(self._seed, self._num_computed, max(_UNIFORM_BLOCK, count))
            self._num_computed += len(more)
            self._buffer = np.concatenate([self._buffer, more])
        numbers, self._buffer = self._buffer[:count], self._buffer[count:]
        return numbers


class GumbelNoise:
    """Noise of one text for Gumbel coupling.

    Token v at position i, both counted from 0 and the prompt included, has the uniform number

        x = (word(word(word(seed, choice), i), v) >> 11 | 1) 2^-53    in [2^-53, 1 - 2^-53]

    and E(v) = -log(1 - x). It does not depend on the model, the filters or the draft vocabulary.
    """

    def __init__(self, seed: int, choice: int = 0) -> None:
        self._stream = word(seed, choice)
        self._bounds: dict[int, Floats] = {}  # by position, of the tokens from 0 on

    def choose(self, distribution: Distribution, position: int) -> int:
        """Return the token with the smallest E(v) / p(v), the lowest id on ties.

        Since E(v) > x(v), a logarithm is needed only for tokens whose x(v) / p(v) is below the best
        score so far, and noise only for those that could reach that score with x = 2^-53.
        """
        weights, ids = distribution.weights, distribution.ids
        stream = word(self._stream, position)

        def score(token: int, weight: Any) -> float:
            return exponential(stream, token) / float(weight)

        mode = int(weights.argmax())
        token = mode if ids is None else int(ids[mode])
        can_win = _reach(weights, score(token, weights[mode])) >= 1
        if ids is None and 2 * np.count_nonzero(can_win) > len(weights):
            bounds = self._bounds_of_all(position, stream, len(weights))
        else:
            columns = can_win.nonzero()[0]
            ids = columns if ids is None else ids[columns]
            weights = weights[columns]
            bounds = _noise_bounds(stream, ids)
        nearest = int((weights / bounds).argmax())
        token = nearest if ids is None else int(ids[nearest])
        rivals = (bounds <= _reach(weights, score(token, weights[nearest]))).nonzero()[0]
        tokens = (rivals if ids is None else ids[rivals]).tolist()
        best: int = min((score(v, w), v) for v, w in zip(tokens, weights[rivals], strict=True))[1]
        return best

    def _bounds_of_all(self, position: int, stream: int, count: int) -> Floats:
        """Return the bounds of tokens 0 to `count` - 1, cached for draft and target. -> [count]"""
        bounds = self._bounds.get(position, np.zeros(0, np.float32))
        if len(bounds) < count:
            bounds = np.concatenate([bounds, _noise_bounds(stream, np.arange(len(bounds), count))])
            self._bounds[position] = bounds
        return bounds[:count]

    def forget(self, length: int) -> None:
        """Drop the bounds of positions before `length`."""
        self._bounds = {i: bounds for i, bounds in self._bounds.items() if i >= length}


def _reach(weights: Floats, score: float) -> Floats:
    """Return the largest bound with which each token can reach a score. [n] -> [n]"""
    return weights * weights.dtype.type(score * _MARGIN / _UNIT)


def exponential(stream: int, token: int) -> float:
    """Return E(v) of a token, from the stream of its position."""
    return -math.log(1 - (word(stream, token) >> 11 | 1) * _UNIT)


def _noise_bounds(stream: int, ids: Ids) -> Floats:
    """Return x / 2^-53 of tokens in float32, a lower bound of E up to rounding. [n] -> [n]"""
    bounds = np.empty(len(ids), np.float32)
    for start in range(0, len(ids), _NOISE_BLOCK):
        z = words(stream, ids[start : start + _NOISE_BLOCK])
        z >>= np.uint64(11)
        z |= np.uint64(1)
        bounds[start : start + _NOISE_BLOCK] = z.view(np.int64)
    return bounds
