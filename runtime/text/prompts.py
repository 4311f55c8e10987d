"""Encoding of prompts: text, token ids or chat messages."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, cast

from tokenizers import Tokenizer

from specedge.bundle import Bundle
from specedge.errors import ContextLengthError, PromptError

from .messages import TemplateOptions, plain, plain_messages
from .special_tokens import SpecialTokens
from .tokenizer import encode

Tools = Sequence[Mapping[str, Any]]  # functions that the assistant may call
UserPrompt = str | Sequence[int] | Sequence[Mapping[str, Any]]  # text, token ids, or messages
_DEFAULTS = TemplateOptions()
_LONGEST_TOKEN = 1000  # characters; longer prompts are rejected before tokenization


class Prompts:
    """Encoder of prompts for a bundle.

    With `special_tokens`, text that spells a special token is encoded as that token, else as text.
    """

    def __init__(self, bundle: Bundle, tokenizer: Tokenizer) -> None:
        self._bundle, self._tokenizer = bundle, tokenizer
        self._special = SpecialTokens(tokenizer)

    def tokens(self, prompt: str | Sequence[int], special_tokens: bool = False) -> list[int]:
        """Return the tokens of a prompt.

        Raises:
            PromptError: The prompt is empty, or has invalid text or token ids.
            ContextLengthError: The prompt does not fit into the context.
        """
        vocab_size, context = self._bundle.target.vocab_size, self._bundle.context_length
        if not isinstance(prompt, str):
            tokens = _ids(prompt)
        elif not prompt:  # some tokenizers add a token even to empty text
            tokens = []
        else:
            self._check_text(prompt)
            tokens = (
                encode(self._tokenizer, prompt)
                if special_tokens
                else self._special.encode_text(prompt)
            )
        if not tokens:
            raise PromptError("the prompt is empty; at least one token is required")
        if bad := [token for token in tokens if not 0 <= token < vocab_size]:
            raise PromptError(f"prompt token {bad[0]} is not between 0 and {vocab_size - 1}")
        if len(tokens) >= context:
            raise ContextLengthError(
                f"the prompt has {len(tokens)} tokens, {self._bundle.target.source.id} takes "
                f"{context} with at least one new; shorten it"
            )
        return tokens

    def completion_tokens(
        self, text: str, add_special_tokens: bool = True, max_length: int | None = None
    ) -> list[int]:
        """Return the tokens of a text with special tokens, as in rendered prompts.

        If both the text and the tokenizer add a BOS token, there is one. At most the last
        `max_length` tokens are kept.
        """
        self._check_text(text)
        tokens = encode(self._tokenizer, text, add_special_tokens) if text else []
        plain = encode(self._tokenizer, text, add_special_tokens=False) if text else []
        first = tokens[: len(tokens) - len(plain)]
        if len(first) == 1 and plain[:1] == first and tokens == first + plain:
            tokens = plain
        return self.tokens(tokens if max_length is None else tokens[-max_length:])

    def tokens_of(self, prompt: UserPrompt, special_tokens: bool = False) -> list[int]:
        """Return the tokens of text, token ids or a chat, as `tokens` does."""
        if not isinstance(prompt, str) and any(isinstance(item, Mapping) for item in prompt):
            chat = cast(Sequence[Mapping[str, Any]], prompt)
            prompt = self.chat_tokens(chat, special_tokens)
        return self.tokens(cast(str | Sequence[int], prompt), special_tokens)

    def chat_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        special_tokens: bool = False,
        tools: Tools | None = None,
        options: TemplateOptions = _DEFAULTS,
    ) -> list[int]:
        """Return the tokens of a chat; all special tokens are those of the template.

        With `special_tokens`, messages and tools may also contain special tokens.
        """
        from .chat import render  # other prompts do not need Jinja

        text = render(self._bundle, messages, tools, options)
        if not text:
            return []
        self._check_text(text)
        if special_tokens:
            return encode(self._tokenizer, text, add_special_tokens=False)
        chat = [plain_messages(messages), None if tools is None else plain(tools, "tools")]

        def render_hidden(hidden: list[Any]) -> str:
            messages, tools = hidden
            return render(self._bundle, messages, tools, options, check_visible=False)

        return self._special.encode_chat(text, chat, render_hidden)

    def _check_text(self, text: str) -> None:
        context = self._bundle.context_length
        if len(text) > _LONGEST_TOKEN * context:
            raise ContextLengthError(
                f"the prompt has {len(text)} characters, far more than {context} tokens hold; "
                "shorten it"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(f"the prompt is not valid Unicode text ({error.reason})") from error


def _ids(prompt: Sequence[int]) -> list[int]:
    if isinstance(prompt, bytes | bytearray):
        raise PromptError("the prompt is bytes; decode it to text, or pass token ids")
    try:
        return [operator.index(token) for token in prompt]
    except TypeError as error:
        raise PromptError(f"the prompt must be text or token ids ({error})") from error
