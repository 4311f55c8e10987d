"""Logits processors: penalties, biases and bans, in this order, then the grammar's mask.

Repetition penalty, bad words and suppressed end tokens follow transformers; presence penalty,
frequency penalty and logit bias follow OpenAI's API and vLLM.
"""

from __future__ import annotations

import numpy as np

from specedge.sampling_options import Sampling

from .distribution import Floats, Ids
from .history import History


def process_logits(
    logits: Floats, sampling: Sampling, history: History, ids: Ids | None = None
) -> Floats:
    """Return a row of logits after all processors, in a new array if there are any. [n] -> [n]

    Tokens that the row lacks are ignored.

    Args:
        logits: Logits of the tokens `ids`. [n]
        sampling: Sampling options.
        history: Text before the row's token.
        ids: Token ids, ascending; None for ids 0 to n - 1. [n]
    """
    if not sampling.edits:
        return logits
    logits = logits.copy()
    if sampling.counts:
        _apply_penalties(logits, ids, sampling, history)
    for token, bias in dict(sampling.logit_bias).items():
        logits[_column(token, ids)] += logits.dtype.type(bias)
    if sampling.bad_words:
        _ban_bad_words(logits, ids, sampling, history)
    if history.num_new_tokens < sampling.min_new_tokens:
        for token in sampling.end_tokens:
            logits[_column(token, ids)] = -np.inf
    if sampling.constraint:
        banned = sampling.constraint.banned(history)
        logits[banned[: len(logits)] if ids is None else banned[ids]] = -np.inf
    return logits


def text_columns(history: History, size: int, ids: Ids | None) -> tuple[Ids, Ids]:
    """Return the columns of a row whose tokens are in the text, and their counts after the prompt.

    -> [n], [n]
    """
    tokens, counts = history.counts()
    if ids is not None:
        columns = np.minimum(ids.searchsorted(tokens), size - 1)
        is_present = ids[columns] == tokens
        return columns[is_present], counts[is_present]
    if len(tokens) and tokens.max() >= size:
        return tokens[tokens < size], counts[tokens < size]
    return tokens, counts


def _column(token: int, ids: Ids | None) -> slice:
    """Return the column of a token, an empty slice if the row lacks it."""
    if ids is None:
        return slice(token, token + 1)
    at = int(ids.searchsorted(token))
    return slice(at, at + int(at < len(ids) and ids[at] == token))


def _apply_penalties(logits: Floats, ids: Ids | None, sampling: Sampling, history: History) -> None:
    columns, counts = text_columns(history, len(logits), ids)
    values, number = logits[columns], logits.dtype.type
    if sampling.repetition_penalty != 1:
        limits = np.finfo(logits.dtype)
        lowest, highest = float(limits.tiny), float(limits.max)
        penalty = number(min(max(sampling.repetition_penalty, lowest), highest))
        with np.errstate(over="ignore"):
            values = np.where(values < 0, values * penalty, values / penalty)
        values = np.minimum(values, highest)
    values -= number(sampling.frequency_penalty) * counts.astype(logits.dtype)
    values -= number(sampling.presence_penalty) * (counts > 0)
    logits[columns] = values


def _ban_bad_words(logits: Floats, ids: Ids | None, sampling: Sampling, history: History) -> None:
    """Ban each token that would complete a bad word."""
    for word in sampling.bans.get(None, ()):
        logits[_column(word[0], ids)] = -np.inf
    for word in sampling.bans.get(history.last(1)[0], ()):
        if list(word[:-1]) == history.last(len(word) - 1):
            logits[_column(word[-1], ids)] = -np.inf
