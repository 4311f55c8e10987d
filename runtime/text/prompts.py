"""Encoding of prompts: text, token ids or chat messages."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from tokenizers import Tokenizer

from specedge.bundle import Bundle
from specedge.errors import ContextLengthError, OptionError, PromptError

from ..sampling.source import Source
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
    The prompt of an encoder-decoder is the source of its encoder.
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
        model, longest = self._bundle.target, self._bundle.max_prompt_length
        if self._bundle.reads_speech:
            raise PromptError(
                f"{model.source.id} reads speech instead of text; use 'specedge transcribe' or "
                "/v1/audio/transcriptions"
            )
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
        self._check_tokens(tokens, "prompt token")
        if len(tokens) > longest:
            takes = f"takes {longest + 1} with at least one new"
            if model.encoder is not None:
                takes = f"reads at most {longest}"
            raise ContextLengthError(
                f"the prompt has {len(tokens)} tokens, {model.source.id} {takes}; shorten it"
            )
        return tokens

    def start(
        self,
        prompt: str | Sequence[int] | Source,
        special_tokens: bool = False,
        decoder_prefix: str | Sequence[int] | None = None,
    ) -> tuple[list[int], Source | None]:
        """Return the tokens that a text begins with, and the source of an encoder-decoder.

        Raises:
            PromptError: As `tokens`, or the source is not one of this encoder.
            ContextLengthError: As `tokens`.
            OptionError: As `decoder_tokens`.
        """
        first = self.decoder_tokens(decoder_prefix)
        encoder = self._bundle.target.encoder
        if not isinstance(prompt, Source):
            tokens = self.tokens(prompt, special_tokens)
            return (tokens, None) if encoder is None else (first, Source(tokens))
        shape, source_id = np.shape(prompt.values), self._bundle.target.source.id
        if encoder is None:
            raise PromptError(f"{source_id} has no encoder for a source; use text or token ids")
        if encoder.source_shape is None:
            return first, Source(self.tokens(prompt.tokens))
        if shape != encoder.source_shape:
            raise PromptError(
                f"{source_id} reads log-mel spectrograms of shape {[*encoder.source_shape]}, "
                f"got {[*shape]}"
            )
        return first, prompt

    def decoder_tokens(self, prefix: str | Sequence[int] | None = None) -> list[int]:
        """Return the tokens that begin each text of an encoder-decoder; none for other models.

        Args:
            prefix: Text or token ids after `decoder_start`; None for the bundle's.

        Raises:
            OptionError: The prefix is invalid, or the model has no encoder.
        """
        bundle, model = self._bundle, self._bundle.target
        if model.encoder is None:
            if prefix is None:
                return []
            raise OptionError(
                f"decoder_prefix is for encoder-decoders, and {model.source.id} is none; omit it",
                "decoder_prefix",
            )
        if isinstance(prefix, str):
            self._check_text(prefix)
            prefix = encode(self._tokenizer, prefix, add_special_tokens=False)
        tokens = [*bundle.decoder_start, *(bundle.decoder_prefix if prefix is None else prefix)]
        try:
            self._check_tokens(tokens, "decoder_prefix: token")
        except PromptError as error:
            raise OptionError(str(error), "decoder_prefix") from error
        if len(tokens) >= bundle.context_length:
            raise OptionError(
                f"decoder_prefix has {len(tokens) - len(bundle.decoder_start)} tokens, too many "
                f"for the context of {bundle.context_length} tokens; shorten it",
                "decoder_prefix",
            )
        return tokens

    def _check_tokens(self, tokens: Sequence[int], name: str) -> None:
        vocab_size = self._bundle.target.vocab_size
        if bad := [token for token in tokens if not 0 <= token < vocab_size]:
            raise PromptError(f"{name} {bad[0]} is not between 0 and {vocab_size - 1}")

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

        if self._bundle.target.encoder is not None:
            raise PromptError(
                f"{self._bundle.target.source.id} is an encoder-decoder, which has no chats; use a "
                "prompt"
            )
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
        longest = self._bundle.max_prompt_length + 1
        if len(text) > _LONGEST_TOKEN * longest:
            raise ContextLengthError(
                f"the prompt has {len(text)} characters, far more than {longest} tokens hold; "
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
