"""From logits to the law of the next token: the one function that draft, target and plain
decoding share. V vocabulary entries.

Selecting from a row of 50,000 takes 0.3 ms, so the filters look at blocks first (0.03 ms); a round
has up to 2K + 1 rows.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specedge.errors import OptionError, SpecEdgeError
from specedge.options import Sampling

from .distribution import Distribution, Floats, Ids
from .edits import edited
from .past import Past

_BLOCK = 64


def probabilities(logits: Floats, sampling: Sampling, past: Past) -> Distribution:
    """Turn one row of logits into the distribution to draw from, above temperature 0. [V]

    Penalties, biases and bans, then temperature, top-k, top-p, min-p and typical-p, in the order of
    transformers; top-k keeps every logit that ties with the k-th. Computed in the type of the
    logits. OptionError if the options leave no token.
    """
    assert not sampling.greedy
    scores = edited(logits, sampling, past)
    largest = _largest(scores, logits)
    ids = top(scores, sampling.top_k) if 0 < sampling.top_k < len(scores) else None
    # A temperature beyond the type of the logits still means the largest logit, or all alike.
    limits = np.finfo(scores.dtype)
    temperature = min(max(sampling.temperature, float(limits.tiny)), float(limits.max))
    with np.errstate(over="ignore"):
        weights = (scores if ids is None else scores[ids]) - largest
        weights /= scores.dtype.type(temperature)
    np.exp(weights, out=weights)
    weights /= weights.sum()
    law = Distribution(weights, ids)
    if sampling.top_p < 1:
        law = law.only(_nucleus(law.probs, sampling.top_p))
    if sampling.min_p > 0:
        law = law.only(_places(law.probs >= sampling.min_p * law.probs.max()))
    if sampling.typical_p < 1:
        law = law.only(_typical(law.probs, sampling.typical_p))
    return law


def choice(logits: Floats, sampling: Sampling, past: Past) -> int:
    """The token that temperature 0 takes: the largest logit after the edits. [V] -> token"""
    scores = edited(logits, sampling, past)
    token = int(np.argmax(scores))
    if not math.isfinite(scores[token]):
        _largest(scores, logits)
    return token


def _largest(scores: Floats, logits: Floats) -> Any:
    """The largest score; an error where there is none."""
    largest = scores.max()
    if math.isfinite(largest):
        return largest
    if largest == -np.inf and math.isfinite(logits.max()):
        raise OptionError(NOTHING_LEFT)
    raise SpecEdgeError(_NOT_A_NUMBER)


def top(logits: Floats, k: int) -> Ids:
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


def _typical(probs: Floats, typical_p: float) -> Ids:
    """Places of the tokens whose surprise is nearest to the expected one, ascending. [n]

    As many as it takes to reach `typical_p`, and every one that is as near as the last of them.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        surprise = -np.log(probs)
        distance = np.abs(surprise - np.nansum(surprise * probs))
    order = np.argsort(distance, kind="stable")
    reached = np.cumsum(probs[order], dtype=np.float64)
    last = min(int(reached.searchsorted(typical_p)), len(probs) - 1)
    return _places(distance <= distance[order[last]])


_NOT_A_NUMBER = (
    "the model's logits are not numbers; its weights are damaged or its arithmetic overflows: "
    "try 'specedge inspect --check', or export it again"
)
NOTHING_LEFT = (
    "logit_bias, bad_words and min_new_tokens leave no token to go on with; allow one of those "
    "they forbid"
)
