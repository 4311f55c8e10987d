"""Anthropic's Messages API: conversion of requests to chats, and responses of /v1/messages."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer

from specedge.runtime.requests.stream import TextPiece
from specedge.runtime.text.detokenizer import FinishReason

from .choices import (
    OutputItem,
    ResponseChoice,
    continues_item,
    new_id,
    new_item,
    part_text,
    sse_event,
    usage_of,
)
from .errors import UNSUPPORTED, ApiError
from .fields import FieldReader, IgnoredFields, excerpt
from .output_parser import AnswerPart
from .requests import ParsedRequest, ParserSettings, parse_chat

PATH = "/v1/messages"
NO_THREADS = "thread_unsupported_request"
_SAME_FIELDS = ("model", "stream", "temperature", "top_p", "top_k", "thinking", "speculative")
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def parse_message_request(body: object, settings: ParserSettings) -> ParsedRequest:
    """Parse the body of a /v1/messages request.

    Raises:
        ApiError: A field has an invalid value, or is unknown in strict mode.
    """
    ignored = None if settings.strict else IgnoredFields()
    fields = FieldReader(body, ignored=ignored)
    chat = {name: fields.take(name) for name in _SAME_FIELDS}
    chat["max_tokens"], chat["stop"] = fields.take("max_tokens"), fields.take("stop_sequences")
    chat["messages"] = [*_parse_system(fields), *_parse_messages(fields)]
    if _is_prefill(chat["messages"]):
        chat["continue_final_message"] = True
    if tools := _parse_tools(fields):
        chat["tools"] = tools
        chat |= _parse_choice(fields.take_object("tool_choice"))
    else:
        fields.skip("tool_choice")
    fields.skip("metadata", "service_tier", "container", "context_management", "betas")
    if fields.take("thread") is not None:
        message = "thread is not supported; send the complete conversation in messages"
        raise ApiError(message, "thread", NO_THREADS)
    output = fields.take_object("output_config")
    if output is not None:
        chat["reasoning_effort"] = output.take("effort")
        output.finish()
    fields.finish()
    request = parse_chat(chat, settings)
    names = () if ignored is None else tuple(ignored.names)
    return dataclasses.replace(request, ignored=(*names, *request.ignored))


def _is_prefill(messages: list[dict[str, Any]]) -> bool:
    """Return True if the last message is the assistant's and is to be continued."""
    last = messages[-1] if messages else {}
    content = last.get("content")
    texts = [content] if isinstance(content, str) else [part["text"] for part in content or []]
    has_text = any(isinstance(text, str) and text.strip() for text in texts)
    return last.get("role") == "assistant" and "tool_calls" not in last and has_text


def _parse_system(fields: FieldReader) -> list[dict[str, Any]]:
    system = fields.take("system")
    if not system:
        return []
    return [{"role": "system", "content": _text_parts(fields, system, "system")}]


def _text_parts(fields: FieldReader, content: object, name: str) -> str:
    """Return the text of content, which is a string or a list of text blocks."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise fields.error(name, f"{name} must be text or a list of blocks", "invalid_type")
    texts = []
    for i, value in enumerate(content):
        block = fields.child(value, f"{fields.path_of(name)}[{i}]")
        block_type, text = block.take("type"), block.take("text")
        if block_type != "text" or not isinstance(text, str):
            message = f"{block.path} must be a text block, got {excerpt(block_type)}"
            raise ApiError(message, block.path, UNSUPPORTED)
        block.skip("cache_control", "citations")
        block.finish()
        texts.append(text)
    return "".join(texts)


def _parse_messages(fields: FieldReader) -> Iterator[dict[str, Any]]:
    """Yield messages in OpenAI's format."""
    messages = fields.take_list("messages", "a list of messages")
    for i, value in enumerate(messages):
        message = fields.child(value, f"messages[{i}]")
        role, content = message.take("role"), message.take("content")
        message.finish()
        if isinstance(content, str) or content is None:
            yield {"role": role, "content": content or ""}
        elif isinstance(content, list):
            yield from _parse_blocks(message, role, content)
        else:
            raise message.error("content", "content must be text or a list of blocks")


