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
        self._stop_strings = StopStrings(stops, include_stop)
        self._buffer = SpanBuffer()
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
        piece = "".join(self._add(token, outcome) for token, outcome in committed)
        if self.is_finished:
            piece += self._flush()
        self.spans.append(self._buffer.take(len(piece)))
        return piece

    def _add(self, token: int, outcome: TokenOutcome) -> str:
        if self.is_finished:
            return ""
        self.tokens.append(token)
        if token in self._ends:
            self.finish_reason = FinishReason.END
            return ""
        text = self._detokenizer.feed(token)
        self._buffer.add(text, outcome)
        text = self._stop_strings.feed(text)
        if self._stop_strings.has_matched:
            self.finish_reason = FinishReason.STOP
        elif len(self.tokens) == self._limit:
            self.finish_reason = self._at_limit
        return text

    def _flush(self) -> str:
        """Return the text that was held back."""
        text = self._detokenizer.flush()
        self._buffer.add(text)
        text = self._stop_strings.feed(text)
        if self._stop_strings.has_matched:
            self.finish_reason = FinishReason.STOP
        return text + self._stop_strings.flush()


class SpanBuffer:
    """Outcomes of text that is emitted later than its tokens were committed.

    A character belongs to the token that completed it. Text that is never emitted, such as a stop
    string, has no span.
    """

    def __init__(self) -> None:
        self._pending: deque[TextSpan] = deque()
        self._last = TokenOutcome.PLAIN

    def add(self, text: str, outcome: TokenOutcome | None = None) -> None:
        """Add the text that a token completed; without an outcome, the rest of the last token."""
        self._last = outcome or self._last
        self._pending.append(TextSpan(text, self._last))

    def take(self, length: int) -> list[TextSpan]:
        """Return the spans of the next `length` characters; tokens without text have none."""
        spans = []
        while length:
            span = self._pending.popleft()
            if len(span.text) > length:
                self._pending.appendleft(TextSpan(span.text[length:], span.outcome))
                span = TextSpan(span.text[:length], span.outcome)
            length -= len(span.text)
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


class StopStrings:
    """Filter that ends a text at a stop string and holds back a possible beginning of one.

    With `include_stop` the text ends with the stop string, else before it.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._stops, self._include_stop = tuple(stops), include_stop
        self._held = ""
        self.has_matched = False

    def feed(self, text: str) -> str:
        """Return the text that cannot be part of a stop string; nothing after a match."""
        if self.has_matched:
            return ""
        self._held += text
        starts = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if starts:
            self.has_matched = True
            start, stop = min(starts)
            end = start + len(stop) if self._include_stop else start
            text, self._held = self._held[:end], ""
            return text
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def flush(self) -> str:
        """Return the text that was held back, at the end of the text."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
