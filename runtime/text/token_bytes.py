"""Bytes that tokens add to a text."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from itertools import islice

from tokenizers import Tokenizer

from .tokenizer import decode

CONTEXT_LENGTH = 4  # tokens; a character has at most 4 bytes
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
# Bytes that byte-level BPE spells by their Latin-1 characters (GPT-2); the others follow U+0100.
_LATIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _LATIN]
_BYTE_OF = {chr(byte): byte for byte in _LATIN} | {chr(256 + i): b for i, b in enumerate(_OTHERS)}


class TokenBytes:
    """Bytes that a token adds to the tokens before it.

    Whole characters are the difference that a token makes to the decoding of one token before it,
    because decoders remove a space at the beginning of a text, or insert one between words. The
    name of any other token spells its bytes, so that they do not depend on adjacent tokens.

    Args:
        tokenizer: Tokenizer of the bundle.
        prompt: Tokens before the first one.
        visible_tokens: Special tokens whose bytes are their names. Others have no bytes.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int] = (), visible_tokens: Collection[int] = ()
    ) -> None:
        self._tokenizer, self._visible = tokenizer, frozenset(visible_tokens)
        self._texts: dict[int, str] = {}  # of single tokens
        self._before: list[int] | None = None  # last token of whole characters; None at the start
        last = [*islice(self._without_hidden(reversed(prompt)), CONTEXT_LENGTH + 1)]
        if len(last) > CONTEXT_LENGTH:
            self._before = []
        self.prompt_end = b"".join([self.add(token) for token in last[CONTEXT_LENGTH - 1 :: -1]])

    def add(self, token: int) -> bytes:
        """Append a token; return the bytes that it adds."""
        added = self.peek(token)
        if self._is_decoded(token) and _REPLACEMENT not in self._decode([token]):
            self._before = [token]
        elif added:
            self._before = self._before or []
        return added

    def peek(self, token: int) -> bytes:
        """Return the bytes that a token would add."""
        if not self._is_decoded(token):
            return self.name(token).encode() if token in self._visible else b""
        if (spelled := self._spelled_bytes(token)) is not None:
            return spelled
        # Without an earlier token, the token itself stands for one.
        before = [] if self._before is None else self._before or [token]
        return self._decode([*before, token])[len(self._decode(before)) :].encode()

    def name(self, token: int) -> str:
        """Return the name of a token in the vocabulary, empty for unknown tokens."""
        return self._tokenizer.id_to_token(token) or ""

    def is_hidden(self, token: int) -> bool:
        """Return True if a token never has text: hidden special tokens and unknown tokens."""
        return token not in self._visible and not self._is_decoded(token)

    def _without_hidden(self, tokens: Iterator[int]) -> Iterator[int]:
        return (token for token in tokens if not self.is_hidden(token))

    def _is_decoded(self, token: int) -> bool:
        """Return True for known tokens that are not special."""
        if self._decode([token]):
            return True
        has_name = bool(self.name(token))
        return has_name and not decode(self._tokenizer, [token], skip_special_tokens=False)

    def _spelled_bytes(self, token: int) -> bytes | None:
        """Return the bytes that a token's name spells, None for whole characters."""
        text = self._decode([token])
        if _REPLACEMENT not in text:
            return None
        name = self.name(token)
        candidates = []
        if match := _FALLBACK.fullmatch(name):
            candidates.append(bytes([int(match[1], 16)]))
        if _BYTE_OF.keys() >= set(name):
            candidates.append(bytes(_BYTE_OF[character] for character in name))
        return next((raw for raw in candidates if raw.decode("utf-8", "replace") == text), None)

    def _decode(self, tokens: Sequence[int]) -> str:
        if len(tokens) != 1:
            return decode(self._tokenizer, tokens)
        (token,) = tokens
        if (text := self._texts.get(token)) is None:
            text = self._texts[token] = decode(self._tokenizer, tokens)
        return text
