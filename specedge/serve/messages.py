"""Messages and items that clients send, converted to the messages of a chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specedge.strict_json import JsonError, parse

from .errors import UNSUPPORTED, ApiError
from .fields import ANY, FieldReader, excerpt

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_PARTS = ("text", "input_text", "output_text")
_ITEM_FIELDS = {"type": ANY, "id": ANY, "status": ("completed", "incomplete")}


def parse_messages(value: object, field_name: str) -> list[Message]:
    """Return messages for a chat template.

    In the field "input" of /v1/responses, calls and their outputs are items; they become an
    assistant's message and messages of the role "tool".

    Raises:
        ApiError: A message is invalid.
    """
    if not isinstance(value, list) or not value:
        message = f"{field_name} must be a list of at least one message"
        raise ApiError(message, field_name, "invalid_type")
    messages: list[Message] = []
    call_names: dict[str, str] = {}  # function names by the ids of calls so far
    for i, item in enumerate(value):
        path = f"{field_name}[{i}]"
        if not isinstance(item, dict):
            raise ApiError(f"{path} must be an object with a role and a content", path)
        fields = FieldReader(item, path)
        item_type = item.get("type") if field_name == "input" else None
        if item_type == "function_call":
            _append_call(messages, fields)
        elif item_type == "function_call_output":
            messages.append(_parse_call_output(fields, call_names))
        else:
            messages.append(_parse_message(fields, call_names))
        fields.finish()
        if calls := messages[-1].get("tool_calls"):
            new = calls[-1:] if item_type == "function_call" else calls
            call_names |= {call["id"]: call["function"]["name"] for call in new}
    return messages


def has_tool_calls(messages: list[Message]) -> bool:
    """Return True if any message calls a function."""
    return any("tool_calls" in message for message in messages)


def _parse_message(fields: FieldReader, call_names: Mapping[str, str]) -> Message:
    role = fields.take("role")
    if role not in ROLES:
        error = f"role must be one of {', '.join(ROLES)}, got {excerpt(role)}"
        raise fields.error("role", error, UNSUPPORTED)
    content, calls = fields.take("content"), []
    if role == "assistant":
        calls = [
            _parse_call(call, f"{fields.path}.tool_calls[{i}]")
            for i, call in enumerate(fields.take_typed("tool_calls", list, "a list of calls") or [])
        ]
    text = "" if content is None and calls else _content_text(fields, content, "content")
    name = fields.take_typed("name", str, "text")
    fields.skip_neutral({"tool_calls": ([],), "function_call": (), "audio": (), "refusal": ()})
    fields.skip_neutral(_ITEM_FIELDS | {"type": ("message",)})
    if role == "tool":
        return _tool_message(fields, "tool_call_id", text, call_names)
    role = "system" if role == "developer" else role
    message: Message = {"role": role, "content": text}
    message |= {"name": name} if name is not None else {}
    return message | ({"tool_calls": calls} if calls else {})


def _parse_call(value: object, path: str) -> dict[str, Any]:
    fields = FieldReader(value, path)
    fields.skip_neutral({"type": ("function",), "index": ANY})
    function = fields.take_object("function") or FieldReader({}, f"{path}.function")
    function.path = path
    call = _tool_call(fields, "id", function)
    function.finish()
    fields.finish()
    return call


def _append_call(messages: list[Message], fields: FieldReader) -> None:
    """Add an item's call to the last message if it is an assistant's, else to a new one."""
    fields.skip_neutral(_ITEM_FIELDS)
    call = _tool_call(fields, "call_id", fields)
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(call)


def _tool_call(fields: FieldReader, id_name: str, function: FieldReader) -> dict[str, Any]:
    """Return a call with its arguments as an object, as templates take them."""
    id_ = fields.take(id_name)
    if not isinstance(id_, str) or not id_:
        raise fields.error(id_name, f"{id_name} must be text, got {excerpt(id_)}", "invalid_type")
    name = function.take_typed("name", str, "a name")
    text = function.take_typed("arguments", str, "text")
    if not name:
        raise function.error("name", "name must be given")
    try:
        arguments = parse(text or "{}")
    except JsonError:
        arguments = None
    if not isinstance(arguments, dict):
        message = f"arguments must be an object of JSON as text, got {excerpt(text)}"
        raise function.error("arguments", message)
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def _parse_call_output(fields: FieldReader, call_names: Mapping[str, str]) -> Message:
    fields.skip_neutral(_ITEM_FIELDS)
    text = _content_text(fields, fields.take("output"), "output")
    return _tool_message(fields, "call_id", text, call_names)


def _tool_message(
    fields: FieldReader, id_name: str, text: str, call_names: Mapping[str, str]
) -> Message:
    """Return the message of a call's result; some templates need the name of its function."""
    id_ = fields.take(id_name)
    if not isinstance(id_, str) or id_ not in call_names:
        message = f"{id_name} must be the id of an earlier call, got {excerpt(id_)}"
        raise fields.error(id_name, message)
    return {"role": "tool", "content": text, "tool_call_id": id_, "name": call_names[id_]}


def _content_text(fields: FieldReader, content: object, name: str) -> str:
    """Return the text of a content: text, or parts of text."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        path = fields.path_of(name)
        return "".join(_part_text(part, f"{path}[{i}]") for i, part in enumerate(content))
    message = f"{name} must be text or a list of text parts, got {excerpt(content)}"
    raise fields.error(name, message, "invalid_type")


def _part_text(part: object, path: str) -> str:
    part_type = part.get("type") if isinstance(part, dict) else part
    if isinstance(part, dict) and part_type in TEXT_PARTS and isinstance(part.get("text"), str):
        fields = FieldReader(part, path)
        fields.skip_neutral({"type": TEXT_PARTS, "annotations": ANY, "logprobs": ANY})
        text = str(fields.take("text"))
        fields.finish()
        return text
    raise ApiError(f"{path} must be a text part, got {excerpt(part_type)}", path, UNSUPPORTED)
