"""From tokens to text: the pieces that they make certain, and why a text ends. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from tokenizers import Tokenizer

from specedge.option_specs import NameEnum

from .detokenizer import Detokenizer, StopStrings
from .spans import Fate, Marks, Span


class FinishReason(NameEnum):
    """Why a text ends where it does."""

    LENGTH = "length"  # as many tokens as were asked for
    END = "end"  # an end token
    STOP = "stop"  # a stop string
    CONTEXT = "context"  # no room left
    UNFINISHED = "unfinished"  # it was left early


class Assembler:
    """The text of one request. `spans` has a list for each piece; `tokens` end where the text does.

    A text is at most `limit` tokens long and then ended by `at_limit`. The names of special tokens
    that are `shown` are in it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        *,
        stops: Sequence[str],
        ends: frozenset[int],
        limit: int,
        at_limit: FinishReason,
        shown: Collection[int] = (),
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt, shown)
        self._stop_strings = StopStrings(stops, include_stop)
        self._marks = Marks()
        self._ends, self._limit, self._at_limit = ends, limit, at_limit
        self.tokens: list[int] = []
        self.spans: list[list[Span]] = []
        self.finish_reason = FinishReason.UNFINISHED

    @property
    def finished(self) -> bool:
        """Whether no token can follow."""
        return self.finish_reason != FinishReason.UNFINISHED

    def feed(self, taken: Iterable[tuple[int, Fate]]) -> str:
        """Add a round's tokens; the text that has become certain. Those after the end are left."""
        piece = "".join(self._take(token, fate) for token, fate in taken)
        if self.finished:
            piece += self._flush()
        self.spans.append(self._marks.take(len(piece)))
        return piece

    def _take(self, token: int, fate: Fate) -> str:
        if self.finished:
            return ""
        self.tokens.append(token)
        if token in self._ends:
            self.finish_reason = FinishReason.END
            return ""
        text = self._detokenizer.feed(token)
        self._marks.add(text, fate)
        text = self._stop_strings.feed(text)
        if self._stop_strings.found:
            self.finish_reason = FinishReason.STOP
        elif len(self.tokens) == self._limit:
            self.finish_reason = self._at_limit
        return text

    def _flush(self) -> str:
        """Text held back until now."""
        text = self._detokenizer.flush()
        self._marks.add(text)
        text = self._stop_strings.feed(text)
        if self._stop_strings.found:
            self.finish_reason = FinishReason.STOP
        return text + self._stop_strings.flush()
