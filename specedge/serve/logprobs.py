"""Log-probabilities in the formats of OpenAI's and vLLM's APIs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer

from specedge.runtime.sampling.logprobs import TokenLogprobs
from specedge.runtime.text.detokenizer import Detokenizer
from specedge.runtime.text.token_bytes import TokenBytes

from .choices import part_text
from .output_parser import AnswerPart, OutputParser
from .tools.harmony import HarmonyParser

MIN_LOGPROB = -9999.0  # replaces minus infinity, which JSON lacks, as in OpenAI's API


class LogprobFormatter:
    """Formatter of the log-probabilities of consecutive tokens.

    Texts of tokens are those that they add after the tokens before them. A token that is not
    whole characters is shown with its other bytes escaped, as in OpenAI's API, and a token without
    text, such as an end token, by its name, with `bytes` null.

    Args:
        detokenizer: Detokenizer of the text, at the position of the first token.
        offset: Number of characters before that position.
    """

    def __init__(self, detokenizer: Detokenizer, offset: int = 0) -> None:
        self._detokenizer, self._offset = detokenizer, offset

    def for_chat(self, logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        """Return `choices[].logprobs.content` of a chat."""
        return [self._for_chat(entry) for entry in logprobs]

    def for_completion(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Return `choices[].logprobs` of a completion."""
        fields: dict[str, Any] = {name: [] for name in _COMPLETION_FIELDS}
        for entry in logprobs:
            fields["tokens"].append(self._key(entry.token))
            fields["token_logprobs"].append(max(entry.logprob, MIN_LOGPROB))
            fields["top_logprobs"].append(self._by_key(entry))
            fields["text_offset"].append(self._advance(entry.token))
        return fields

    def prompt_for_completion(
        self, first: int, logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        """Return `choices[].logprobs` of a prompt; null for its first token."""
        head = {"tokens": self._key(first), "text_offset": self._advance(first)}
        others = self.for_completion(logprobs)
        return {name: [head.get(name), *others[name]] for name in others}

    def prompt_by_id(
        self, first: int, logprobs: Sequence[TokenLogprobs]
    ) -> list[dict[str, Any] | None]:
        """Return `prompt_logprobs` in vLLM's format: by token id, null for the first token."""
        self._advance(first)
        return [None, *map(self._by_id, logprobs)]

    def _for_chat(self, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._entry(token, logprob) for token, logprob in entry.top]
        formatted = self._entry(entry.token, entry.logprob) | {"top_logprobs": top}
        self._advance(entry.token)
        return formatted

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        utf8 = self._detokenizer.bytes_of(token)
        return {
            "token": self._text(token),
            "logprob": max(logprob, MIN_LOGPROB),
            "bytes": None if utf8 is None else list(utf8),
        }

    def _by_key(self, entry: TokenLogprobs) -> dict[str, float]:
        """Return the most likely tokens and the emitted one, each by a key of its own."""
        emitted = self._key(entry.token)
        by_key: dict[str, float] = {}
        for token, logprob in dict([*entry.top, (entry.token, entry.logprob)]).items():
            key = self._key(token)
            if token != entry.token and (key == emitted or key in by_key):
                key = f"token_id:{token}"
            by_key[key] = max(logprob, MIN_LOGPROB)
        return by_key

    def _by_id(self, entry: TokenLogprobs) -> dict[str, Any]:
        rank = {token: i + 1 for i, (token, _) in enumerate(entry.top)}
        by_id = {
            str(token): {
                "logprob": max(logprob, MIN_LOGPROB),
                "rank": rank.get(token),
                "decoded_token": self._text(token),
            }
            for token, logprob in dict([(entry.token, entry.logprob), *entry.top]).items()
        }
        self._advance(entry.token)
        return by_id

    def _advance(self, token: int) -> int:
        """Append a token; return the offset of its text, or of the character that it is part of."""
        start, whole = self._offset, self._whole_text(token)
        self._offset += len(self._detokenizer.feed(token))
        # An incomplete character before whole ones becomes U+FFFD only now.
        return self._offset - len(whole) if whole else start

    def _key(self, token: int) -> str:
        """Return the text of a token, or `bytes:` and its bytes if it is not whole characters."""
        text = self._text(token)
        return f"bytes:{text}" if self._whole_text(token) is None else text

    def _whole_text(self, token: int) -> str | None:
        """Return the text of a token, empty if it never has one; None for parts of a character."""
        try:
            return (self._detokenizer.bytes_of(token) or b"").decode()
        except UnicodeDecodeError:
            return None

    def _text(self, token: int) -> str:
        utf8 = self._detokenizer.bytes_of(token)
        if utf8 is None:
            return self._detokenizer.name(token)
        return utf8.decode("utf-8", "backslashreplace")


_COMPLETION_FIELDS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class MessageLogprobs:
    """Log-probabilities of each message of a choice, without thinking and tool calls.

    Args:
        formatter: Formatter of all tokens of the choice.
        detokenizer: Detokenizer of the text.
        parser: Parser of the text, separate from that of the response.

    Attributes:
        messages: Entries of each message, in OpenAI's format.
    """

    def __init__(
        self,
        formatter: LogprobFormatter,
        detokenizer: Detokenizer,
        parser: OutputParser | HarmonyParser,
    ) -> None:
        self._formatter, self._detokenizer, self._parser = formatter, detokenizer, parser
        # Characters and the entries of their tokens, whose text is held back by the parser.
        self._pending: list[tuple[str, list[dict[str, Any]]]] = [("", [])]
        self._is_message = False
        self.messages: list[list[dict[str, Any]]] = []

    def add(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Append the next tokens."""
        for entry, formatted in zip(logprobs, self._formatter.for_chat(logprobs), strict=True):
            self._pending[-1][1].append(formatted)
            self._parse(self._detokenizer.feed(entry.token))

    def end(self) -> None:
        """Assign the tokens whose text was held back until the end."""
        self._parse(self._detokenizer.flush())
        self._assign(self._parser.end())

    def _parse(self, text: str) -> None:
        if text:
            self._pending[-1] = (text, self._pending[-1][1])
            self._pending.append(("", []))
            self._assign(self._parser.feed(text))

    def _assign(self, parts: Sequence[AnswerPart]) -> None:
        """Assign tokens to the parts that contain their text; drop tokens of markers before it."""
        for part in parts:
            if not (text := part_text(part)):
                continue
            was_message, self._is_message = self._is_message, isinstance(part, str)
            if self._is_message and not was_message:
                self.messages.append([])
            entries = self._take(text)
            if self._is_message:
                self.messages[-1] += entries

    def _take(self, text: str) -> list[dict[str, Any]]:
        """Remove the pending tokens up to the end of a text; return those that it contains."""
        pending = "".join(characters for characters, _ in self._pending)
        start = pending.rfind(text)
        end, at = start + len(text), 0
        taken: list[dict[str, Any]] = []
        while at < end and self._pending[0][0]:
            characters, entries = self._pending.pop(0)
            at += len(characters)
            taken += entries if at > start else []
        return taken


def token_pieces(tokenizer: Tokenizer, tokens: list[int]) -> Iterator[dict[str, Any]]:
    """Yield the text of each token, or its bytes if it is not whole characters (llama.cpp)."""
    token_bytes = TokenBytes(tokenizer, visible_tokens=tokens)
    for token in tokens:
        added = token_bytes.add(token)
        try:
            yield {"id": token, "piece": added.decode()}
        except UnicodeDecodeError:
            yield {"id": token, "piece": list(added)}
