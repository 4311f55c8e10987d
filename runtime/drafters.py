"""What proposes tokens for the target to judge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specedge.options import Sampling

from .model import LanguageModel
from .sampling import Distribution, Draft, Floats, draw


class Drafter(Protocol):
    """Proposes tokens that may follow a text."""

    def propose(
        self, tokens: Sequence[int], max_tokens: int, sampling: Sampling, uniforms: Floats
    ) -> Draft:
        """Guess up to `max_tokens` tokens that follow `tokens`; uniforms [max_tokens or more]."""
        ...

    def truncate(self, length: int) -> None:
        """Forget every token past `length`: the target rejected them."""
        ...


class DraftModel:
    """Drafts with a smaller language model.

    After a full acceptance its cache is two tokens behind, otherwise one: the first pass of the
    next round feeds both, so a round of n tokens always costs n passes.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model

    def propose(
        self, tokens: Sequence[int], max_tokens: int, sampling: Sampling, uniforms: Floats
    ) -> Draft:
        if not max_tokens:
            return Draft([])
        behind = len(tokens) - self.model.length
        if behind > 2:
            self.model.prefill(tokens[self.model.length : -1])
            behind = 1
        drafted: list[int] = []
        probs: list[Distribution] = []
        feed: Sequence[int] = tokens[-behind:]
        for i in range(max_tokens):
            token, distribution = draw(self.model.forward(feed)[-1], sampling, float(uniforms[i]))
            drafted.append(token)
            if distribution is not None:
                probs.append(distribution)
            feed = (token,)
        return Draft(drafted, probs or None)

    def truncate(self, length: int) -> None:
        self.model.truncate(min(length, self.model.length))
