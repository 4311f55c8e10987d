"""What is done to logits before they become a distribution: penalties, biases and bans, in this
order; last what a grammar bans.

Repetition penalty, bad words and held back end tokens are transformers'; presence and frequency
penalties and the bias by token are OpenAI's and vLLM's.
"""

from __future__ import annotations

import numpy as np

from specedge.sampling_options import Sampling

from .distribution import Floats, Ids
from .history import History


def edited(logits: Floats, sampling: Sampling, history: History, ids: Ids | None = None) -> Floats:
    """A row of logits with what the options change; the row itself stays as it is. [n] -> [n]

    The logits are of the tokens `ids` [n], ascending, without ids 0 to n - 1. Tokens that the
    options name and the row lacks are passed over.
    """
    if not sampling.edits:
        return logits
    logits = logits.copy()
    if sampling.counts:
        _penalise(logits, ids, sampling, history)
    for token, bias in dict(sampling.logit_bias).items():
        logits[_place(token, ids)] += logits.dtype.type(bias)
    if sampling.bad_words:
        _ban(logits, ids, sampling, history)
    if history.num_new_tokens < sampling.min_new_tokens:
        for token in sampling.end_tokens:
            logits[_place(token, ids)] = -np.inf
    if sampling.constraint:
        banned = sampling.constraint.banned(history)
        logits[banned[: len(logits)] if ids is None else banned[ids]] = -np.inf
    return logits


def _place(token: int, ids: Ids | None) -> slice:
    """Where a row has a token: an empty place if it lacks it."""
    if ids is None:
        return slice(token, token + 1)
    at = int(ids.searchsorted(token))
    return slice(at, at + int(at < len(ids) and ids[at] == token))


def _penalise(logits: Floats, ids: Ids | None, sampling: Sampling, history: History) -> None:
    """The text so far makes its own tokens less likely, or more."""
    columns, counts = counts_of(history, len(logits), ids)
    values, number = logits[columns], logits.dtype.type
    if sampling.repetition_penalty != 1:
        limits = np.finfo(logits.dtype)
        least, most = float(limits.tiny), float(limits.max)
        penalty = number(min(max(sampling.repetition_penalty, least), most))
        with np.errstate(over="ignore"):
            values = np.where(values < 0, values * penalty, values / penalty)
        values = np.minimum(values, most)
    values -= number(sampling.frequency_penalty) * counts.astype(logits.dtype)
    values -= number(sampling.presence_penalty) * (counts > 0)
    logits[columns] = values


def counts_of(history: History, size: int, ids: Ids | None) -> tuple[Ids, Ids]:
    """Which of a row's columns are tokens that are in the text, and how often they follow the
    prompt.
    """
    tokens, counts = history.counts()
    if ids is not None:
        columns = np.minimum(ids.searchsorted(tokens), size - 1)
        known = ids[columns] == tokens
        return columns[known], counts[known]
    if len(tokens) and tokens.max() >= size:
        return tokens[tokens < size], counts[tokens < size]
    return tokens, counts


def _ban(logits: Floats, ids: Ids | None, sampling: Sampling, history: History) -> None:
    """No bad word can be completed by the next token."""
    for word in sampling.bans.get(None, ()):
        logits[_place(word[0], ids)] = -np.inf
    for word in sampling.bans.get(history.last(1)[0], ()):
        if list(word[:-1]) == history.last(len(word) - 1):
            logits[_place(word[-1], ids)] = -np.inf
