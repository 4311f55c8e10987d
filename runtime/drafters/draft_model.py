"""Drafting with a smaller language model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import cast

from specedge.request import DrafterName
from specedge.sampling_options import Sampling

from ..decoding.protocols import DraftingModel, LanguageModel
from ..decoding.verification import Draft, draw_draft
from ..sampling.distribution import Floats
from ..sampling.history import History
from ..sampling.logits import Row

PLACEHOLDER = 0
MAX_FED = 2  # tokens in a pass with logits; more are read before it, as a prompt is


class DraftModel:
    """Drafts with a smaller language model.

    After a full acceptance its cache is two tokens behind, otherwise one: the first pass of the
    next round feeds both, so a round of n tokens always costs n passes. Where others drafted
    meanwhile it is further behind, and reads what it missed as it reads a prompt. A model that can
    drafts them all at once.

    The model may know less than the target. A token that it lacks is fed as `PLACEHOLDER`: with
    none there, all that follow would have other positions. When its context is full, it reads a
    little more than the last half of that again from position 0. That depends on the length of the
    text alone, not on `max_tokens`, so a seed's text does not depend on where a request ends.
    """

    name = DrafterName.MODEL

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
        self._may_draft = isinstance(model, DraftingModel)
        self._start = 0  # the place in the text of the cache's first token
        self._begins = True  # what the cache holds may be of another text

    def propose(
        self, history: History, max_tokens: int, sampling: Sampling, uniforms: Floats
    ) -> Draft:
        if not max_tokens:
            return Draft([])
        feed, room = self.catch_up(history)
        count = min(max_tokens, room)
        if self._may_draft:
            model = cast(DraftingModel, self.model)
            draft = model.draft(feed, count, history, sampling, uniforms)
            if draft is not None:
                return draft

        num_fed = 0

        def next_row(drafted: list[int]) -> Row:
            nonlocal num_fed
            unread = [*feed, *self.known(drafted)][num_fed:]
            num_fed += len(unread)
            if len(unread) > MAX_FED:  # a grammar forced some
                self.model.prefill(unread[:-1])
                unread = unread[-1:]
            return self.model.forward(unread)[-1]

        return draw_draft(next_row, history, count, sampling, uniforms)

    def behind_and_room(self, length: int, read: int) -> tuple[int, int]:
        """Of a text of that length, how many tokens it has not read after it was asked at `read`
        of them, and how many it may draft.
        """
        start = self._window(length)
        held = read if self._window(read) == start else start
        return length - held, start + self.context_length - length + 1

    def truncate(self, length: int) -> None:
        self._begins = self._begins or length <= self._start
        if not self._begins:
            self.model.truncate(min(length - self._start, self.model.length))

    def catch_up(self, history: History) -> tuple[list[int], int]:
        """Read a text up to its last token or two; these, to be fed, and how many may follow."""
        start = self._window(history.length)
        if self._begins or start != self._start:
            self._start, self._begins = start, False
            self.model.reuse(self.known(history.tokens[start:-1]))
        feed = self.known(history.last(history.length - start - self.model.length))
        if len(feed) > 2:
            self.model.prefill(feed[:-1])
            feed = feed[-1:]
        return feed, start + self.context_length - history.length + 1

    def _window(self, length: int) -> int:
        """The place of the first token that is read of a text of that length."""
        step = self.context_length - self.context_length // 2
        return max(0, -(-(length - self.context_length) // step) * step)

    def known(self, tokens: Sequence[int]) -> list[int]:
        """The tokens as the model can read them."""
        return [token if token < self.vocab_size else PLACEHOLDER for token in tokens]
