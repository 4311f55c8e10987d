"""The messages that a client sends, as a chat template takes them: checked, calls and all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specedge.strict_json import JsonError, parse

from .errors import UNSUPPORTED, ApiError
from .fields import ANY, Fields, shown, within

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_PARTS = ("text", "input_text", "output_text")


def messages_of(given: object, where: str) -> list[dict[str, Any]]:
    """Messages as a template takes them. In the newer shape calls, and what they gave, are items of
    their own; here they are an assistant's, and of the role "tool".
    """
    if not isinstance(given, list) or not given:
        raise ApiError(f"{where} must be a list of at least one message", where, "invalid_type")
    found: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of the functions called so far, by the ids of the calls
    for i, message in enumerate(given):
        place = f"{where}[{i}]"
        if not isinstance(message, dict):
            raise ApiError(f"{place} must be an object with a role and a content", place)
        fields = Fields(message)
        with within(place):
            kind = message.get("type") if where == "input" else None
            if kind == "function_call":
                _add_call(found, fields)
            elif kind == "function_call_output":
                found.append(_output(fields, names))
            else:
                found.append(_message(fields, names))
            fields.end()
        if calls := found[-1].get("tool_calls"):
            new = calls[-1:] if kind == "function_call" else calls
            names |= {call["id"]: call["function"]["name"] for call in new}
    return found


def have_calls(messages: list[dict[str, Any]]) -> bool:
    """Whether a function was called."""
    return any("tool_calls" in message for message in messages)


def _message(fields: Fields, names: Mapping[str, str]) -> dict[str, Any]:
    role = fields.take("role")
    if role not in ROLES:
        said = f"role must be one of {', '.join(ROLES)}, got {shown(role)}"
        raise ApiError(said, "role", UNSUPPORTED)
    content, calls = fields.take("content"), []
    if role == "assistant":
        calls = [
            _call(call, f"tool_calls[{i}]")
            for i, call in enumerate(fields.typed("tool_calls", list, "a list of calls") or [])
        ]
    text = "" if content is None and calls else _text(content, "content")
    name = fields.typed("name", str, "text")
    fields.skip({"tool_calls": ([],), "function_call": (), "audio": (), "refusal": ()})
    fields.skip({"type": ("message",), "id": ANY, "status": ("completed", "incomplete")})
    if role == "tool":
        return _result(fields.take("tool_call_id"), "tool_call_id", text, names)
    role = "system" if role == "developer" else role
    found: dict[str, Any] = {"role": role, "content": text}
    found |= {"name": name} if name is not None else {}
    return found | ({"tool_calls": calls} if calls else {})


def _call(given: object, place: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ApiError(f"{place} must be an object, got {shown(given)}", place, "invalid_type")
    fields = Fields(given)
    with within(place):
        fields.skip({"type": ("function",), "index": ANY})
        function = Fields(fields.typed("function", dict, "an object") or {})
        call = _called(fields.take("id"), "id", function)
        function.end()
        fields.end()
    return call


def _add_call(found: list[dict[str, Any]], fields: Fields) -> None:
    """A call of the newer shape: the assistant's whose message or call is the last."""
    fields.skip({"type": ANY, "id": ANY, "status": ("completed", "incomplete")})
    call = _called(fields.take("call_id"), "call_id", fields)
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant", "content": ""})
    found[-1].setdefault("tool_calls", []).append(call)


def _called(id_: object, field: str, fields: Fields) -> dict[str, Any]:
    """A call with its arguments as an object, as templates take them."""
    if not isinstance(id_, str) or not id_:
        raise ApiError(f"{field} must be text, got {shown(id_)}", field, "invalid_type")
    name = fields.typed("name", str, "a name")
    text = fields.typed("arguments", str, "text")
    if not name:
        raise ApiError("name must be given", "name", "invalid_value")
    try:
        arguments = parse(text or "{}")
    except JsonError:
        arguments = None
    if not isinstance(arguments, dict):
        said = f"arguments must be an object of JSON as text, got {shown(text)}"
        raise ApiError(said, "arguments", "invalid_value")
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def _output(fields: Fields, names: Mapping[str, str]) -> dict[str, Any]:
    fields.skip({"type": ANY, "id": ANY, "status": ("completed", "incomplete")})
    return _result(fields.take("call_id"), "call_id", _text(fields.take("output"), "output"), names)


def _result(id_: object, field: str, text: str, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the message of a call's result; some templates want the name of its function."""
    if not isinstance(id_, str) or id_ not in names:
        said = f"{field} must be the id of a call before it, got {shown(id_)}"
        raise ApiError(said, field, "invalid_value")
    return {"role": "tool", "content": text, "tool_call_id": id_, "name": names[id_]}


def _text(content: object, place: str) -> str:
    """A content that is text, or parts of text."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        return "".join(_part(part, f"{place}[{i}]") for i, part in enumerate(content))
    said = f"{place} must be text or a list of text parts, got {shown(content)}"
    raise ApiError(said, place, "invalid_type")


def _part(part: object, place: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else part
    if isinstance(part, dict) and kind in TEXT_PARTS and isinstance(part.get("text"), str):
        fields = Fields(part)
        fields.skip({"type": TEXT_PARTS, "annotations": ANY, "logprobs": ANY})
        text = str(fields.take("text"))
        with within(place):
            fields.end()
        return text
    raise ApiError(f"{place} must be a text, got {shown(kind)}", place, UNSUPPORTED)
