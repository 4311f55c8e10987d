"""What became of each token of a round, as marks on the text."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from specedge.option_specs import NameEnum

from ..decoding.protocols import Round


class Fate(NameEnum):
    """Where a token came from."""

    ACCEPTED = "accepted"  # drafted, and the target kept it
    RECOVERED = "recovered"  # the target's own, after it rejected a draft token
    BONUS = "bonus"  # the target's own, after it accepted all that was drafted
    PLAIN = "plain"  # the target's own, where nothing was drafted


@dataclass(frozen=True)
class Span:
    """The text that one token made certain."""

    text: str
    fate: Fate


def fates(round_: Round) -> list[Fate]:
    """The fate of each token of a round: accepted ones, and one of the target's own."""
    if not round_.num_drafted:
        last = Fate.PLAIN
    else:
        last = Fate.RECOVERED if round_.num_accepted < round_.num_drafted else Fate.BONUS
    return [Fate.ACCEPTED] * round_.num_accepted + [last]


class Marks:
    """Keeps the fates of text that is passed on later than its tokens came.

    A character belongs to the token that completed it. Text that is never taken, as of a stop
    string, leaves no mark.
    """

    def __init__(self) -> None:
        self._waiting: deque[Span] = deque()
        self._last = Fate.PLAIN

    def add(self, text: str, fate: Fate | None = None) -> None:
        """A token came, and made this text certain; or, without a fate, the last left it so."""
        self._last = fate or self._last
        self._waiting.append(Span(text, self._last))

    def take(self, length: int) -> list[Span]:
        """The next `length` characters, a span a token; tokens without text have none."""
        taken = []
        while length:
            span = self._waiting.popleft()
            if len(span.text) > length:
                self._waiting.appendleft(Span(span.text[length:], span.fate))
                span = Span(span.text[:length], span.fate)
            length -= len(span.text)
            if span.text:
                taken.append(span)
        return taken
