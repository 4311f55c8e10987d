"""Injected defects: bugs found in real decoders, each of which the audit must detect."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specedge.runtime.backend.batched_model import SlotModel
from specedge.runtime.decoding.verification import Draft, Verdict, verify
from specedge.runtime.sampling.distribution import Floats
from specedge.runtime.sampling.history import History
from specedge.runtime.sampling.logits import Logits
from specedge.runtime.sampling.probabilities import probabilities
from specedge.sampling_options import Sampling

from .audited_pair import DecoderParts, Wrapper


@dataclass(frozen=True)
class Defect:
    """Decoder parts with one bug."""

    name: str
    description: str
    parts: DecoderParts


def _with_tests(change: Callable[[Floats], Floats]) -> Callable[..., Verdict]:
    """Return an accept rule that tests changed uniforms."""

    def accept_rule(*arguments: Any) -> Verdict:
        draft, logits, sampling, history, accept_uniforms, *rest = arguments
        return verify(draft, logits, sampling, history, change(accept_uniforms), *rest)

    return accept_rule


def _without_residual(*arguments: Any) -> Verdict:
    draft, logits, sampling, history, _, last_uniform, _ = arguments
    verdict = verify(*arguments)
    i = verdict.num_accepted
    if sampling.greedy or i == len(draft.tokens):
        return verdict
    distribution = probabilities(logits[i].array(), sampling, history.then(draft.tokens[:i]))
    return Verdict(i, distribution.pick(last_uniform))


class _StaleDrafter(Wrapper):
    """Drafter that returns the distribution of the previous draft token."""

    def propose(
        self, history: History, max_tokens: int, sampling: Sampling, uniforms: Floats
    ) -> Draft:
        draft: Draft = self._wrapped.propose(history, max_tokens, sampling, uniforms)
        if not draft.probs:
            return draft
        return Draft(draft.tokens, [draft.probs[0], *draft.probs[:-1]])


class _OneRowTooMany(Wrapper):
    """Model whose rollback keeps one row of a rejected token."""

    def truncate(self, length: int) -> None:
        self._wrapped.truncate(min(length + 1, self._wrapped.length) if length else 0)


class _ExchangedRows(Wrapper):
    """Passes over several slots in which each slot's first logits are those of the next slot."""

    def forward(self, feeds: Sequence[tuple[SlotModel, Sequence[int], int]]) -> list[Logits | None]:
        results = self._wrapped.forward(feeds)
        rows = [result.array() for result in results if result is not None]
        others = itertools.cycle([*rows[1:], *rows[:1]])
        return [
            result and Logits(np.concatenate([next(others)[:1], result.array()[1:]]), result.ids)
            for result in results
        ]


DEFECTS = (
    Defect(
        "accept rule",
        "a draft token is accepted if u d(x) / 2 < t(x), not u d(x) < t(x)",
        DecoderParts(_with_tests(lambda accept_uniforms: 0.5 * accept_uniforms)),
    ),
    Defect(
        "residual",
        "after a rejection the token is sampled from t, not from max(0, t - d)",
        DecoderParts(_without_residual),
    ),
    Defect(
        "stale draft distribution",
        "a draft token is tested with the distribution of the previous one",
        DecoderParts(drafter=_StaleDrafter),
    ),
    Defect(
        "cache row off by one",
        "a rollback of the target's cache keeps one row of a rejected token",
        DecoderParts(target=_OneRowTooMany),
    ),
    Defect(
        "shared uniform",
        "all draft tokens of a round are tested with one random number",
        DecoderParts(
            _with_tests(lambda accept_uniforms: np.full_like(accept_uniforms, accept_uniforms[:1]))
        ),
    ),
)
BATCHED_DEFECT = Defect(
    "rows of another request",
    "the first logits of a request are those of the next request in its pass",
    DecoderParts(batch=_ExchangedRows),
)
