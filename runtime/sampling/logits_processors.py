"""Logits processors: penalties, biases and bans, then the masks of grammars and timestamps.

Repetition penalty, bad words, repeated n-grams and suppressed tokens follow transformers; presence
penalty, frequency penalty and logit bias follow OpenAI's API and vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from specedge.sampling_options import Sampling

from .distribution import Floats, Ids
from .history import History
from .timestamps import apply_timestamp_rules


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
    if sampling.bans_tokens and (banned := list(_banned_tokens(sampling, history))):
        columns, is_present = _columns(np.array(banned, np.intp), len(logits), ids)
        logits[columns[is_present]] = -np.inf
    if sampling.constraint:
        mask = sampling.constraint.banned(history)
        logits[mask[: len(logits)] if ids is None else mask[ids]] = -np.inf
    if sampling.timestamps:
        apply_timestamp_rules(logits, sampling.timestamps, history, ids)
    return logits


def text_columns(history: History, size: int, ids: Ids | None) -> tuple[Ids, Ids]:
    """Return the columns of a row whose tokens are in the text, and their counts after the prompt.

    -> [n], [n]
    """
    tokens, counts = history.counts()
    columns, is_present = _columns(tokens, size, ids)
    return columns[is_present], counts[is_present]


def _columns(tokens: Ids, size: int, ids: Ids | None) -> tuple[Ids, NDArray[np.bool_]]:
    """Return the column of each token, and a mask of the tokens that the row has. -> [n], [n]"""
    if ids is None:
        return tokens, tokens < size
    columns = np.minimum(ids.searchsorted(tokens), size - 1)
    return columns, ids[columns] == tokens


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


def _banned_tokens(sampling: Sampling, history: History) -> Iterator[int]:
    """Yield the tokens that cannot follow a text, without those of a constraint."""
    yield from sampling.suppress_tokens
    if history.num_new_tokens == 0:
        yield from sampling.begin_suppress_tokens
    if history.num_new_tokens < sampling.min_new_tokens:
        yield from sampling.end_tokens
    for word in sampling.bans.get(None, ()):
        yield word[0]
    for word in sampling.bans.get(history.last(1)[0], ()):
        if list(word[:-1]) == history.last(len(word) - 1):
            yield word[-1]
    if sampling.no_repeat_ngram_size:
        yield from _repeating_tokens(history.tokens, sampling.no_repeat_ngram_size)


def _repeating_tokens(tokens: list[int], size: int) -> Iterator[int]:
    """Yield the tokens that would complete an n-gram which the text already has."""
    if size == 1:
        yield from tokens
        return
    prefix, num_ngrams, start = tokens[1 - size :], max(0, len(tokens) - size + 1), -1
    with suppress(ValueError):
        while True:
            start = tokens.index(prefix[0], start + 1, num_ngrams)
            if tokens[start : start + size - 1] == prefix:
                yield tokens[start + size - 1]
