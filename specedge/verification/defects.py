"""Five planted defects, each one that a decoder of someone's really had: what the audit must
catch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from specedge.runtime.decoding.decoding import SpeculativeDecoder
from specedge.runtime.decoding.protocols import Drafter
from specedge.runtime.decoding.verification import Draft, Verdict, verify
from specedge.runtime.sampling.distribution import Floats
from specedge.runtime.sampling.history import History
from specedge.runtime.sampling.probabilities import probabilities
from specedge.sampling_options import Sampling

from .cached import Cached
from .subject import Parts


@dataclass(frozen=True)
class Defect:
    """Parts of a decoder of which one is wrong."""

    name: str
    what: str
    parts: Parts


def _with_tests(change: Callable[[Floats], Floats]) -> type[SpeculativeDecoder]:
    """A decoder that judges by other uniforms."""

    class Decoder(SpeculativeDecoder):
        @staticmethod
        def accept_rule(*given: Any) -> Verdict:
            draft, scores, sampling, history, tests, last = given
            return verify(draft, scores, sampling, history, change(tests), last)

    return Decoder


class _NoResidual(SpeculativeDecoder):
    @staticmethod
    def accept_rule(*given: Any) -> Verdict:
        draft, scores, sampling, history, _, last = given
        verdict = verify(*given)
        i = verdict.num_accepted
        if sampling.greedy or i == len(draft.tokens):
            return verdict
        distribution = probabilities(scores[i].array(), sampling, history.then(draft.tokens[:i]))
        return Verdict(i, distribution.pick(last))


class _StaleDrafter:
    """Hands on the distribution of the draft token before."""

    name = "stale"

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def propose(
        self, history: History, max_tokens: int, sampling: Sampling, uniforms: Floats
    ) -> Draft:
        draft = self._drafter.propose(history, max_tokens, sampling, uniforms)
        if not draft.probs:
            return draft
        return Draft(draft.tokens, [draft.probs[0], *draft.probs[:-1]])

    def truncate(self, length: int) -> None:
        self._drafter.truncate(length)


class _OneRowTooMany:
    """Rolls back one row too little."""

    def __init__(self, model: Cached) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def truncate(self, length: int) -> None:
        self._model.truncate(min(length + 1, self._model.length) if length else 0)


DEFECTS = (
    Defect(
        "accept rule",
        "a draft token is accepted if u d(x) / 2 < t(x), not u d(x) < t(x)",
        Parts(decoder=_with_tests(lambda tests: 0.5 * tests)),
    ),
    Defect(
        "residual",
        "after a rejection the token is drawn from t, not from max(0, t - d)",
        Parts(decoder=_NoResidual),
    ),
    Defect(
        "stale draft distribution",
        "a draft token is judged by the distribution of the one before it",
        Parts(drafter=_StaleDrafter),
    ),
    Defect(
        "cache row off by one",
        "a rollback of the target's cache keeps one row of a rejected token",
        Parts(target=_OneRowTooMany),
    ),
    Defect(
        "shared uniform",
        "all draft tokens of a round are judged by one random number",
        Parts(decoder=_with_tests(lambda tests: np.full_like(tests, tests[:1]))),
    ),
)
