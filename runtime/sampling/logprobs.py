"""Log-probabilities of emitted tokens under the target model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .logits import Logits, Row


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural log-probability of a token, and those of the most likely tokens.

    They are computed from the logits before any sampling option, as in vLLM by default. `top` has
    (token, log-probability), most likely first, the lower id first on ties, without tokens of
    probability 0.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


def token_logprobs(
    logits: Logits, tokens: Sequence[int], count: int | None
) -> list[TokenLogprobs] | None:
    """Return the log-probabilities of emitted tokens [n], None if `count` is None.

    Args:
        logits: Logits that the tokens were emitted from. [n or more, V]
        tokens: Emitted tokens. [n]
        count: Number of most likely tokens to add to each.
    """
    if count is None:
        return None
    return [_of_token(logits[i], token, count) for i, token in enumerate(tokens)]


def _of_token(row: Row, token: int, count: int) -> TokenLogprobs:
    logits = row.array()
    largest = logits.max()
    total = np.exp(logits - largest).sum(dtype=np.float64)
    offset = float(largest) + math.log(total)
    top = zip(*row.largest(count), strict=True) if count else ()
    entries = [(int(i), float(logit) - offset) for i, logit in top if logit > -np.inf]
    return TokenLogprobs(token, float(logits[token]) - offset, entries)
