"""Drafters to study and to learn from: one without knowledge, one without order."""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from specedge.errors import OptionError
from specedge.request import DrafterName
from specedge.sampling_options import Sampling

from ..decoding.verification import Draft, draw
from ..sampling.distribution import Distribution, Floats
from ..sampling.history import History
from .draft_model import DraftModel
from .prompt_lookup import MAX_MATCH, Lookup


class Random:
    """Drafts any token of the vocabulary alike: the least that a drafter can do."""

    name = DrafterName.RANDOM

    def __init__(self, vocab_size: int) -> None:
        self._distribution = Distribution(np.full(vocab_size, 1 / vocab_size))

    def propose(
        self, history: History, max_tokens: int, sampling: Sampling, uniforms: Floats
    ) -> Draft:
        tokens = [self._distribution.pick(float(uniforms[i])) for i in range(max_tokens)]
        return Draft(tokens, [self._distribution] * max_tokens)

    def truncate(self, length: int) -> None:
        """Nothing is remembered."""


class Block:
    """Drafts all tokens at once: one pass of the draft model, whatever their number.

    The pass reads a guess of the text to come, a copy of what followed the longest earlier match
    or else the last token again and again. Row i of it gives the distribution of draft token i,
    which so depends on the guess before i and on no other draft token. A model trained to draft
    without order would take the place of the guess.
    """

    name = DrafterName.BLOCK

    def __init__(self, reader: DraftModel) -> None:
        self._reader = reader
        self._lookup = Lookup(1, MAX_MATCH)

    def propose(
        self, history: History, max_tokens: int, sampling: Sampling, uniforms: Floats
    ) -> Draft:
        if not max_tokens:
            return Draft([])
        feed, room = self._reader.catch_up(history)
        num_guessed = min(max_tokens, room) - 1
        guess = self._lookup.propose(history, num_guessed, sampling, uniforms).tokens
        guess += history.tokens[-1:] * (num_guessed - len(guess))
        scores = self._reader.model.forward([*feed, *self._reader.known(guess)])
        drawn = []
        with suppress(OptionError):  # the draft knows none that the options allow
            for i in range(len(guess) + 1):
                row = scores[len(feed) - 1 + i]
                drawn.append(draw(row, sampling, history.then(guess[:i]), float(uniforms[i])))
        self._reader.truncate(len(history.tokens))  # what is read next is not what was guessed
        return Draft([token for token, _ in drawn], [distribution for _, distribution in drawn])

    def truncate(self, length: int) -> None:
        self._lookup.truncate(length)
        self._reader.truncate(length)
