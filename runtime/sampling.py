"""Standardised sampling and the accept rule: pure functions over NumPy arrays.

Letters: V vocabulary entries, n draft tokens. Row i of a model's logits predicts the token that
follows the i-th token it was fed, so judging n draft tokens takes n + 1 target rows. Random
numbers in [0, 1) arrive as arguments. Draft, target and plain decoding share `probabilities`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specedge.errors import SpecEdgeError
from specedge.options import Sampling

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Draft:
    """Proposed tokens [n] and the distributions they were drawn from [n, V], None if certain."""

    tokens: list[int]
    probs: Sequence[Floats] | None = None


@dataclass(frozen=True)
class Verdict:
    """What the target made of a draft: how many tokens stand, and the one that follows them."""

    num_accepted: int
    next_token: int


def verify(
    draft: Draft, target_logits: Floats, sampling: Sampling, tests: Floats, last: float
) -> Verdict:
    """Accept or reject draft tokens so the output follows the target's distribution exactly.

    Leviathan et al. 2023, algorithm 1: token x stands if u d(x) < t(x), without a division, so
    that t(x) = 0 never passes. After the first rejection the recovered token follows
    max(0, t - d); after none, the bonus token follows the target's last row.

    target_logits [n + 1, V], tests [n or more] and last: uniforms
    """
    if sampling.greedy:
        return _verify_greedy(draft.tokens, target_logits)
    for i, token in enumerate(draft.tokens):
        target = probabilities(target_logits[i], sampling)
        drafted = 1.0 if draft.probs is None else float(draft.probs[i][token])
        if not tests[i] * drafted < target[token]:
            return Verdict(i, pick(_residual(target, draft, i), last))
    num_drafted = len(draft.tokens)
    return Verdict(num_drafted, pick(probabilities(target_logits[num_drafted], sampling), last))


def _verify_greedy(tokens: list[int], target_logits: Floats) -> Verdict:
    """The same rule with one-hot rows: a token stands if it is the target's own choice."""
    for i, token in enumerate(tokens):
        choice = argmax(target_logits[i])
        if token != choice:
            return Verdict(i, choice)
    return Verdict(len(tokens), argmax(target_logits[len(tokens)]))


def _residual(target: Floats, draft: Draft, i: int) -> Floats:
    """Weights of the recovered token, max(0, t - d). [V] -> [V]"""
    if draft.probs is None:
        residual = target.copy()
        residual[draft.tokens[i]] = 0
    else:
        residual = np.maximum(target - draft.probs[i], 0)
    # Where t and d agree to rounding nothing is left; a rejection was then a rounding error too.
    return residual if residual.any() else target


def draw(logits: Floats, sampling: Sampling, uniform: float) -> tuple[int, Floats | None]:
    """Draw a token from logits, with the distribution it came from, None if certain. [V]"""
    if sampling.greedy:
        return argmax(logits), None
    probs = probabilities(logits, sampling)
    return pick(probs, uniform), probs


def argmax(logits: Floats) -> int:
    """The token with the largest logit, the lowest id on ties. [V] -> token"""
    token = int(np.argmax(logits))
    if np.isnan(logits[token]):
        raise SpecEdgeError(_NOT_A_NUMBER)
    return token


def probabilities(logits: Floats, sampling: Sampling) -> Floats:
    """Turn one row of logits into the distribution to draw from, above temperature 0. [V] -> [V]

    Temperature, top-k, top-p and min-p in the order of transformers; top-k keeps every tie with
    the k-th. Computed in the type of the logits.
    """
    assert not sampling.greedy
    # A temperature too small for the type of the logits still means the largest logit.
    temperature = max(sampling.temperature, float(np.finfo(logits.dtype).tiny))
    with np.errstate(over="ignore"):
        scaled = (logits - np.max(logits)) / logits.dtype.type(temperature)
    if 0 < sampling.top_k < len(scaled):
        kth = np.partition(scaled, -sampling.top_k)[-sampling.top_k]
        scaled[scaled < kth] = -np.inf
    probs = np.exp(scaled)
    probs /= probs.sum()
    if np.isnan(probs[0]):
        raise SpecEdgeError(_NOT_A_NUMBER)
    if sampling.top_p < 1:
        probs = _nucleus(probs, sampling.top_p)
    if sampling.min_p > 0:
        probs[probs < sampling.min_p * probs.max()] = 0
        probs /= probs.sum()
    return probs


def pick(weights: Floats, uniform: float) -> int:
    """Draw a token with probability proportional to its weight, by inverse CDF. [V] -> token"""
    cdf = np.cumsum(weights, dtype=np.float64)
    token = int(np.searchsorted(cdf, uniform * cdf[-1], side="right"))
    # The product can round up to the total; the last token with any weight is meant then.
    return token if token < len(cdf) else int(np.searchsorted(cdf, cdf[-1]))


def _nucleus(probs: Floats, top_p: float) -> Floats:
    """Keep the smallest set of tokens whose probability reaches `top_p`. [V] -> [V]

    Tokens below (1 - top_p) / V cannot reach 1 - top_p together, so none of them is in the set,
    and only the others are sorted.
    """
    candidates = np.flatnonzero(probs >= (1 - top_p) / len(probs))
    order = candidates[np.argsort(-probs[candidates], kind="stable")]
    before = np.cumsum(probs[order], dtype=np.float64) - probs[order]
    inside = order[before < top_p]
    kept = np.zeros_like(probs)
    kept[inside] = probs[inside]
    kept /= kept.sum()
    return kept


_NOT_A_NUMBER = (
    "the model's logits are not numbers; its weights are damaged or its arithmetic overflows: "
    "try 'specedge inspect --check', or export it again"
)
