"""What is done to logits before they become a distribution: penalties, biases and bans, in this
order.

Repetition penalty, bad words and held back end tokens are transformers'; presence and frequency
penalties and the bias by token are OpenAI's and vLLM's.
"""

from __future__ import annotations

import numpy as np

from specedge.options import Sampling

from .distribution import Floats
from .history import History


def edited(logits: Floats, sampling: Sampling, history: History) -> Floats:
    """A row of logits with what the options change; the row itself stays as it is. [V] -> [V]

    A model that knows fewer tokens than the options name lacks the others here too.
    """
    if not sampling.edits:
        return logits
    logits = logits.copy()
    if sampling.counts:
        _penalise(logits, sampling, history)
    for token, bias in dict(sampling.logit_bias).items():
        if token < len(logits):
            logits[token] += logits.dtype.type(bias)
    if sampling.bad_words:
        _ban(logits, sampling, history)
    if history.num_new_tokens < sampling.min_new_tokens:
        for token in sampling.end_tokens:
            logits[token : token + 1] = -np.inf
    return logits


def _penalise(logits: Floats, sampling: Sampling, history: History) -> None:
    """The text so far makes its own tokens less likely, or more."""
    ids, counts = history.counts()
    if len(ids) and ids.max() >= len(logits):
        ids, counts = ids[ids < len(logits)], counts[ids < len(logits)]
    values, number = logits[ids], logits.dtype.type
    if sampling.repetition_penalty != 1:
        limits = np.finfo(logits.dtype)
        least, most = float(limits.tiny), float(limits.max)
        penalty = number(min(max(sampling.repetition_penalty, least), most))
        with np.errstate(over="ignore"):
            values = np.where(values < 0, values * penalty, values / penalty)
        values = np.minimum(values, most)
    values -= number(sampling.frequency_penalty) * counts.astype(logits.dtype)
    values -= number(sampling.presence_penalty) * (counts > 0)
    logits[ids] = values


def _ban(logits: Floats, sampling: Sampling, history: History) -> None:
    """No bad word can be completed by the next token."""
    for word in sampling.bans.get(None, ()):
        logits[word[0] : word[0] + 1] = -np.inf
    for word in sampling.bans.get(history.last(1)[0], ()):
        if list(word[:-1]) == history.last(len(word) - 1):
            logits[word[-1] : word[-1] + 1] = -np.inf
