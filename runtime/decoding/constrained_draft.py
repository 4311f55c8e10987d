"""Drafts under a grammar: forced tokens need no drafter, and a banned token ends the draft."""

from __future__ import annotations

from contextlib import suppress

from specedge.errors import OptionError
from specedge.sampling_options import Sampling, TokenConstraint

from ..sampling.distribution import Distribution
from ..sampling.history import History
from .protocols import Drafter, ModelDrafter, Operations, draft_sources
from .verification import Draft, DraftRequest

GRAMMAR = "grammar"  # source of forced tokens in statistics


def propose(drafter: Drafter, request: DraftRequest) -> Operations[Draft]:
    """Return the operations of a drafter's proposal, under the grammar if there is one.

    Where the grammar allows a single token, that token is drafted, and the drafter is called for
    the tokens after it. A draft ends before a deterministic banned token: the target's row decides
    there as after a rejection. A sampled banned token is kept as the last one: the recovered token
    is not sampled from the target's own row, so dropping the draft token would change the
    distribution.
    """
    constraint = request.sampling.constraint
    if constraint is None:
        return (yield from _propose(drafter, request))
    draft = _ConstrainedDraft(request.history, request.sampling, constraint)
    was_called = False
    with suppress(OptionError):  # the grammar cannot be applied from here on
        while not draft.is_complete and draft.length < request.max_tokens:
            if draft.add_forced():
                was_called = False
            elif was_called:
                break
            else:
                part = yield from _propose(drafter, request.after(draft.tokens))
                if not draft.add(part, draft_sources(drafter, part)):
                    drafter.truncate(draft.text.length)  # its cache may include the proposal
                was_called = True
    return Draft(draft.tokens, draft.probs, draft.sources)


def _propose(drafter: Drafter, request: DraftRequest) -> Operations[Draft]:
    if isinstance(drafter, ModelDrafter):
        return (yield from drafter.draft(request))
    arguments = request.history, request.max_tokens, request.sampling, request.uniforms
    return drafter.propose(*arguments)


class _ConstrainedDraft:
    """Growing draft; `is_complete` if no further token could be accepted."""

    def __init__(self, history: History, sampling: Sampling, constraint: TokenConstraint) -> None:
        self._history, self._sampling, self._constraint = history, sampling, constraint
        self.tokens: list[int] = []
        self.probs: list[Distribution | None] = []
        self.sources: list[str] = []
        self.is_complete = False

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def text(self) -> History:
        return self._history.then(self.tokens)

    def add_forced(self) -> bool:
        """Add the forced token and return True, if the grammar allows a single one."""
        token = self._constraint.forced(self.text)
        if token is not None:
            self._add(token, None, GRAMMAR)
        return token is not None

    def add(self, part: Draft, sources: tuple[str, ...]) -> bool:
        """Add tokens up to the first banned one; return False if that one was dropped."""
        for i, token in enumerate(part.tokens):
            if self.is_complete:
                break
            text, drawn_from = self.text, part.distribution(i)
            if self._constraint.banned(text)[token]:
                if drawn_from is not None and not self._sampling.greedy:
                    self._add(token, drawn_from, sources[i])
                    self.is_complete = True
                return self.is_complete
            is_forced = self._constraint.forced(text) is not None
            self._add(token, drawn_from, GRAMMAR if is_forced else sources[i])
        return True

    def _add(self, token: int, drawn_from: Distribution | None, source: str) -> None:
        self.tokens.append(token)
        self.probs.append(drawn_from)
        self.sources.append(source)
        self.is_complete = token in self._sampling.end_tokens
