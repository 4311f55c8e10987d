"""Several drafters, one after another, for the same verify pass."""

from __future__ import annotations

from specedge.request import DrafterName
from specedge.sampling_options import Sampling

from ..decoding.constrained_draft import propose
from ..decoding.protocols import Drafter, draft_sources
from ..decoding.verification import Draft
from ..sampling.distribution import Distribution, Floats
from ..sampling.history import History


class Chain:
    """Asks each drafter in turn to go on where those before it stopped, for the same verify pass.

    The last goes on by one token and then it is the first's turn again: a copy may follow where a
    model has led to a match. One that is not asked in a round catches up when it next is.
    """

    name = DrafterName.CHAIN

    def __init__(self, *drafters: Drafter) -> None:
        self.drafters = drafters

    def propose(
        self, history: History, max_tokens: int, sampling: Sampling, uniforms: Floats
    ) -> Draft:
        tokens: list[int] = []
        probs: list[Distribution | None] = []
        names: list[str] = []
        going = True
        while going and len(tokens) < max_tokens:
            for drafter in self.drafters:
                if len(tokens) == max_tokens:
                    break
                most = 1 if drafter is self.drafters[-1] else max_tokens - len(tokens)
                text = history.then(tokens) if tokens else history
                rest = uniforms[len(tokens) : max_tokens]
                part = propose(drafter, text, most, sampling, rest)
                tokens += part.tokens
                probs += part.probs or [None] * len(part.tokens)
                names += draft_sources(drafter, part)
                going = bool(part.tokens)
                if sampling.constraint and tokens and tokens[-1] in sampling.end_tokens:
                    return Draft(tokens, probs, names)
        return Draft(tokens, probs, names)

    def truncate(self, length: int) -> None:
        for drafter in self.drafters:
            drafter.truncate(length)
