"""What proposes tokens for the target to judge."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

from specedge.errors import OptionError
from specedge.options import Sampling

from .distribution import Distribution, Floats
from .model import LanguageModel
from .past import Past
from .sampling import Draft, draw

STAND_IN = 0


class Drafter(Protocol):
    """Proposes tokens that may follow a text."""

    def propose(self, past: Past, max_tokens: int, sampling: Sampling, uniforms: Floats) -> Draft:
        """Guess up to `max_tokens` tokens that follow `past`; uniforms [max_tokens or more]."""
        ...

    def truncate(self, length: int) -> None:
        """Forget every token past `length`: the target rejected them."""
        ...


class DraftModel:
    """Drafts with a smaller language model.

    After a full acceptance its cache is two tokens behind, otherwise one: the first pass of the
    next round feeds both, so a round of n tokens always costs n passes.

    The model may know less than the target. A token that it lacks is fed as `STAND_IN`: with none
    there, all that follow would have other positions. When its context is full, it reads the last
    half of that again from position 0. That depends on the length of the text alone,
    not on `max_tokens`, so a seed's text does not depend on where a request ends.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        context_length: int = sys.maxsize,
        vocab_size: int = sys.maxsize,
    ) -> None:
        self.model = model
        self.context_length = context_length
        self.vocab_size = vocab_size
        self._start = 0  # the place in the text of the cache's first token

    def propose(self, past: Past, max_tokens: int, sampling: Sampling, uniforms: Floats) -> Draft:
        if not max_tokens:
            return Draft([])
        tokens = past.tokens
        if len(tokens) - self._start > self.context_length:
            self._start = len(tokens) - max(1, self.context_length // 2)
            self.model.truncate(0)
        feed = self._known(tokens[self._start + self.model.length :])
        if len(feed) > 2:
            self.model.prefill(feed[:-1])
            feed = feed[-1:]
        room = self._start + self.context_length - len(tokens) + 1
        drafted: list[int] = []
        probs: list[Distribution] = []
        for i in range(min(max_tokens, room)):
            logits = self.model.forward(feed)[-1]
            text = past.then(drafted)
            try:
                token, distribution = draw(logits, sampling, text, float(uniforms[i]))
            except OptionError:  # what the options allow are tokens that the draft does not know
                break
            drafted.append(token)
            if distribution is not None:
                probs.append(distribution)
            feed = [token]
        return Draft(drafted, probs or None)

    def truncate(self, length: int) -> None:
        if length < self._start:
            self._start = 0
            self.model.truncate(0)
        self.model.truncate(min(length - self._start, self.model.length))

    def _known(self, tokens: Sequence[int]) -> list[int]:
        return [token if token < self.vocab_size else STAND_IN for token in tokens]
