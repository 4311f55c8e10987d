"""Tool-call format of a bundle's chat template, applied to a request."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from tokenizers import Tokenizer

from specedge.bundle import Bundle
from specedge.runtime.text.chat import ToolSupport, tool_support

from ..errors import ApiError
from ..fields import MAX_GRAMMAR
from ..messages import Message
from .declarations import ToolSet
from .families import EXPLAINED, CallFamily, family_of
from .grammar import grammar_of
from .parser import ToolCallParser

_SHORT_ID = re.compile("[a-zA-Z0-9]{9}")


@dataclass(frozen=True)
class CallFormat:
    """Format of a request's tool calls, in messages, grammar and generated text.

    Attributes:
        family: Call format of the bundle's template.
        support: Features of tool use that the template renders.
        tools: Functions, or None if only earlier messages contain calls.
        grammar: Grammar of the text, or None if it is unconstrained.
        visible_tokens: Special tokens that delimit calls and are included in the text.
        is_ambiguous: True if the grammar allows text that begins like a call.
    """

    family: CallFamily
    support: ToolSupport
    tools: ToolSet | None
    grammar: str | None
    visible_tokens: frozenset[int]
    is_ambiguous: bool = False

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        """Return the functions in the format of chat templates."""
        if self.tools is None or not self.support.tools:
            return None
        return [function.template_json for function in self.tools.functions]

    def convert_messages(self, messages: list[Message]) -> list[Message]:
        """Convert messages to the format supported by the template."""
        if not self.family.is_native:
            return explain_calls(messages, self.tools)
        if not self.family.parallel:
            messages = _separate_calls(messages)
        if self.family.syntax == "harmony":
            messages = [_with_content_as_reasoning(message) for message in messages]
        if not self.support.calls:
            messages = [_with_calls_as_text(message, self.family) for message in messages]
        if self.tools is not None and not self.support.tools:
            messages = _with_message_tools(messages, self.tools)
        return [_with_short_ids(m) for m in messages] if self.family.short_ids else messages

    def parser(self) -> ToolCallParser:
        """Return a parser for one text."""
        assert self.tools is not None
        has_grammar = self.grammar is not None and not self.is_ambiguous
        return ToolCallParser(self.tools, self.family, has_grammar=has_grammar)


def call_format_of(
    bundle: Bundle, tokenizer: Tokenizer, tools: ToolSet | None, text_rules: str | None = None
) -> CallFormat:
    """Return the call format of a request.

    Args:
        bundle: Bundle with the chat template.
        tokenizer: Tokenizer of the bundle.
        tools: Functions, or None if only earlier messages contain calls.
        text_rules: Grammar of text without calls; see `grammar_of`.

    Raises:
        ApiError: The grammar of the tools is too large or too deeply nested.
    """
    added = tokenizer.get_added_tokens_decoder()
    support, family = tool_support(bundle, tools is not None), EXPLAINED
    if support.tools or support.message_tools:
        names = [added_token.content for added_token in added.values()]
        family = family_of(bundle.chat_template or "", names)
    special = {token for token, added_token in added.items() if added_token.special}
    ids = {text: tokenizer.token_to_id(text) for text in family.delimiters}
    delimiter_tokens = {text: token for text, token in ids.items() if token is not None}
    other_tokens = sorted(added.keys() - special - {*delimiter_tokens.values(), *bundle.end_tokens})
    try:
        grammar = None
        if tools is not None:
            grammar = grammar_of(tools, family, delimiter_tokens, other_tokens, text_rules)
    except RecursionError as error:
        raise ApiError("tools are nested too deeply", "tools", "invalid_value") from error
    if grammar is not None and len(grammar) > MAX_GRAMMAR:
        raise ApiError(
            f"the grammar of tools must have at most {MAX_GRAMMAR} characters, got {len(grammar)}",
            "tools",
            "invalid_value",
        )
    visible = frozenset(delimiter_tokens.values()) & special if tools is not None else frozenset()
    is_free = tools is None or not tools.is_call_required
    is_ambiguous = is_free and text_rules is not None and not family.requires_marker
    return CallFormat(family, support, tools, grammar, frozenset(visible), is_ambiguous)


def explain_calls(messages: list[Message], tools: ToolSet | None) -> list[Message]:
    """Return messages with functions, calls and results as text, for templates without tools.

    The first message lists the functions, calls become text of the assistant, and results become
    user messages.
    """
    converted: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if converted and converted[-1]["role"] == "user":
                converted[-1] = {**converted[-1], "content": f"{converted[-1]['content']}\n{text}"}
                continue
            message = {"role": "user", "content": text}
        converted.append(_with_calls_as_text(message, EXPLAINED))
    if tools is not None and converted:
        functions = "\n".join(json.dumps(f.template_json["function"]) for f in tools.functions)
        first, explanation = converted[0], f"{_EXPLANATION}<tools>\n{functions}\n</tools>"
        converted[0] = {**first, "content": f"{explanation}\n\n{first['content']}"}
    return converted


_EXPLANATION = (
    "You can call functions. To call one, write its name and its arguments as JSON:\n"
    '<tool_call>\n{"name": "function", "arguments": {"key": "value"}}\n</tool_call>\n'
    "The functions, with JSON schemas of their arguments:\n"
)


def _with_calls_as_text(message: Message, family: CallFamily) -> Message:
    """Return a message with its calls as text, in the family's format or in that of Hermes."""
    if "tool_calls" not in message:
        return message
    calls = [(call["function"]["name"], _json(call)) for call in message["tool_calls"]]
    spelled = (EXPLAINED if family.pairs is not None else family).format_calls(calls)
    content = "\n".join(filter(None, (message["content"], spelled)))
    return {k: v for k, v in message.items() if k != "tool_calls"} | {"content": content}


