"""Log-probabilities of emitted tokens: what the target itself thought of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .distribution import Floats
from .top_k_p import top


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
    logits: Floats, tokens: Sequence[int], count: int | None
) -> list[TokenLogprobs] | None:
    """The log-probabilities of emitted tokens [n], by the rows that they followed [n or more, V],
    with the `count` likeliest of each row; None if count is None.
    """
    if count is None:
        return None
    return [_of_token(row, token, count) for row, token in zip(logits, tokens, strict=False)]


def _of_token(logits: Floats, token: int, count: int) -> TokenLogprobs:
    largest = logits.max()
    total = np.exp(logits - largest).sum(dtype=np.float64)
    offset = float(largest) + math.log(total)
    ids = top(logits, min(count, len(logits))) if count else np.zeros(0, np.intp)
    ids = ids[np.argsort(-logits[ids], kind="stable")][:count]
    likeliest = [(int(i), float(logits[i]) - offset) for i in ids if logits[i] > -np.inf]
    return TokenLogprobs(token, float(logits[token]) - offset, likeliest)
