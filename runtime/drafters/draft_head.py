"""Draft head: drafter that reads the target's hidden states, such as an EAGLE-3 or MTP head."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, cast

import numpy as np

from specedge.bundle.manifest import ModelEntry
from specedge.bundle.token_readings import TokenReadings

from ..decoding.observed_states import Array, ObservedStates
from ..decoding.protocols import (
    DeviceDraft,
    DraftHeadModel,
    DraftingModel,
    Feed,
    FuseStates,
    LanguageModel,
    Operations,
    StateObserver,
)
from ..decoding.verification import Draft, DraftRequest, draft_rows
from ..sampling.history import History, common_prefix_length
from ..sampling.logits import Row
from .draft_model import DraftModel, ParallelDraftModel

MAX_CONTEXT = 1024  # tokens that a head reads; heads are trained on texts of up to about 2,048


class DraftHead(DraftModel):
    """Drafter that predicts from hidden states of the target (Li et al. 2025, EAGLE-3).

    Row i of its cache reads the hidden state of token i and token i + 1, and its logits predict
    token i + 2. The first pass of a round reads a row for each token since the last draft. Each
    further one reads a token that is not verified, with the hidden state that the head itself
    returned for the row before; such rows are read again with the target's states. A model that can
    draft on its device takes one launch for all of these passes.

    It does not draft in the first round, whose pass may be the first over the prompt, so that
    drafts do not depend on the tokens that the target's cache shares with the prompt. The target is
    never run for it: if states are missing, or its context is full, its cache is refilled from the
    last observed states, from position 0. This depends on the text and the rounds, not on
    `max_tokens`.
    """

    model: DraftHeadModel

    def __init__(self, model: LanguageModel, **limits: Any) -> None:
        super().__init__(model, **limits)
        self.context_length = min(self.context_length, MAX_CONTEXT)
        # Hidden states [H] after the last row with a state of the target, and after later rows
        self._returned: list[Array] = []
        self._is_observing = False

    @property
    def observer(self) -> StateObserver:
        return self

    @property
    def _observed(self) -> ObservedStates:
        return self.model.observed

    def begin(self, history: History, num_cached: int) -> int:
        """Begin a text, with the rows and states of its tokens that earlier texts share.

        Rows begin at the position at which they would without earlier texts, else where they began,
        and else with the next state.
        """
        observed, tokens = self._observed, history.tokens
        earlier = [] if observed.history is None else observed.history.tokens
        num_shared = common_prefix_length(earlier, tokens)
        observed.truncate(num_shared)
        self._is_observing, observed.history = True, history
        num_kept = min(observed.num_rows, self.model.length, num_shared - 1 - observed.start)
        candidates = {observed.start: num_kept} if num_kept > 0 else {}
        usual = self._window(history.length - 1)
        for start, num_rows in ({usual: candidates.get(usual, 0)} | candidates).items():
            next_row = start + num_rows
            has_states = observed.first <= next_row < observed.end
            num_known = observed.end if has_states else next_row
            if num_cached <= num_known + 1:
                break
        else:
            start = next_row = num_known = num_cached
        self.model.truncate(next_row - start)
        observed.start, observed.num_rows = start, next_row - start
        return min(num_cached, num_known)

    def observe(self, start: int, hidden: Array) -> None:
        self._observed.write(start, hidden)

    def read(self) -> Operations[None]:
        observed = self._observed
        assert observed.history is not None
        end = min(observed.end, observed.history.length - 1)
        start = self._first_row(end)
        if observed.next_row < end:
            yield (yield from self._read_chunks(end))
            observed.num_rows = end - start

    def draft(self, request: DraftRequest) -> Operations[Draft]:
        observed, history = self._observed, request.history
        num_read = history.num_committed - 1
        has_state = self._is_observing and observed.first < observed.end == num_read
        if not has_state or history.num_committed == history.num_prompt_tokens:
            return Draft([])
        start = self._first_row(num_read)
        num_free = start + self.context_length - (history.length - 1)
        count, first = min(request.max_tokens, num_free + 1), None
        request = replace(request, max_tokens=count)
        if count and observed.next_row < num_read:
            first = yield from self._read_chunks(num_read)
            # A chain asks for one token at a time, and continues from the state that a pass returns
            if self.drafts_on_device and count > 1 and history.length == history.num_committed:
                model = cast(DraftingModel, self.model)
                draft = yield DeviceDraft(model, first.tokens, request, first.hidden)
                if draft is not None:
                    observed.num_rows = num_read - start
                    return cast(Draft, draft)
        rows, row = draft_rows(request, self.end_of_draft(request)), None
        while True:
            try:
                drafted = rows.send(row)
            except StopIteration as end:
                return cast(Draft, end.value)
            row = yield from self._next_row(history.then(drafted), first)
            first = None

    def backlog_and_limit(self, history: History, num_read: int) -> tuple[int, int]:
        """Return the number of states to read first, and the maximum number of draft tokens."""
        return min(history.length - num_read, self._observed.window), self.context_length // 2

    def truncate(self, length: int) -> None:
        if not length:
            self._is_observing = False
            self._returned.clear()
            return
        if not self._is_observing:  # the rows are those of an earlier text
            return
        observed = self._observed
        observed.truncate(length)
        num_rows = max(0, length - 1 - observed.start)
        observed.num_rows = min(observed.num_rows, num_rows)
        self.model.truncate(min(num_rows, self.model.length))
        del self._returned[self.model.length - observed.num_rows + 1 :]

    def _first_row(self, end: int) -> int:
        """Return the position of the first row of a cache for the states before `end`.

        The cache is emptied if states are missing or exceed the context.
        """
        observed = self._observed
        if observed.next_row < observed.first or end - observed.start > self.context_length:
            observed.start = max(observed.first, end - max(1, self.context_length // 2))
            observed.num_rows = 0
            self.model.truncate(0)
        return observed.start

    def _next_row(self, text: History, first: Feed | None) -> Operations[Row]:
        """Read the rest of a text, with `first`; return the logits after its last token."""
        row: Row | None = None
        if first is not None:
            first.num_rows = 1
            row = (yield first)[-1]
            self._observed.num_rows = text.num_committed - 1 - self._observed.start
            self._returned = [self.model.hidden[-1].copy()]
        num_drafted = text.length - text.num_committed
        for token in text.last(num_drafted - len(self._returned) + 1):
            hidden = self._returned[-1][np.newaxis]
            row = (yield Feed(self.model, self.reading.read([token], 0), 1, hidden))[-1]
            self._returned.append(self.model.hidden[-1].copy())
        assert row is not None
        return row

    def _read_chunks(self, end: int) -> Operations[Feed]:
        """Read the observed states before `end`, of which the last pass is returned instead."""
        observed = self._observed
        assert observed.history is not None
        self.model.truncate(observed.num_rows)
        while True:
            start = observed.next_row
            stop = min(end, start + getattr(self.model, "chunk_length", end))
            states = yield FuseStates(self.model, observed.read(start, stop))
            tokens = self.reading.read(observed.history.tokens[start + 1 : stop + 1], start + 1)
            feed = Feed(self.model, tokens, 0, states)
            if stop == end:
                return feed
            yield feed
            observed.num_rows = stop - observed.start


def create_drafter(
    model: LanguageModel, entry: ModelEntry, readings: TokenReadings | None = None
) -> DraftModel:
    """Return the drafter of a draft model, with the limits of its entry in the manifest.

    `readings` are a bundle's readings of a draft with another tokenizer.
    """
    options: dict[str, Any] = {
        "context_length": entry.context_length,
        "vocab_size": entry.vocab_size,
        "max_source_length": sys.maxsize if entry.encoder is None else entry.encoder.max_length,
        "acceptance": entry.acceptance,
        "readings": readings,
    }
    if entry.reads_hidden:
        return DraftHead(cast(DraftHeadModel, model), **options)
    if entry.mask_token is not None:
        return ParallelDraftModel(model, mask_token=entry.mask_token, **options)
    return DraftModel(model, **options)