def _json(call: dict[str, Any]) -> str:
    """Return the arguments of a call as JSON text; text is returned unchanged."""
    arguments = call["function"]["arguments"]
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments or {}, ensure_ascii=False)


def _separate_calls(messages: list[Message]) -> list[Message]:
    """Split parallel calls into messages with one call each, followed by its result."""
    separated: list[Message] = []
    position = 0
    while position < len(messages):
        message, position = messages[position], position + 1
        calls = message.get("tool_calls", [])
        if len(calls) < 2:
            separated.append(message)
            continue
        results = [*takewhile(lambda m: m["role"] == "tool", messages[position:])]
        position += len(results)
        for call in calls:
            separated.append({**message, "tool_calls": [call]})
            separated += [r for r in results if r["tool_call_id"] == call["id"]]
            message = {"role": "assistant", "content": ""}
        ids = {call["id"] for call in calls}
        separated += [r for r in results if r["tool_call_id"] not in ids]
    return separated


def _with_content_as_reasoning(message: Message) -> Message:
    """Move the content of a message with a call and reasoning to the reasoning.

    The template of gpt-oss rejects messages with all three.
    """
    reasoning, content = message.get("reasoning_content"), message["content"]
    if not (reasoning and content and "tool_calls" in message):
        return message
    return message | {"content": "", "reasoning_content": f"{reasoning}\n\n{content}"}


def _with_message_tools(messages: list[Message], tools: ToolSet) -> list[Message]:
    """Add the functions, as JSON text, to the system message."""
    functions = [function.template_json["function"] for function in tools.functions]
    system: Message = {"role": "system", "content": ""}
    if messages[0]["role"] == "system":
        system, *messages = messages
    return [system | {"tools": json.dumps(functions, ensure_ascii=False)}, *messages]


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
    """Return an id of nine alphanumeric characters: the id itself, or its hash."""
    return id_ if _SHORT_ID.fullmatch(id_) else hashlib.sha256(id_.encode()).hexdigest()[:9]
