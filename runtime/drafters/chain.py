"""Chain of drafters that build one draft, such as suffix decoding followed by a draft model."""

from __future__ import annotations

from dataclasses import replace

from specedge.request import DrafterName

from ..decoding.constrained_draft import propose
from ..decoding.protocols import Drafter, ModelDrafter, Operations, StateObserver, draft_sources
from ..decoding.verification import Draft, DraftRequest
from ..sampling.distribution import Distribution
from .draft_model import ParallelDraftModel


class Chain(ModelDrafter):
    """Drafter that lets each of its drafters continue the draft of the previous ones.

    The last one adds one token at a time, after which the first is called again: a token of the
    draft model may lead to a match. A draft model that drafts all tokens in one pass adds all of
    them. A drafter that is not called in a round catches up at its next call.
    """

    name = DrafterName.CHAIN

    def __init__(self, *drafters: Drafter) -> None:
        self.drafters = drafters

    @property
    def observer(self) -> StateObserver | None:
        return self.drafters[-1].observer

    def draft(self, request: DraftRequest) -> Operations[Draft]:
        sampling = request.sampling
        tokens: list[int] = []
        probs: list[Distribution | None] = []
        sources: list[str] = []
        has_grown = True
        while has_grown and len(tokens) < request.max_tokens:
            for drafter in self.drafters:
                rest = request.after(tokens)
                if not rest.max_tokens:
                    break
                is_last = drafter is self.drafters[-1]
                if is_last and not isinstance(drafter, ParallelDraftModel):
                    rest = replace(rest, max_tokens=1)
                part = yield from propose(drafter, rest)
                tokens += part.tokens
                probs += part.probs or [None] * len(part.tokens)
                sources += draft_sources(drafter, part)
                has_grown = bool(part.tokens)
                if sampling.constraint and tokens and tokens[-1] in sampling.end_tokens:
                    return Draft(tokens, probs, sources)
        return Draft(tokens, probs, sources)

    def truncate(self, length: int) -> None:
        for drafter in self.drafters:
            drafter.truncate(length)
