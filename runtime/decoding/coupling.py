"""Gumbel coupling: draft and target choose a token with the same noise.

Daliri, Musco and Suresh 2024, "Coupling without communication and drafter-invariant speculative
decoding". The noise of token v at a position of the text is E(v), exponentially distributed and a
pure function of seed, choice, position and v. A model with distribution p chooses the token of the
least E(v) / p(v), which has distribution p; it is the argmax of log p(v) + g(v) with the Gumbel
noise g(v) = -log E(v). A draft token is accepted if it is the target's own choice, so the text is
that of plain decoding, whatever drafts, and P(accept) >= (1 - TV) / (1 + TV).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..sampling.distribution import Distribution, Floats, Ids
from .randomness import word, words

_UNIT = 2.0**-53
_MARGIN = 1 + 2.0**-20  # above what float32 rounds away in a bound and its limit
_BLOCK = 2**14  # ids whose noise is computed at a time, in the processor's cache


class GumbelNoise:
    """The noise of one text.

    Token v at position i, both counted from 0 and the prompt included, has the uniform number

        x = (word(word(word(seed, choice), i), v) >> 11 | 1) 2^-53    in [2^-53, 1 - 2^-53]

    and E(v) = -log(1 - x). `word` is splitmix64's. Nothing depends on which other tokens' noise is
    computed, so that every model, filter and draft vocabulary sees the same numbers.
    """

    def __init__(self, seed: int, choice: int = 0) -> None:
        self._stream = word(seed, choice)
        self._bounds: dict[int, Floats] = {}  # by position, of the tokens from 0 on

    def choose(self, distribution: Distribution, position: int) -> int:
        """Return the token of the least E(v) / p(v), the lowest id on ties.

        As E(v) > x(v), only tokens whose x(v) / p(v) is below a known score need a logarithm, and
        only those whose p lets x = 2^-53 get there need noise at all.
        """
        weights, ids = distribution.weights, distribution.ids
        stream = word(self._stream, position)

        def score(token: int, weight: Any) -> float:
            return exponential(stream, token) / float(weight)

        likeliest = int(weights.argmax())
        token = likeliest if ids is None else int(ids[likeliest])
        can_win = _reach(weights, score(token, weights[likeliest])) >= 1
        if ids is None and 2 * np.count_nonzero(can_win) > len(weights):
            bounds = self._of_all(position, stream, len(weights))
        else:
            columns = can_win.nonzero()[0]
            ids = columns if ids is None else ids[columns]
            weights = weights[columns]
            bounds = _bounds(stream, ids)
        nearest = int((weights / bounds).argmax())
        token = nearest if ids is None else int(ids[nearest])
        rivals = (bounds <= _reach(weights, score(token, weights[nearest]))).nonzero()[0]
        tokens = (rivals if ids is None else ids[rivals]).tolist()
        best: int = min((score(v, w), v) for v, w in zip(tokens, weights[rivals], strict=True))[1]
        return best

    def _of_all(self, position: int, stream: int, count: int) -> Floats:
        """Return the bounds of tokens 0 to `count` - 1, which draft and target share. [count]"""
        known = self._bounds.get(position, np.zeros(0, np.float32))
        if len(known) < count:
            known = np.concatenate([known, _bounds(stream, np.arange(len(known), count))])
            self._bounds[position] = known
        return known[:count]

    def forget(self, length: int) -> None:
        """Drop what is kept of the positions before `length`."""
        self._bounds = {i: bounds for i, bounds in self._bounds.items() if i >= length}


def _reach(weights: Floats, score: float) -> Floats:
    """Return the largest bounds with which tokens may have that score or a lower one. [n] -> [n]"""
    return weights * weights.dtype.type(score * _MARGIN / _UNIT)


def exponential(stream: int, token: int) -> float:
    """Return E of a token, given the stream of its position."""
    return -math.log(1 - (word(stream, token) >> 11 | 1) * _UNIT)


def _bounds(stream: int, ids: Ids) -> Floats:
    """Return x / 2^-53 of tokens, rounded: E is above x. [n] -> [n]"""
    bounds = np.empty(len(ids), np.float32)
    for start in range(0, len(ids), _BLOCK):
        z = words(stream, ids[start : start + _BLOCK])
        z >>= np.uint64(11)
        z |= np.uint64(1)
        bounds[start : start + _BLOCK] = z.view(np.int64)
    return bounds
