"""Special tokens: control tokens from a chat template, plain text from users.

Special tokens are the added tokens that the tokenizer's file flags as special. Others, such as
`<think>` in Qwen3, are recognized in any text, as the tokenizer does.
"""

from __future__ import annotations

import copy
import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer

from specedge.errors import PromptError

from .tokenizer import encode, encoding, translated_panics

Chat = list[Any]  # messages and tools, as JSON values
TokenSpan = tuple[int, int, int]  # start and end of a special token in a text, and its id

# Private-use characters, of two planes of Unicode.
_PRIVATE = range(0xF0000, 0xFFFFE)
_MARK, _UNKNOWN = "\U00100000", "\U0010fffd"
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


class SpecialTokens:
    """Encoder of texts that may spell special tokens.

    The tokenizer must not change afterwards. Reuse the encoder, since it may copy the tokenizer,
    which takes a second and 100 MB for a large one.

    Raises:
        PromptError: The tokenizer cannot encode the text of a special token as text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._unknown = tokenizer, _unknown(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self._tokens = {token: each for token, each in added.items() if each.special}
        self._names = {token: each.content for token, each in self._tokens.items()}

    def encode_text(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode a text; only tokens added by the tokenizer's template are special."""
        encoded = encoding(self._tokenizer, text, add_special_tokens)
        if self._spans(text, encoded):
            return self._plain_tokenizer.encode(text, add_special_tokens)
        return list(encoded.ids)

    def encode_chat(self, text: str, chat: Chat, render: Callable[[Chat], str]) -> list[int]:
        """Encode a chat that renders to `text`; messages contain no special tokens.

        If strings of a chat spell special tokens, the chat is rendered again with each of these
        characters replaced by a private-use character, so that lengths, slices and white space do
        not change. Special tokens in the result are then those of the template, including any that
        it composes from strings of the chat.
        """
        hidden, shown = self._hide(chat, text)
        if not shown:
            return encode(self._tokenizer, text, add_special_tokens=False)
        marked = render(hidden)
        spans, tokenizer = self._spans_of(marked), self._plain_tokenizer
        named = _respelt(marked.translate(shown), spans, lambda _, token: tokenizer.names[token])
        return tokenizer.encode(
            named, add_special_tokens=False, named=[token for _, _, token in spans]
        )

    @cached_property
    def _plain_tokenizer(self) -> PlainTextTokenizer:
        return PlainTextTokenizer(self._tokenizer, self._tokens, self._unknown)

    def _spans_of(self, text: str) -> list[TokenSpan]:
        """Return the spans of special tokens in a text without added tokens."""
        return self._spans(text, encoding(self._tokenizer, text, add_special_tokens=False))

    def _spans(self, text: str, encoded: Encoding) -> list[TokenSpan]:
        """Return the spans of special tokens in a text, without white space that they absorb.

        Unknown text is encoded as a special token, but spells none.
        """
        name = self._names
        if name.keys().isdisjoint(encoded.ids):
            return []
        rows = zip(encoded.ids, encoded.offsets, encoded.special_tokens_mask, strict=True)
        spans = [_stripped(text, (*at, t), name[t]) for t, at, put in rows if not put and t in name]
        return [(a, b, t) for a, b, t in spans if t not in self._unknown or text[a:b] == name[t]]

    def _hide(self, chat: Chat, text: str) -> tuple[Chat, dict[int, str]]:
        """Return a chat with private-use characters for special tokens, and the inverse mapping."""
        plain = json.dumps(chat)
        strings = {json.loads(string) for string in _STRING.findall(plain)}
        spelt = {string: spans for string in strings if (spans := self._spans_of(_valid(string)))}
        secret = {c for string, spans in spelt.items() for a, b, _ in spans for c in string[a:b]}
        used = set(text).union(*strings)
        unused = (chr(code) for code in _PRIVATE if chr(code) not in used)
        private = {ord(c): next(unused) for c in sorted(secret)}
        hidden = {
            string: _respelt(string, spans, lambda text, _: text.translate(private))
            for string, spans in spelt.items()
        }

        def replaced(match: re.Match[str]) -> str:
            string = json.loads(match[0])
            return json.dumps(hidden.get(string, string))

        shown = {ord(private[code]): chr(code) for code in private}
        return json.loads(_STRING.sub(replaced, plain)), shown


class PlainTextTokenizer:
    """Copy of a tokenizer that encodes the text of special tokens as plain text.

    `names` are placeholders for the special tokens. They are random, so that users cannot spell
    them, and are matched by the rules of their tokens (such as `lstrip`). A copy is needed because
    the setting belongs to the tokenizer object, which threads share.
    """

    def __init__(
        self, tokenizer: Tokenizer, tokens: Mapping[int, AddedToken], unknown: Collection[int]
    ) -> None:
        self._controls = {token: tokens[token].content for token in tokens if token not in unknown}
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.encode_special_tokens = True
        secret = secrets.token_hex(8)
        self.names = {token: f"{_MARK}{secret}-{token}{_MARK}" for token in tokens}
        self._tokenizer.add_tokens([_renamed(tokens[t], name) for t, name in self.names.items()])
        self._ids = {self._tokenizer.token_to_id(name): t for t, name in self.names.items()}

    def encode(self, text: str, add_special_tokens: bool, named: Sequence[int] = ()) -> list[int]:
        """Encode a text that contains the names of the tokens `named`, in this order."""
        encoded = encoding(self._tokenizer, text, add_special_tokens)
        rows = zip(encoded.ids, encoded.special_tokens_mask, strict=True)
        text_tokens = [token for token, is_added in rows if not is_added]
        spelt = next((repr(self._controls[t]) for t in text_tokens if t in self._controls), None)
        names = [self._ids[token] for token in text_tokens if token in self._ids]
        if spelt or names != list(named):
            raise PromptError(
                f"a text spells {spelt or 'a special token'}, which the tokenizer cannot encode as "
                "text; remove it, or set --special-tokens"
            )
        return [self._ids.get(token, token) for token in encoded.ids]


def _renamed(token: AddedToken, name: str) -> AddedToken:
    renamed = copy.copy(token)
    renamed.content, renamed.special = name, False  # special tokens would be encoded as text
    return renamed


def _unknown(tokenizer: Tokenizer) -> set[int]:
    """Return the tokens of unknown text; not every model type states them."""
    try:
        with translated_panics():
            return {token.id for token in tokenizer.model.tokenize(_UNKNOWN)}
    except Exception:  # unknown text is not supported
        return set()


def _stripped(text: str, span: TokenSpan, content: str) -> TokenSpan:
    """Return a span without white space around its token, unless the token has white space."""
    start, stop, token = span
    if content != content.strip():
        return span
    inner = text[start:stop]
    start += len(inner) - len(inner.lstrip())
    return start, start + len(inner.strip()), token


def _respelt(text: str, spans: Sequence[TokenSpan], new: Callable[[str, int], str]) -> str:
    """Return a text with each span replaced by `new` of its text and token."""
    parts, at = [], 0
    for start, stop, token in spans:
        parts += [text[at:start], new(text[start:stop], token)]
        at = stop
    return "".join([*parts, text[at:]])


def _valid(string: str) -> str:
    """Return a string of the same length without lone surrogates, which a template may drop."""
    return string.encode(errors="replace").decode()