def _parse_blocks(
    message: FieldReader, role: object, blocks: list[Any]
) -> Iterator[dict[str, Any]]:
    texts, reasoning, calls = [], "", []
    for i, value in enumerate(blocks):
        block = message.child(value, f"{message.path}.content[{i}]")
        block_type = block.take("type")
        block.skip("cache_control", "citations", "signature", "is_error", "data", "caller")
        if block_type == "text":
            texts.append({"type": "text", "text": block.take("text")})
        elif block_type == "thinking":
            reasoning += str(block.take("thinking") or "")
        elif block_type == "tool_use":
            arguments = json.dumps(block.take("input") or {}, ensure_ascii=False)
            function = {"name": block.take("name"), "arguments": arguments}
            calls.append({"id": block.take("id"), "type": "function", "function": function})
        elif block_type == "tool_result":
            content = block.take("content")
            text = "" if content is None else _text_parts(block, content, "content")
            yield {"role": "tool", "tool_call_id": block.take("tool_use_id"), "content": text}
        elif block_type != "redacted_thinking":
            message_text = f"{block.path} has the unsupported type {excerpt(block_type)}"
            raise ApiError(message_text, block.path, UNSUPPORTED)
        block.finish()
    if texts or calls or reasoning or role != "user":
        converted: dict[str, Any] = {"role": role, "content": texts}
        converted |= {"tool_calls": calls} if calls else {}
        yield converted | ({"reasoning_content": reasoning} if reasoning else {})


def _parse_tools(fields: FieldReader) -> list[dict[str, Any]]:
    """Return the function tools in OpenAI's format; server-side tools are ignored."""
    tools = []
    for i, value in enumerate(fields.take_list("tools", "a list of tools")):
        tool = fields.child(value, f"tools[{i}]")
        tool_type = tool.take("type")
        if tool_type not in (None, "custom"):
            if tool.ignored is None:
                raise tool.error("type", f"type {excerpt(tool_type)} is not supported", UNSUPPORTED)
            tool.ignored.add(f"{tool.path}.{tool_type}")
            continue
        function = {
            "name": tool.take("name"),
            "description": tool.take("description"),
            "parameters": tool.take("input_schema"),
            "strict": tool.take("strict"),
        }
        tool.skip("cache_control", "input_examples", "eager_input_streaming", "defer_loading")
        tool.finish()
        tools.append({"type": "function", "function": function})
    return tools


def _parse_choice(choice: FieldReader | None) -> dict[str, Any]:
    if choice is None:
        return {}
    choice_type, name = choice.take("type"), choice.take("name")
    parallel = not choice.take_flag("disable_parallel_tool_use")
    choice.finish()
    if choice_type == "tool":
        function = {"type": "function", "function": {"name": name}}
        return {"tool_choice": function, "parallel_tool_calls": parallel}
    if not isinstance(choice_type, str) or choice_type not in _CHOICES:
        raise choice.error(
            "type", f"type must be auto, any, tool or none, got {excerpt(choice_type)}"
        )
    return {"tool_choice": _CHOICES[choice_type], "parallel_tool_calls": parallel}


def error_body(error: ApiError) -> dict[str, Any]:
    """Return the body of an error in Anthropic's format."""
    default = "invalid_request_error" if error.status < 500 else "api_error"
    body: dict[str, Any] = {
        "type": _ERROR_TYPES.get(error.status, default),
        "message": error.message,
    }
    if error.code == NO_THREADS:  # makes the SDK's tool runner send the complete conversation
        body["details"] = {"error_code": NO_THREADS, "unsupported": [error.param]}
    return {"type": "error", "error": body}


