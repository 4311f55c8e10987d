"""Asking a drafter under a grammar: what is forced needs no drafter, what is banned is cut off."""

from __future__ import annotations

from contextlib import suppress

from specedge.errors import OptionError
from specedge.sampling_options import Sampling, TokenConstraint

from ..sampling.distribution import Distribution, Floats
from ..sampling.history import History
from .round import Drafter, sources
from .verify import Draft

GRAMMAR = "grammar"  # what statistics call the tokens that a grammar forces


def propose(
    drafter: Drafter, history: History, max_tokens: int, sampling: Sampling, uniforms: Floats
) -> Draft:
    """What a drafter proposes, as `Drafter.propose`. Where a grammar leaves one token, that is
    drafted and the drafter asked behind it.

    A draft ends before a banned token that was chosen without randomness, which is no loss: the
    target's row decides there as after its rejection. One that was drawn is kept, as the last one:
    what the target recovers then is no draw from its own row, so leaving it out would change the
    distribution.
    """
    if sampling.constraint is None:
        return drafter.propose(history, max_tokens, sampling, uniforms)
    made = _Made(history, sampling, sampling.constraint)
    asked = False
    with suppress(OptionError):  # the grammar cannot be followed there
        while not made.ended and made.length < max_tokens:
            if made.add_forced():
                asked = False
            elif asked:
                break
            else:
                rest = uniforms[made.length : max_tokens]
                part = drafter.propose(made.text, max_tokens - made.length, sampling, rest)
                if not made.add(part, sources(drafter, part)):
                    drafter.truncate(made.text.length)  # it may have read what it proposed
                asked = True
    return Draft(made.tokens, made.probs, made.names)


class _Made:
    """A draft as it grows."""

    def __init__(self, history: History, sampling: Sampling, constraint: TokenConstraint) -> None:
        self._history, self._sampling, self._constraint = history, sampling, constraint
        self.tokens: list[int] = []
        self.probs: list[Distribution | None] = []
        self.names: list[str] = []
        self.ended = False  # nothing can follow that may be accepted

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def text(self) -> History:
        return self._history.then(self.tokens) if self.tokens else self._history

    def add_forced(self) -> bool:
        """Add the one token that the grammar leaves, if it leaves one."""
        token = self._constraint.forced(self.text)
        if token is not None:
            self._add(token, None, GRAMMAR)
        return token is not None

    def add(self, part: Draft, names: tuple[str, ...]) -> bool:
        """Add a part up to its first token that the grammar bans; False if that is left out."""
        for i, token in enumerate(part.tokens):
            if self.ended:
                break
            text, drawn_from = self.text, part.distribution(i)
            if self._constraint.banned(text)[token]:
                if drawn_from is not None and not self._sampling.greedy:
                    self._add(token, drawn_from, names[i])
                    self.ended = True
                return self.ended
            forced = self._constraint.forced(text) is not None
            self._add(token, drawn_from, GRAMMAR if forced else names[i])
        return True

    def _add(self, token: int, drawn_from: Distribution | None, name: str) -> None:
        self.tokens.append(token)
        self.probs.append(drawn_from)
        self.names.append(name)
        self.ended = token in self._sampling.end_tokens
