"""Call format of a bundle's chat template, applied to one request."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from specedge.bundle import Bundle

from ..errors import ApiError
from ..fields import MAX_GRAMMAR
from ..messages import Message
from .declarations import ToolSet
from .families import CallFamily, family_of
from .grammar import grammar_of
from .parser import ToolCallParser

_SHORT_ID = re.compile("[a-zA-Z0-9]{9}")


@dataclass(frozen=True)
class CallFormat:
    """Format of a request's calls: in messages, in the grammar and in the generated text.

    Attributes:
        family: The format of the bundle's template.
        tools: The functions, None if only earlier messages have calls.
        grammar: The grammar of the text, None if it is free.
        visible_tokens: Special tokens that mark calls, whose names stay in the text.
    """

    family: CallFamily
    tools: ToolSet | None
    grammar: str | None
    visible_tokens: frozenset[int]

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        """Return the functions in the form that templates take."""
        if self.tools is None:
            return None
        return [function.template_json for function in self.tools.functions]

    def convert_messages(self, messages: list[Message]) -> list[Message]:
        """Return messages with ids of the kind that the template takes."""
        return [_with_short_ids(m) for m in messages] if self.family.short_ids else messages

    def parser(self) -> ToolCallParser:
        """Return a parser for one text."""
        assert self.tools is not None
        return ToolCallParser(self.tools, self.family, has_grammar=self.grammar is not None)


def call_format_of(
    bundle: Bundle, tokenizer: Tokenizer, tools: ToolSet | None, prompt_field: str
) -> CallFormat:
    """Return the call format of a request.

    Raises:
        ApiError: The bundle's template has no supported call format.
    """
    family = family_of(bundle.chat_template or "")
    if family is None:
        param = prompt_field if tools is None else "tools"
        raise ApiError(
            f"{param}: the chat template of {bundle.target.source.id} has no supported format of "
            "calls (Hermes and Qwen's, Llama 3's, Mistral's); leave tools and calls out",
            param,
            "unsupported_value",
        )
    added = tokenizer.get_added_tokens_decoder()
    special = {token for token, added_token in added.items() if added_token.special}
    ids = {mark: tokenizer.token_to_id(mark) for mark in family.marks}
    mark_tokens = {mark: token for mark, token in ids.items() if token is not None}
    other_tokens = sorted(added.keys() - special - {*mark_tokens.values(), *bundle.end_tokens})
    try:
        grammar = None if tools is None else grammar_of(tools, family, mark_tokens, other_tokens)
    except RecursionError as error:
        raise ApiError("tools are nested too deeply", "tools", "invalid_value") from error
    if grammar is not None and len(grammar) > MAX_GRAMMAR:
        raise ApiError(
            f"the grammar of tools must have at most {MAX_GRAMMAR} characters, got {len(grammar)}",
            "tools",
            "invalid_value",
        )
    visible = frozenset(mark_tokens.values()) & special if tools is not None else frozenset()
    return CallFormat(family, tools, grammar, frozenset(visible))


def _with_short_ids(message: Message) -> Message:
    converted = dict(message)
    if "tool_calls" in message:
        converted["tool_calls"] = [
            call | {"id": _short_id(call["id"])} for call in message["tool_calls"]
        ]
    if "tool_call_id" in message:
        converted["tool_call_id"] = _short_id(message["tool_call_id"])
    return converted


def _short_id(id_: str) -> str:
    """Return an id of nine letters and digits: the id itself or its hash."""
    return id_ if _SHORT_ID.fullmatch(id_) else hashlib.sha256(id_.encode()).hexdigest()[:9]