class MessagesShaper:
    """Shaper of Anthropic's messages and of the events of their streams."""

    def __init__(self, model: str, request: ParsedRequest, tokenizer: Tokenizer) -> None:
        self._stops = request.options.get("stop", [])
        self._tokenizer = tokenizer
        self._items: list[OutputItem] = []  # those reported by events so far
        self._fields: dict[str, Any] = {
            "id": new_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def begin(self, choices: Sequence[ResponseChoice]) -> Iterator[str]:
        usage = {"input_tokens": len(choices[0].prompt_tokens), "output_tokens": 0}
        yield _event("message_start", message=self._fields | {"usage": usage})
        yield _event("ping")

    def piece(
        self, index: int, piece: TextPiece, parts: Sequence[AnswerPart], choice: ResponseChoice
    ) -> Iterator[str]:
        for part in parts:
            if not continues_item(self._items, part):
                yield from self._finish_block()
                yield from self._begin_block(new_item(part))
            if text := part_text(part):
                yield self._delta(text)

    def end(self, index: int, choice: ResponseChoice) -> Iterator[str]:
        if not self._items:
            yield from self._begin_block(OutputItem())
        yield from self._finish_block()

    def finish(self, choices: Sequence[ResponseChoice]) -> Iterator[str]:
        delta = self._stop(choices[0])
        yield _event("message_delta", delta=delta, usage=_usage(choices))
        yield _event("message_stop")

    def fail(self, error: ApiError) -> Iterator[str]:
        yield sse_event(error_body(error), "error")

    def body(self, choices: Sequence[ResponseChoice]) -> dict[str, Any]:
        (choice,) = choices
        content = [_block(item) for item in choice.items or [OutputItem()]]
        return self._fields | self._stop(choice) | {"content": content, "usage": _usage(choices)}

    def _stop(self, choice: ResponseChoice) -> dict[str, Any]:
        generation = choice.generation
        stop = None
        if generation.finish_reason == FinishReason.STOP:
            detokenizer = choice.detokenizer(self._tokenizer)
            text = "".join(map(detokenizer.feed, generation.tokens)) + detokenizer.flush()
            rest = text.removeprefix(generation.text)
            stop = next((stop for stop in self._stops if rest.startswith(stop)), None)
        reasons = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}
        reason = "stop_sequence" if stop is not None else reasons[choice.finish_reason]
        return {"stop_reason": reason, "stop_sequence": stop}

    def _begin_block(self, item: OutputItem) -> Iterator[str]:
        self._items.append(item)
        block = _block(item) | ({"input": {}} if item.name is not None else {})
        yield _event("content_block_start", index=len(self._items) - 1, content_block=block)

    def _finish_block(self) -> Iterator[str]:
        if not self._items:
            return
        index = len(self._items) - 1
        if self._items[-1].is_reasoning:
            delta = {"type": "signature_delta", "signature": ""}
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)

    def _delta(self, text: str) -> str:
        item = self._items[-1]
        if item.name is not None:
            delta = {"type": "input_json_delta", "partial_json": text}
        elif item.is_reasoning:
            delta = {"type": "thinking_delta", "thinking": text}
        else:
            delta = {"type": "text_delta", "text": text}
        return _event("content_block_delta", index=len(self._items) - 1, delta=delta)


def _event(name: str, **fields: Any) -> str:
    return sse_event({"type": name, **fields}, name)


def _block(item: OutputItem) -> dict[str, Any]:
    if item.is_reasoning:
        return {"type": "thinking", "thinking": item.text, "signature": ""}
    if item.name is None:
        return {"type": "text", "text": item.text, "citations": None}
    try:
        arguments = json.loads(item.text or "{}")
    except ValueError:  # a truncated call
        arguments = {}
    return {"type": "tool_use", "id": item.id, "name": item.name, "input": arguments}


def _usage(choices: Sequence[ResponseChoice]) -> dict[str, Any]:
    usage = usage_of(choices, 1)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage["completion_tokens"],
    }
