"""Text of generated tokens: whole characters, stop strings, finish reason, token outcomes."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from specedge.option_specs import NameEnum

from ..decoding.protocols import Round
from .token_bytes import TokenBytes


class FinishReason(NameEnum):
    """Reason that a text ends."""

    LENGTH = "length"  # the requested number of tokens
    END = "end"  # an end token
    STOP = "stop"  # a stop string
    CONTEXT = "context"  # the context is full
    UNFINISHED = "unfinished"  # the stream was closed early


class TokenOutcome(NameEnum):
    """Origin of a committed token."""

    ACCEPTED = "accepted"  # a draft token that the target accepted
    RECOVERED = "recovered"  # the target's token after a rejection
    BONUS = "bonus"  # the target's token after full acceptance
    PLAIN = "plain"  # the target's token without a draft


@dataclass(frozen=True)
class TextSpan:
    """Text that one token completed, and the token's outcome."""

    text: str
    outcome: TokenOutcome

    @property
    def fate(self) -> TokenOutcome:
        """Alias of `outcome`."""
        return self.outcome

    def to_json(self) -> dict[str, str]:
        """Return the fields by their JSON keys; the outcome is `fate`."""
        return {"text": self.text, "fate": self.outcome}


def token_outcomes(round_: Round) -> list[TokenOutcome]:
    """Return the outcome of each committed token of a round."""
    if not round_.num_drafted:
        last = TokenOutcome.PLAIN
    elif round_.num_accepted < round_.num_drafted:
        last = TokenOutcome.RECOVERED
    else:
        last = TokenOutcome.BONUS
    return [TokenOutcome.ACCEPTED] * round_.num_accepted + [last]


class TextAssembler:
    """Text of one request, assembled from the tokens of its rounds.

    Attributes:
        tokens: Tokens up to the end of the text.
        spans: Spans of each piece.
        finish_reason: Reason that the text ended.

    Args:
        tokenizer: Tokenizer of the bundle.
        prompt: Tokens before the text.
        stops: Stop strings.
        ends: End tokens.
        limit: Maximum number of tokens.
        at_limit: Finish reason at the limit.
        visible_tokens: Special tokens that are included in the text.
        include_stop: True if the text includes the stop string that ends it.
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
        visible_tokens: Collection[int] = (),
        include_stop: bool = False,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt, visible_tokens)
        self._buffer = TextBuffer(stops, include_stop)
        self._ends, self._limit, self._at_limit = ends, limit, at_limit
        self.tokens: list[int] = []
        self.spans: list[list[TextSpan]] = []
        self.finish_reason = FinishReason.UNFINISHED

    @property
    def is_finished(self) -> bool:
        """True if no token can follow."""
        return self.finish_reason is not FinishReason.UNFINISHED

    def feed(self, committed: Iterable[tuple[int, TokenOutcome]]) -> str:
        """Add a round's tokens, up to the end of the text; return the new text."""
        for token, outcome in committed:
            if not self.is_finished:
                self._add(token, outcome)
        if self.is_finished:
            self._buffer.add(self._detokenizer.flush())
            self._buffer.flush()
        if self._buffer.has_matched:
            self.finish_reason = FinishReason.STOP
        self.spans.append(self._buffer.take())
        return "".join(span.text for span in self.spans[-1])

    def _add(self, token: int, outcome: TokenOutcome) -> None:
        self.tokens.append(token)
        if token in self._ends:
            self.finish_reason = FinishReason.END
            return
        self._buffer.add(self._detokenizer.feed(token), outcome)
        if self._buffer.has_matched:
            self.finish_reason = FinishReason.STOP
        elif len(self.tokens) == self._limit:
            self.finish_reason = self._at_limit


class TextBuffer:
    """Text that ends at a stop string and is held back while it may begin one.

    With `include_stop` the text ends with the stop string, else before it. A character belongs to
    the token that completed it, also if it is emitted later.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._stops, self._include_stop = tuple(stops), include_stop
        self._pending: deque[TextSpan] = deque()  # not yet taken
        self._held = ""  # end of their text
        self._num_ready = 0  # length of their text before it
        self._last = TokenOutcome.PLAIN
        self.has_matched = False

    def add(self, text: str, outcome: TokenOutcome | None = None) -> None:
        """Add the text that a token completed; without an outcome, the rest of the last token.

        Text after a stop string is dropped.
        """
        if self.has_matched:
            return
        self._last = outcome or self._last
        self._pending.append(TextSpan(text, self._last))
        self._held += text
        starts, num_held = [], 0
        for stop in self._stops:
            if (start := self._held.find(stop)) >= 0:
                starts.append((start, stop))
            num_held = max(num_held, partial_match_length(self._held, stop))
        if starts:
            self.has_matched = True
            start, stop = min(starts)
            self._num_ready += start + len(stop) if self._include_stop else start
            self._held = ""
            return
        self._release(len(self._held) - num_held)

    def flush(self) -> None:
        """Release the text that was held back, at the end of the text."""
        self._release(len(self._held))

    def _release(self, length: int) -> None:
        self._num_ready += length
        self._held = self._held[length:]

    def take(self) -> list[TextSpan]:
        """Return the spans of the text that is not held back; tokens without text have none."""
        spans = []
        while self._num_ready:
            span = self._pending.popleft()
            if len(span.text) > self._num_ready:
                rest = TextSpan(span.text[self._num_ready :], span.outcome)
                self._pending.appendleft(rest)
                span = TextSpan(span.text[: self._num_ready], span.outcome)
            self._num_ready -= len(span.text)
            if span.text:
                spans.append(span)
        return spans


class Detokenizer:
    """Decoder of tokens into pieces of text that never split a character.

    A piece is the text that a token adds to the tokens before it, held back while it ends in an
    incomplete character. Bytes that cannot become a character are emitted as U+FFFD, at the latest
    after the longest character. Pieces do not depend on the grouping of tokens. Special tokens
    have no text, except `visible_tokens`.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], visible_tokens: Collection[int] = ()
    ) -> None:
        self._token_bytes = TokenBytes(tokenizer, prompt, visible_tokens)
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters.decode(self._token_bytes.prompt_end)
        incomplete, _ = self._characters.getstate()
        self._prompt_text = "\ufffd" if incomplete else ""  # the prompt's, unless completed

    def feed(self, token: int) -> str:
        """Return the text that this token completes."""
        return self._new_text(self._characters.decode(self._token_bytes.add(token)))

    def bytes_of(self, token: int) -> bytes | None:
        """Return the bytes that a token would add; None if it never has text."""
        is_hidden = self._token_bytes.is_hidden(token)
        return None if is_hidden else self._token_bytes.peek(token)

    def name(self, token: int) -> str:
        """Return the name of a token in the vocabulary, empty for unknown tokens."""
        return self._token_bytes.name(token)

    def flush(self) -> str:
        """Return the rest: an incomplete character, as the replacement character."""
        return self._new_text(self._characters.decode(b"", final=True))

    def _new_text(self, text: str) -> str:
        if text:
            text, self._prompt_text = text.removeprefix(self._prompt_text), ""
        return text


def partial_match_length(text: str, marker: str) -> int:
    """Return the length of the longest suffix of a text that is a proper prefix of a marker."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
