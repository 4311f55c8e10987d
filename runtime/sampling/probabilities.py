"""From logits to the distribution of the next token: the one function that draft, target and plain
decoding share. V vocabulary entries.

A round has up to 2K + 1 rows of 50,000 tokens or more. So a distribution is weights that were never
divided by their sum, filters write zeros over what they leave out, and only top-k, which leaves
few, makes a list of them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from specedge.errors import OptionError, SpecEdgeError
from specedge.sampling_options import Sampling

from .distribution import Distribution, Floats, Ids
from .history import History
from .logit_edits import edited
from .scores import Row
from .top_k_p import nearest, nucleus, top


def probabilities(
    logits: Floats, sampling: Sampling, history: History, ids: Ids | None = None
) -> Distribution:
    """Turn one row of logits into the distribution to draw from, above temperature 0. [n]

    The logits are of the tokens `ids` [n], ascending, without ids 0 to n - 1.

    Penalties, biases and bans, then temperature, top-k, top-p, min-p and typical-p, in the order of
    transformers; top-k keeps every logit that ties with the k-th. Computed in the type of the
    logits. OptionError if the options leave no token.
    """
    assert not sampling.greedy
    scores = edited(logits, sampling, history, ids)
    largest = _largest(scores, logits)
    if 0 < sampling.top_k < len(scores):
        columns = top(scores, sampling.top_k)
        scores, ids = scores[columns], columns if ids is None else ids[columns]
    weights = _weights(scores, largest, sampling.temperature)
    if sampling.top_p < 1:
        weights = nucleus(weights, sampling.top_p)
    if sampling.min_p > 0:
        weights *= weights >= sampling.min_p  # the largest is 1
    if sampling.typical_p < 1:
        weights = _typical(weights, sampling.typical_p)
    return Distribution(weights, ids)


def of_row(row: Row, sampling: Sampling, history: History) -> Distribution:
    """The same of a row, of which no more is asked for than the options need."""
    if sampling.top_k and not sampling.edits:
        row = row.for_top_k(sampling.top_k)
    return probabilities(row.array(), sampling, history, row.ids)


def _weights(scores: Floats, largest: float, temperature: float) -> Floats:
    """The likeliest token's weight is 1.

    A temperature beyond the type of the logits still means the largest logit, or all alike.
    """
    weights: Floats = scores - largest
    if temperature != 1:
        limits = np.finfo(scores.dtype)
        temperature = min(max(temperature, float(limits.tiny)), float(limits.max))
        with np.errstate(over="ignore"):
            weights /= scores.dtype.type(temperature)
    return np.exp(weights, out=weights)


def likeliest(row: Row, count: int, sampling: Sampling, history: History) -> tuple[Ids, Floats]:
    """The `count` largest logits after the edits, as `Row.largest` gives them. Without edits no
    more than these is asked for.
    """
    if sampling.edits:
        scores = edited(row.array(), sampling, history, row.ids)
        ids, values = Row(scores, row.ids).largest(count)
    else:
        ids, values = row.largest(count)
    if not math.isfinite(values[0]):
        _largest(values, row.array())
    return ids, values


def choice(row: Row, sampling: Sampling, history: History) -> int:
    """The token that temperature 0 takes: the largest logit after the edits."""
    return int(likeliest(row, 1, sampling, history)[0][0])


def _largest(scores: Floats, logits: Floats) -> Any:
    """The largest score; an error where there is none."""
    largest = scores.max()
    if math.isfinite(largest):
        return largest
    if largest == -np.inf and math.isfinite(logits.max()):
        raise OptionError(NOTHING_LEFT)
    raise SpecEdgeError(_NOT_A_NUMBER)


def _typical(weights: Floats, typical_p: float) -> Floats:
    """Leave the tokens whose surprise is nearest to the expected one. [n] -> [n]

    As many as it takes to reach `typical_p`, and every one that is as near as the last of them. The
    distance of two surprises is that of the weights' logarithms.
    """
    logs = np.log(np.maximum(weights, np.finfo(weights.dtype).tiny))
    expected = (weights * logs).sum() / weights.sum()
    return nearest(weights, np.abs(logs - expected), typical_p)


_NOT_A_NUMBER = (
    "the model's logits are not numbers; its weights are damaged or its arithmetic overflows: "
    "try 'specedge inspect --check', or export it again"
)
NOTHING_LEFT = (
    "the grammar, logit_bias, bad_words and min_new_tokens leave no token to go on with; allow one "
    "of those they forbid"
)
