"""Conversion of request messages and items to the messages of a chat template."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from specedge.strict_json import JsonError, parse

from .errors import UNSUPPORTED, ApiError
from .fields import FieldReader, IgnoredFields, excerpt
from .response_store import ResponseStore

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_PARTS = ("text", "input_text", "output_text")
REASONING_PARTS = ("thinking", "reasoning", "reasoning_text", "summary_text")
ENCODING_PREFIX = "specedge:"  # of `encrypted_content`, which is encoded and not encrypted
_ITEM_FIELDS = ("type", "id", "status")


def parse_messages(
    value: object,
    field_name: str,
    ignored: IgnoredFields | None = None,
    history: Sequence[Message] = (),
    store: ResponseStore | None = None,
) -> list[Message]:
    """Return messages for a chat template.

    In the field "input" of /v1/responses, calls, call outputs and reasoning are separate items;
    they are converted to assistant messages and tool messages.

    Args:
        value: Messages or items.
        field_name: Field that contains them.
        ignored: Collector of unknown fields; None to reject them.
        history: Earlier messages of the conversation.
        store: Store of the items that `item_reference` may refer to.

    Raises:
        ApiError: A message is invalid.
    """
    if not isinstance(value, list) or not value:
        message = f"{field_name} must be a list of at least one message"
        raise ApiError(message, field_name, "invalid_type")
    parser = _MessageParser(ignored, history)
    for i, item in enumerate(value):
        path = f"{field_name}[{i}]"
        if not isinstance(item, dict):
            raise ApiError(f"{path} must be an object with role and content", path)
        if item.get("type") == "item_reference" and field_name == "input":
            item = _stored_item(item.get("id"), path, store)
        fields = FieldReader(item, path, ignored)
        parser.add(fields, item.get("type") if field_name == "input" else None)
        fields.finish()
    if not parser.messages:
        raise ApiError(f"{field_name} contains no message", field_name, "invalid_value")
    return parser.messages


def has_tool_calls(messages: list[Message]) -> bool:
    """Return True if any message calls a function."""
    return any("tool_calls" in message for message in messages)


class _MessageParser:
    """Converter of messages and items, one at a time."""

    def __init__(self, ignored: IgnoredFields | None, history: Sequence[Message]) -> None:
        self.messages: list[Message] = [_copied(message) for message in history]
        self._ignored = ignored
        self._call_names: dict[str, str] = {}  # function names by call id
        self._reasoning = ""  # of a reasoning item, until its message or call follows
        for message in history:
            self._note_calls(message.get("tool_calls", []))

    def add(self, fields: FieldReader, item_type: object) -> None:
        """Convert one message or item."""
        if item_type == "function_call":
            self._append_call(fields)
        elif item_type == "function_call_output":
            self._add_call_output(fields)
        elif item_type == "reasoning":
            self._add_reasoning(fields)
        elif item_type in (None, "message") or fields.is_strict:
            self.messages.append(self._parse_message(fields))
        else:
            fields.ignored.add(f"{fields.path}.{item_type}")  # type: ignore[union-attr]
            fields.skip(*fields.names)

    def _parse_message(self, fields: FieldReader) -> Message:
        role = fields.take("role")
        if role not in ROLES:
            error = f"role must be one of {', '.join(ROLES)}, got {excerpt(role)}"
            raise fields.error("role", error, UNSUPPORTED)
        text, reasoning = self._content_text(fields, fields.take("content"), "content")
        message: Message = {"role": "system" if role == "developer" else role, "content": text}
        name = fields.take_typed("name", str, "text")
        if role == "tool":
            id_ = fields.take("tool_call_id")
            fields.skip("tool_calls", *_ITEM_FIELDS)
            return self._tool_message(fields, "tool_call_id", id_, text)
        if name is not None:
            message["name"] = name
        if role == "assistant":
            self._complete_assistant(fields, message, reasoning)
        else:
            fields.skip("tool_calls")
        fields.skip("refusal", "annotations", *_ITEM_FIELDS)
        return message

    def _complete_assistant(self, fields: FieldReader, message: Message, reasoning: str) -> None:
        calls = [
            self._parse_call(fields.child(call, f"{fields.path}.tool_calls[{i}]"))
            for i, call in enumerate(fields.take_list("tool_calls", "a list of calls"))
        ]
        text = fields.take("reasoning_content", "reasoning", "thinking")
        reasoning = self._take_reasoning() + (text if isinstance(text, str) else reasoning)
        fields.reject_unsupported({"function_call": (), "audio": ()})
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
            self._note_calls(calls)

    def _parse_call(self, fields: FieldReader) -> dict[str, Any]:
        fields.skip("type", "index")
        function = fields.take_object("function") or fields.child({}, fields.path)
        function.path = fields.path
        call = _tool_call(fields, "id", function)
        function.finish()
        fields.finish()
        return call

    def _append_call(self, fields: FieldReader) -> None:
        """Add a call to the last message if it is the assistant's, else to a new one."""
        fields.skip(*_ITEM_FIELDS)
        call = _tool_call(fields, "call_id", fields)
        reasoning = self._take_reasoning()
        if not self.messages or self.messages[-1]["role"] != "assistant" or reasoning:
            self.messages.append({"role": "assistant", "content": ""})
        if reasoning:
            self.messages[-1]["reasoning_content"] = reasoning
        self.messages[-1].setdefault("tool_calls", []).append(call)
        self._note_calls([call])

    def _add_call_output(self, fields: FieldReader) -> None:
        fields.skip(*_ITEM_FIELDS)
        text, _ = self._content_text(fields, fields.take("output"), "output")
        self.messages.append(self._tool_message(fields, "call_id", fields.take("call_id"), text))

    def _add_reasoning(self, fields: FieldReader) -> None:
        fields.skip(*_ITEM_FIELDS)
        content, summary = fields.take_list("content"), fields.take_list("summary")
        encrypted = fields.take("encrypted_content")
        parts = content or summary
        if not content and isinstance(encrypted, str) and encrypted.startswith(ENCODING_PREFIX):
            parts = [{"text": _decode_reasoning(encrypted)}]
        self._reasoning += "".join(
            part["text"]
            for part in parts
            if isinstance(part, dict) and isinstance(part.get("text"), str)
        )

    def _take_reasoning(self) -> str:
        reasoning, self._reasoning = self._reasoning, ""
        return reasoning

    def _note_calls(self, calls: list[dict[str, Any]]) -> None:
        self._call_names |= {call["id"]: call["function"]["name"] for call in calls}

    def _tool_message(self, fields: FieldReader, id_name: str, id_: object, text: str) -> Message:
        """Return the message of a call result; some templates need the function's name."""
        if not isinstance(id_, str) or id_ not in self._call_names:
            message = f"{id_name} must be the id of an earlier call, got {excerpt(id_)}"
            raise fields.error(id_name, message)
        name = self._call_names[id_]
        return {"role": "tool", "content": text, "tool_call_id": id_, "name": name}

    def _content_text(self, fields: FieldReader, content: object, name: str) -> tuple[str, str]:
        """Return text and reasoning of content, which is a string or a list of parts."""
        if content is None:
            return "", ""
        if isinstance(content, str):
            return content, ""
        if not isinstance(content, list):
            message = f"{name} must be text or a list of text parts, got {excerpt(content)}"
            raise fields.error(name, message, "invalid_type")
        texts: list[str] = []
        reasoning: list[str] = []
        for i, part in enumerate(content):
            text, is_reasoning = self._parse_part(part, f"{fields.path_of(name)}[{i}]")
            (reasoning if is_reasoning else texts).append(text)
        return "".join(texts), "".join(reasoning)

    def _parse_part(self, part: object, path: str) -> tuple[str, bool]:
        """Return the text of a content part, and whether it is reasoning."""
        if isinstance(part, str):
            return part, False
        fields = FieldReader(part, path, self._ignored)
        part_type = fields.take("type")
        keys = ("refusal",) if part_type == "refusal" else ("text", "thinking", "reasoning")
        text = fields.take(*keys)
        is_known = part_type in (*TEXT_PARTS, *REASONING_PARTS, "refusal")
        if not is_known or not isinstance(text, str):
            message = f"{path} must be a text part, got {excerpt(part_type)}"
            raise ApiError(message, path, UNSUPPORTED)
        fields.skip("annotations", "logprobs", "signature")
        fields.finish()
        return text, part_type in REASONING_PARTS


