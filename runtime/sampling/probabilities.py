"""Distribution of the next token: the function that draft, target and plain decoding share.

V vocabulary entries. A round has up to 2K + 1 rows of 50,000 tokens or more, so weights are not
normalized, and filters set weights to zero. Only top-k, which keeps few tokens, selects their ids.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from specedge.errors import OptionError, SpecEdgeError
from specedge.sampling_options import Sampling

from .distribution import Distribution, Floats, Ids
from .history import History
from .logits import Row
from .logits_processors import process_logits
from .top_k_p import nearest, nucleus, top

_NOT_A_NUMBER = (
    "the model's logits are not numbers: its weights are damaged or its arithmetic overflows; run "
    "'specedge inspect --check', or export the model again"
)
NOTHING_LEFT = (
    "the grammar, logit_bias, bad_words, min_new_tokens and no_repeat_ngram_size leave no token to "
    "continue with; allow one of the tokens that they exclude"
)


def probabilities(
    logits: Floats, sampling: Sampling, history: History, ids: Ids | None = None
) -> Distribution:
    """Return the distribution of a row of logits [n] above temperature 0.

    Penalties, biases and bans, then temperature, top-k, top-p, min-p and typical-p, in the order of
    transformers; top-k keeps every logit that ties with the k-th. Computed in the type of the
    logits.

    Args:
        logits: Logits of the tokens `ids`. [n]
        sampling: Sampling options.
        history: Text before the row's token.
        ids: Token ids, ascending; None for ids 0 to n - 1. [n]

    Raises:
        OptionError: The options leave no token.
        SpecEdgeError: The logits are not numbers.
    """
    assert not sampling.greedy
    scores = process_logits(logits, sampling, history, ids)
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


def row_distribution(row: Row, sampling: Sampling, history: History) -> Distribution:
    """Return the distribution of a row above temperature 0; with top-k only, fetch few logits."""
    if sampling.top_k and not sampling.edits:
        row = row.for_top_k(sampling.top_k)
    return probabilities(row.array(), sampling, history, row.ids)


def most_likely(row: Row, count: int, sampling: Sampling, history: History) -> tuple[Ids, Floats]:
    """Return the `count` largest processed logits, as `Row.largest` does.

    Without logits processors, only these are fetched from the device.
    """
    if sampling.edits:
        scores = process_logits(row.array(), sampling, history, row.ids)
        ids, values = Row(scores, row.ids).largest(count)
    else:
        ids, values = row.largest(count)
    if not math.isfinite(values[0]):
        _largest(values, row.array())
    return ids, values


def greedy_token(row: Row, sampling: Sampling, history: History) -> int:
    """Return the token of temperature 0: the argmax of the processed logits."""
    return int(most_likely(row, 1, sampling, history)[0][0])


def _weights(scores: Floats, largest: float, temperature: float) -> Floats:
    """Return softmax weights, 1 for the most likely token.

    Temperatures are clipped to the range of the logits' type.
    """
    weights: Floats = scores - largest
    if temperature != 1:
        limits = np.finfo(scores.dtype)
        temperature = min(max(temperature, float(limits.tiny)), float(limits.max))
        with np.errstate(over="ignore"):
            weights /= scores.dtype.type(temperature)
    return np.exp(weights, out=weights)


def _largest(scores: Floats, logits: Floats) -> Any:
    """Return the largest score; raise if none is finite."""
    largest = scores.max()
    if math.isfinite(largest):
        return largest
    if largest == -np.inf and math.isfinite(logits.max()):
        raise OptionError(NOTHING_LEFT)
    raise SpecEdgeError(_NOT_A_NUMBER)


def _typical(weights: Floats, typical_p: float) -> Floats:
    """Apply locally typical sampling (Meister et al. 2022). [n] -> [n]

    Keeps the tokens whose surprisal is closest to the entropy until their probability reaches
    `typical_p`, with ties. Differences of log-weights equal those of surprisals.
    """
    logs = np.log(np.maximum(weights, np.finfo(weights.dtype).tiny))
    expected = (weights * logs).sum() / weights.sum()
    return nearest(weights, np.abs(logs - expected), typical_p)
