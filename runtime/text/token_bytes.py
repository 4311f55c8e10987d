"""Bytes that tokens add to a text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice
from typing import NamedTuple

from tokenizers import Tokenizer

from specedge.token_bytes import REPLACEMENT, spelled_bytes

from .tokenizer import decode

CONTEXT_LENGTH = 4  # tokens; a character has at most 4 bytes


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
        self._tokens: dict[int, _Token] = {}
        self._before: list[int] | None = None  # last token of whole characters; None at the start
        shown = (token for token in reversed(prompt) if not self.is_hidden(token))
        last = [*islice(shown, CONTEXT_LENGTH + 1)]
        if len(last) > CONTEXT_LENGTH:
            self._before = []
        self.prompt_end = b"".join([self.add(token) for token in last[CONTEXT_LENGTH - 1 :: -1]])

    def add(self, token: int) -> bytes:
        """Append a token; return the bytes that it adds."""
        added = self.peek(token)
        properties = self._properties(token)
        if properties.is_decoded and REPLACEMENT not in properties.text:
            self._before = [token]
        elif added:
            self._before = self._before or []
        return added

    def peek(self, token: int) -> bytes:
        """Return the bytes that a token would add."""
        properties = self._properties(token)
        if not properties.is_decoded:
            return self.name(token).encode() if token in self._visible else b""
        if properties.spelled is not None:
            return properties.spelled
        if self._before is None:
            return properties.text.encode()
        # Without an earlier token, the token itself stands for one.
        (before,) = self._before or [token]
        text = decode(self._tokenizer, [before, token])
        return text[len(self._properties(before).text) :].encode()

    def name(self, token: int) -> str:
        """Return the name of a token in the vocabulary, empty for unknown tokens."""
        return self._tokenizer.id_to_token(token) or ""

    def is_hidden(self, token: int) -> bool:
        """Return True if a token never has text: hidden special tokens and unknown tokens."""
        return token not in self._visible and not self._properties(token).is_decoded

    def _properties(self, token: int) -> _Token:
        """Return a token's properties, computed once."""
        if (properties := self._tokens.get(token)) is None:
            text = decode(self._tokenizer, [token])
            is_special = not text and decode(self._tokenizer, [token], skip_special_tokens=False)
            properties = self._tokens[token] = _Token(
                text,
                is_decoded=bool(text or (self.name(token) and not is_special)),
                spelled=spelled_bytes(self.name(token), text),
            )
        return properties


class _Token(NamedTuple):
    """Properties of a token by itself.

    Attributes:
        text: Its text.
        is_decoded: True for known tokens that are not special.
        spelled: Bytes that its name spells, None for whole characters.
    """

    text: str
    is_decoded: bool
    spelled: bytes | None