def _copied(message: Message) -> Message:
    """Return a copy of a message with a separate list of calls."""
    calls = {"tool_calls": [*message["tool_calls"]]} if "tool_calls" in message else {}
    return {**message, **calls}


def encode_reasoning(text: str) -> str:
    """Return reasoning as `encrypted_content`, which stateless clients send back."""
    return ENCODING_PREFIX + base64.b64encode(text.encode()).decode()


def _decode_reasoning(text: str) -> str:
    try:
        return base64.b64decode(text.removeprefix(ENCODING_PREFIX), validate=True).decode()
    except ValueError:
        return ""


def _stored_item(id_: object, path: str, store: ResponseStore | None) -> dict[str, Any]:
    item = store.item(id_) if store is not None and isinstance(id_, str) else None
    if item is None:
        message = f"{path}: the item {excerpt(id_)} is not stored; send it in full"
        raise ApiError(message, f"{path}.id", "item_not_found", 404)
    return item


def _tool_call(fields: FieldReader, id_name: str, function: FieldReader) -> dict[str, Any]:
    """Return a call; its arguments are an object if they are valid JSON, else unchanged text."""
    id_ = fields.take(id_name)
    if not isinstance(id_, str) or not id_:
        raise fields.error(id_name, f"{id_name} must be text, got {excerpt(id_)}", "invalid_type")
    name = function.take_typed("name", str, "a name")
    if not name:
        raise function.error("name", "name is required")
    value = function.take("arguments")
    if not isinstance(value, str | dict | None):
        message = f"arguments must be text, got {excerpt(value)}"
        raise function.error("arguments", message, "invalid_type")
    return call_message(id_, name, value)


def call_message(id_: str, name: str, arguments: str | dict[str, Any] | None) -> dict[str, Any]:
    """Return a call in the format of `tool_calls`."""
    return {"id": id_, "type": "function", "function": {"name": name} | _arguments(arguments)}


def _arguments(value: str | dict[str, Any] | None) -> dict[str, Any]:
    if isinstance(value, dict):
        return {"arguments": value}
    try:
        arguments = parse(value or "{}")
    except JsonError:
        arguments = None
    return {"arguments": arguments if isinstance(arguments, dict) else value}
