"""Draft model: drafter that runs a smaller language model."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from specedge.bundle.manifest import CONFIDENCE_BOUNDS, MeasuredAcceptance
from specedge.bundle.token_readings import TokenReadings
from specedge.request import DrafterName

from ..decoding.protocols import (
    DeviceDraft,
    DraftingModel,
    Feed,
    LanguageModel,
    ModelDrafter,
    Operations,
    open_source,
)
from ..decoding.verification import Draft, DraftRequest, draft_rows, draw_draft
from ..sampling.history import History
from ..sampling.logits import Row
from ..sampling.source import Source
from .text_reading import TextReading, TranslatedText


class DraftModel(ModelDrafter):
    """Drafter that runs a smaller language model, one pass per token.

    After full acceptance its cache lacks two tokens, otherwise one. The first pass of the next
    round takes both, so a round of n draft tokens always takes n passes. If other drafters were
    used meanwhile, the missing tokens are prefilled first (catch-up). A model that can draft on its
    device does so.

    The model may have another tokenizer than the target, or a smaller vocabulary, which `reading`
    translates the text to. It may have a smaller context, and read only the first
    `max_source_length` tokens of a source. When its context is full, the cache is refilled from
    position 0 with a little more than the last half of its context. This depends on the length of
    the text only, not on `max_tokens`, so that a seed's text does not depend on where a request
    ends.
    """

    name = DrafterName.MODEL
    is_sampled = True
    max_unread = 2  # maximum number of unread tokens in a pass with logits; more are prefilled

    def __init__(
        self,
        model: LanguageModel,
        *,
        context_length: int = sys.maxsize,
        vocab_size: int = sys.maxsize,
        max_source_length: int = sys.maxsize,
        acceptance: MeasuredAcceptance | None = None,
        readings: TokenReadings | None = None,
    ) -> None:
        self.model = model
        self.acceptance = acceptance
        self.context_length = context_length
        self.reading = TextReading(vocab_size) if readings is None else TranslatedText(readings)
        self.max_source_length = max_source_length
        self._start = 0  # position in the text of the first cached token
        self._is_new_text = True  # the cache may hold another text

    def draft(self, request: DraftRequest) -> Operations[Draft]:
        """Draft until the predicted probability that all tokens are accepted is below a minimum.

        Drafts of the device have `max_tokens` tokens.
        """
        if not request.max_tokens:
            return Draft([])
        history = request.history
        unread, limit = yield from self._catch_up(history)
        if request.sampling.constraint is not None:  # it may force tokens of long readings
            limit = (limit - 1) // self.reading.longest + 1
        if limit < request.max_tokens:
            request = replace(request, max_tokens=limit)
        if self.drafts_on_device:
            draft = yield DeviceDraft(cast(DraftingModel, self.model), unread, request)
            if draft is not None:
                return cast(Draft, draft)
        rows, row, num_fed = draft_rows(request, self.end_of_draft(request)), None, 0
        while True:
            try:
                drafted = rows.send(row)
            except StopIteration as end:
                return cast(Draft, end.value)
            unread += self.reading.read(drafted[num_fed:], history.length + num_fed)
            num_fed = len(drafted)
            if len(unread) > self.max_unread:  # after tokens that a grammar forced
                yield Feed(self.model, unread[:-1], 0)
                unread = unread[-1:]
            row = (yield Feed(self.model, unread, len(unread)))[-1]
            unread = []

    @property
    def drafts_on_device(self) -> bool:
        """True if the device may draft without host work between tokens."""
        return getattr(self.model, "has_draft_graphs", False)

    def confidence_rates(self, greedy: bool) -> Sequence[float]:
        """Return the acceptance rates by class of the largest probability; empty if unknown."""
        if self.acceptance is None:
            return ()
        measured = self.acceptance
        return measured.greedy_by_confidence if greedy else measured.sampled_by_confidence

    def end_of_draft(self, request: DraftRequest) -> Callable[[Row], bool]:
        """Return the function that ends a draft after the token of a row (`draft_rows`).

        The confidence is the product of the rates in the bundle by the largest probability of each
        token's row, so the draft's length is a function of the text and the tokens that were drawn,
        all of which are tested (docs/exactness.md).
        """
        minimum = request.min_confidence
        rates = self.confidence_rates(request.sampling.greedy) if minimum else ()
        confidence = 1.0

        def is_last(row: Row) -> bool:
            nonlocal confidence
            if not rates:
                return False
            confidence *= rates[bisect_left(CONFIDENCE_BOUNDS, largest_probability(row))]
            return confidence < minimum

        return is_last

    def backlog_and_limit(self, history: History, num_read: int) -> tuple[int, int]:
        """Return the number of tokens to catch up with, and the maximum number of draft tokens.

        Args:
            history: The text.
            num_read: Length of the text when the model drafted last.
        """
        self.reading.follow(history)
        start = self._window(history.length)
        end = num_read if self._window(num_read) == start else start
        num_unread = self.reading.length(history.length) - self.reading.length(end)
        return num_unread, self._num_free(start, history.length)

    def truncate(self, length: int) -> None:
        self._is_new_text = self._is_new_text or length <= self._start
        if not self._is_new_text:
            num_cached = self.reading.length(length) - self.reading.length(self._start)
            self.model.truncate(min(num_cached, self.model.length))
        self.reading.truncate(length)

    def _catch_up(self, history: History) -> Operations[tuple[list[int], int]]:
        """Bring the cache up to date, except for the last `max_unread` tokens at most.

        Returns:
            These tokens, for the first pass, and the maximum number of draft tokens.
        """
        reading = self.reading
        reading.follow(history)
        start = self._window(history.length)
        if self._is_new_text or start != self._start:
            self._start, self._is_new_text = start, False
            yield from open_source(self.model, self.readable_source(history.source))
            self.model.reuse(reading.read(history.tokens[start:-1], start))
        num_read = reading.length(start) + self.model.length
        pending = reading.last(history, reading.length(history.length) - num_read)
        if len(pending) > self.max_unread:
            length = getattr(self.model, "chunk_length", len(pending))
            for at in range(0, len(pending) - 1, length):
                yield Feed(self.model, pending[at : min(at + length, len(pending) - 1)], 0)
            pending = pending[-1:]
        return pending, self._num_free(start, history.length)

    def _window(self, length: int) -> int:
        """Return the position of the first token of the text that is in the model's context."""
        step = self.context_length - self.context_length // 2
        num_outside = max(0, self.reading.length(length) - self.context_length)
        return min(self.reading.position(-(-num_outside // step) * step), max(0, length - 1))

    def _num_free(self, start: int, end: int) -> int:
        """Return the maximum number of draft tokens after the text from `start` to `end`."""
        num_read = self.reading.length(end) - self.reading.length(start)
        return self.context_length - num_read + 1

    def readable_source(self, source: Source | None) -> Source | None:
        """Return the beginning of a source that the model's encoder can read."""
        if source is None or not source.tokens:
            return source
        return Source(self.reading.read(source.tokens[: self.max_source_length], 0))


class ParallelDraftModel(DraftModel):
    """Draft model that drafts all tokens of a round in one pass.

    It was fine-tuned to predict several tokens ahead (PARD, An et al. 2025, arXiv 2504.18583). The
    pass reads the tokens that its cache lacks, usually those of the last round, and K - 1 mask
    tokens, whose rows are rolled back. Its last K rows are the distributions of the draft tokens,
    none of which depends on the others.

    Args:
        model: The model.
        mask_token: Token that stands for each unknown token, which may be outside the vocabulary.
        limits: Other arguments of `DraftModel`.
    """

    max_unread = 32

    def __init__(self, model: LanguageModel, *, mask_token: int, **limits: Any) -> None:
        super().__init__(model, **limits)
        self.mask_token = mask_token

    def confidence_rates(self, greedy: bool) -> Sequence[float]:
        return ()  # all tokens are drafted in any case

    def draft(self, request: DraftRequest) -> Operations[Draft]:
        if not request.max_tokens:
            return Draft([])
        unread, limit = yield from self._catch_up(request.history)
        # The pass is as long as if the request did not end: logits may depend on its length.
        num_rows = min(len(request.uniforms), limit)
        length = self.model.length + len(unread)
        masks = [self.mask_token] * (num_rows - 1)
        logits = yield Feed(self.model, [*unread, *masks], num_rows)
        self.model.truncate(length)
        if num_rows < request.max_tokens:
            request = replace(request, max_tokens=num_rows)
        return draw_draft(lambda drafted: logits[len(drafted)], request)


def largest_probability(row: Row) -> float:
    """Return the largest probability of a row at temperature 1, before all options."""
    logits = row.array()
    return float(1 / np.exp(logits - logits.max()).sum(dtype=np.float64))
