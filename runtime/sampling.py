"""Standardised sampling and the accept rule: pure functions over NumPy arrays.

Letters: V vocabulary entries, n draft tokens. Row i of a model's logits predicts the token that
follows the i-th token it was fed, so judging n draft tokens takes n + 1 target rows. Random
numbers in [0, 1) arrive as arguments. Draft, target and plain decoding share `probabilities`.

Selecting from a row of 50,000 takes 0.3 ms and adding it up token by token 0.6 ms, so both look at
blocks first (0.03 ms); a round has up to 2K + 1 rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specedge.errors import SpecEdgeError
from specedge.options import Sampling

from .past import Past

Floats = NDArray[np.floating[Any]]
Ids = NDArray[np.intp]

_BLOCK = 64


@dataclass(frozen=True)
class Distribution:
    """The probabilities [n] of the tokens `ids` [n], ascending; without ids, of tokens 0 to n - 1.

    All other tokens have none: those that a filter left out, or that a draft does not know.
    """

    probs: Floats
    ids: Ids | None = None

    def of(self, token: int) -> float:
        """The probability of one token."""
        at = token if self.ids is None else int(self.ids.searchsorted(token))
        if at >= len(self.probs) or (self.ids is not None and self.ids[at] != token):
            return 0.0
        return float(self.probs[at])

    def pick(self, uniform: float) -> int:
        """Draw a token."""
        at = pick(self.probs, uniform)
        return at if self.ids is None else int(self.ids[at])

    def only(self, places: Ids) -> Distribution:
        """The law given that the token is at one of these places of `probs`, ascending."""
        probs = self.probs[places]
        return Distribution(probs / probs.sum(), places if self.ids is None else self.ids[places])

    def row(self, vocab_size: int) -> Floats:
        """All tokens, in an array of its own. -> [V]"""
        row = np.zeros(vocab_size, self.probs.dtype)
        row[self.where] = self.probs
        return row

    @property
    def where(self) -> Ids | slice:
        """Where in a whole row the probabilities belong."""
        return slice(len(self.probs)) if self.ids is None else self.ids


@dataclass(frozen=True)
class Draft:
    """Proposed tokens [n] and the distributions they were drawn from [n], None if certain.

    One token may be certain and the next not. `sources` [n] names the drafter of each; left empty,
    it is the one that was asked. A draft may know fewer tokens than its target, never more.
    """

    tokens: list[int]
    probs: Sequence[Distribution | None] | None = None
    sources: Sequence[str] = ()

    def law(self, i: int) -> Distribution | None:
        """The distribution of one token, None if it is certain."""
        return None if self.probs is None else self.probs[i]


@dataclass(frozen=True)
class Verdict:
    """What the target made of a draft: how many tokens stand, and the one that follows them."""

    num_accepted: int
    next_token: int


def verify(
    draft: Draft,
    target_logits: Floats,
    sampling: Sampling,
    past: Past,
    tests: Floats,
    last: float,
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
        target = probabilities(target_logits[i], sampling, past.then(draft.tokens[:i]))
        law = draft.law(i)
        drafted = 1.0 if law is None else law.of(token)
        if not tests[i] * drafted < target.of(token):
            residual = _residual(target.row(len(target_logits[i])), draft, i)
            return Verdict(i, pick(residual, last) if residual.any() else target.pick(last))
    num_drafted = len(draft.tokens)
    target = probabilities(target_logits[num_drafted], sampling, past.then(draft.tokens))
    return Verdict(num_drafted, target.pick(last))


def _verify_greedy(tokens: list[int], target_logits: Floats) -> Verdict:
    """The same rule with one-hot rows: a token stands if it is the target's own choice."""
    for i, token in enumerate(tokens):
        choice = argmax(target_logits[i])
        if token != choice:
            return Verdict(i, choice)
    return Verdict(len(tokens), argmax(target_logits[len(tokens)]))


def _residual(target: Floats, draft: Draft, i: int) -> Floats:
    """Weights of the recovered token, max(0, t - d), written over the target's. [V] -> [V]

    Where t and d agree to rounding nothing is left; a rejection was then a rounding error too.
    """
    drafted = draft.law(i)
    if drafted is None:
        target[draft.tokens[i]] = 0
        return target
    target[drafted.where] -= drafted.probs
    return np.maximum(target, 0, out=target)


def draw(
    logits: Floats, sampling: Sampling, past: Past, uniform: float
) -> tuple[int, Distribution | None]:
    """Draw a token from logits, with the distribution it came from, None if certain. [V]"""
    if sampling.greedy:
        return argmax(logits), None
    law = probabilities(logits, sampling, past)
    return law.pick(uniform), law


