"""From what a caller gives, text, ids or messages, to the tokens of a prompt."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

from tokenizers import Tokenizer

from specedge.bundle import Bundle
from specedge.errors import ContextLengthError, PromptError

from .messages import plain_messages
from .special import encode_chat, encode_text
from .tokenizing import encode

UserPrompt = str | Sequence[int] | Sequence[Mapping[str, Any]]  # a text, tokens, or a chat
_LONGEST_TOKEN = 1000  # characters; what is longer is refused before minutes of tokenising


def prompt_tokens(
    bundle: Bundle,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    special_tokens: bool = False,
) -> list[int]:
    """The tokens of a prompt; PromptError or ContextLengthError if no model can continue them.

    With `special_tokens` a text that spells a special token has that token, else it is text.
    """
    vocab_size, context = bundle.target.vocab_size, bundle.context_length
    if isinstance(prompt, str):
        tokens = _text_tokens(bundle, tokenizer, prompt, special_tokens)
    else:
        tokens = _ids(prompt)
    if not tokens:
        raise PromptError("the prompt is empty; give at least one token of text")
    if bad := [token for token in tokens if not 0 <= token < vocab_size]:
        raise PromptError(f"prompt token {bad[0]} is not between 0 and {vocab_size - 1}")
    if len(tokens) >= context:
        raise ContextLengthError(
            f"the prompt has {len(tokens)} tokens, {bundle.target.source.id} takes "
            f"{context} with at least one new; shorten it"
        )
    return tokens


def tokens_of(
    bundle: Bundle, tokenizer: Tokenizer, prompt: UserPrompt, special_tokens: bool = False
) -> list[int]:
    """The tokens of a text, of token ids, or of a chat; the rest as of `prompt_tokens`."""
    if not isinstance(prompt, str) and any(isinstance(one, Mapping) for one in prompt):
        messages = cast(Sequence[Mapping[str, Any]], prompt)
        prompt = chat_tokens(bundle, tokenizer, messages, special_tokens)
    return prompt_tokens(bundle, tokenizer, cast(str | Sequence[int], prompt), special_tokens)


def chat_tokens(
    bundle: Bundle,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: bool = False,
) -> list[int]:
    """The tokens of a chat; the template writes the special tokens itself, so none are added.

    With `special_tokens` the messages may write them too.
    """
    from .chat import render  # plain prompts do without Jinja

    text = render(bundle, messages)
    if not text:
        return []
    _check_text(bundle, text)
    if special_tokens:
        return encode(tokenizer, text, add_special_tokens=False)
    return encode_chat(tokenizer, text, plain_messages(messages), partial(render, bundle))


def _text_tokens(
    bundle: Bundle, tokenizer: Tokenizer, text: str, special_tokens: bool
) -> list[int]:
    if not text:  # some tokenizers begin even no text with a token
        return []
    _check_text(bundle, text)
    return encode(tokenizer, text) if special_tokens else encode_text(tokenizer, text)


def _check_text(bundle: Bundle, text: str) -> None:
    context = bundle.context_length
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
        raise PromptError("the prompt is bytes; decode it to text, or give token ids")
    try:
        return [operator.index(token) for token in prompt]
    except TypeError as error:
        raise PromptError(f"the prompt must be text or token ids ({error})") from error
