"""Log-probabilities of emitted tokens: what the target itself thought of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .scores import Row, Scores


@dataclass(frozen=True)
class TokenLogprobs:
    """A token's natural log-probability, and those of the likeliest tokens, likeliest first.

    By the softmax of the model's own logits, before any option of the request: what vLLM gives by
    default. `top` has (token, log-probability); the lower id comes first on ties, and tokens
    without any probability are left out.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


def of_tokens(
    scores: Scores, tokens: Sequence[int], count: int | None
) -> list[TokenLogprobs] | None:
    """The log-probabilities of emitted tokens [n], by the rows that they followed [n or more],
    with the `count` likeliest of each row; None if count is None.
    """
    if count is None:
        return None
    return [_of_token(scores[i], token, count) for i, token in enumerate(tokens)]


def _of_token(row: Row, token: int, count: int) -> TokenLogprobs:
    logits = row.array()
    largest = logits.max()
    total = np.exp(logits - largest).sum(dtype=np.float64)
    offset = float(largest) + math.log(total)
    top = zip(*row.largest(count), strict=True) if count else ()
    likeliest = [(int(i), float(logit) - offset) for i, logit in top if logit > -np.inf]
    return TokenLogprobs(token, float(logits[token]) - offset, likeliest)