def argmax(logits: Floats) -> int:
    """The token with the largest logit, the lowest id on ties. [V] -> token"""
    token = int(np.argmax(logits))
    if not math.isfinite(logits[token]):
        raise SpecEdgeError(_NOT_A_NUMBER)
    return token


def probabilities(logits: Floats, sampling: Sampling, past: Past) -> Distribution:
    """Turn one row of logits into the distribution to draw from, above temperature 0. [V]

    Temperature, top-k, top-p and min-p in the order of transformers; top-k keeps every logit that
    ties with the k-th. Computed in the type of the logits.
    """
    assert not sampling.greedy
    largest = logits.max()
    if not math.isfinite(largest):
        raise SpecEdgeError(_NOT_A_NUMBER)
    ids = _top(logits, sampling.top_k) if 0 < sampling.top_k < len(logits) else None
    # A temperature beyond the type of the logits still means the largest logit, or all alike.
    limits = np.finfo(logits.dtype)
    temperature = min(max(sampling.temperature, float(limits.tiny)), float(limits.max))
    with np.errstate(over="ignore"):
        weights = (logits if ids is None else logits[ids]) - largest
        weights /= logits.dtype.type(temperature)
    np.exp(weights, out=weights)
    weights /= weights.sum()
    law = Distribution(weights, ids)
    if sampling.top_p < 1:
        law = law.only(_nucleus(law.probs, sampling.top_p))
    if sampling.min_p > 0:
        law = law.only(_places(law.probs >= sampling.min_p * law.probs.max()))
    return law


def pick(weights: Floats, uniform: float) -> int:
    """Draw a token with probability proportional to its weight, by inverse CDF. [V] -> token"""
    if len(weights) <= _BLOCK:
        cdf = weights.cumsum(dtype=np.float64)
        return _first_above(cdf, uniform * cdf[-1])
    starts = np.arange(0, len(weights), _BLOCK)
    cdf = np.add.reduceat(weights, starts, dtype=np.float64).cumsum()
    goal = uniform * cdf[-1]
    block = _first_above(cdf, goal)
    start, before = block * _BLOCK, cdf[block - 1] if block else 0.0
    inside = weights[start : start + _BLOCK].cumsum(dtype=np.float64)
    return start + _first_above(inside, goal - before)


def _first_above(cdf: Floats, goal: float) -> int:
    """Where a CDF first exceeds a value; where rounding put that at its end, the last rise."""
    at = int(cdf.searchsorted(goal, "right"))
    return at if at < len(cdf) else int(cdf.searchsorted(cdf[-1]))


def _top(logits: Floats, k: int) -> Ids:
    """The tokens whose logits are the k-th largest or above, ascending. [V] -> [k or more]

    The k-th largest of the largest in each of 64 rows or more bounds it from below.
    """
    num_groups = len(logits) // _BLOCK
    if num_groups <= k:
        return _places(logits >= _kth(logits, k))
    grouped = logits[: num_groups * _BLOCK].reshape(_BLOCK, num_groups)
    candidates = _places(logits >= _kth(grouped.max(0), k))
    values = logits[candidates]
    return candidates[values >= _kth(values, k)]


def _kth(values: Floats, k: int) -> float:
    """The k-th largest."""
    values = values.copy()
    values.partition(-k)
    return float(values[-k])


def _places(true: NDArray[np.bool_]) -> Ids:
    places: Ids = true.nonzero()[0]
    return places


def _nucleus(probs: Floats, top_p: float) -> Ids:
    """Places of the smallest set of tokens whose probability reaches `top_p`, ascending. [n]

    Tokens below (1 - top_p) / n cannot reach 1 - top_p together, so none of them is in the set.
    From there to the largest the probability of the last one in is bisected, for as long as the
    sums decide it beyond rounding, until few are left to sort.
    """
    low, high = (1 - top_p) / len(probs), 2 * float(probs.max())
    edge = _places(probs >= low)
    values, sure = probs[edge], 0.0  # `sure` is the sum of those from `high` on
    while len(edge) > _BLOCK and high > (1 + 1e-6) * low:
        middle = math.sqrt(low * high)
        above = values >= middle
        total = sure + float(values[above].sum(dtype=np.float64))
        if abs(total - top_p) < 1e-9:
            break
        if total < top_p:
            sure, high, above = total, middle, ~above
        else:
            low = middle
        edge, values = edge[above], values[above]
    order = np.argsort(-values, kind="stable")
    before = sure + np.cumsum(values[order], dtype=np.float64) - values[order]
    inside = probs >= high
    inside[edge[order[before < top_p]]] = True
    return _places(inside)


_NOT_A_NUMBER = (
    "the model's logits are not numbers; its weights are damaged or its arithmetic overflows: "
    "try 'specedge inspect --check', or export it again"
)
