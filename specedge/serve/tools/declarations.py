"""Parsing of tool declarations and `tool_choice`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import UNSUPPORTED, ApiError
from ..fields import FieldReader, excerpt

MAX_FUNCTIONS = 128
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True)
class FunctionTool:
    """Function with the JSON schema of its arguments, which is enforced if `strict` is set.

    `keys` is the order of the keys in the declaration, which affects the rendered template.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    strict: bool
    keys: tuple[str, ...] = ()

    @property
    def template_json(self) -> dict[str, Any]:
        """Return the function in the format that transformers passes to templates."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        ordered = {key: function[key] for key in self.keys if key in function}
        return {"type": "function", "function": ordered | function}


@dataclass(frozen=True)
class ToolSet:
    """Functions of a request (at least one) and `tool_choice`.

    Attributes:
        functions: All functions, as passed to the template.
        choice: "auto" or "required".
        required_name: Function that the model must call, if one is named.
        parallel: False if the text may contain at most one call.
        allowed_names: Functions that the model may call, or None for all.
    """

    functions: tuple[FunctionTool, ...]
    choice: str = "auto"
    required_name: str | None = None
    parallel: bool = True
    allowed_names: tuple[str, ...] | None = None

    @property
    def is_call_required(self) -> bool:
        """Return True if the text must consist of calls."""
        return self.choice == "required" or self.required_name is not None

    @property
    def callable(self) -> list[FunctionTool]:
        """Return the functions that the model may call."""
        if self.required_name is not None:
            return [f for f in self.functions if f.name == self.required_name]
        allowed = self.allowed_names
        return [f for f in self.functions if allowed is None or f.name in allowed]


def parse_chat_tools(fields: FieldReader) -> ToolSet | None:
    """Parse the tools of a chat, in which functions are nested objects.

    Returns:
        The tools, or None if there are none or `tool_choice` is "none".
    """

    def function_fields(tool: FieldReader) -> FieldReader:
        function = tool.require_object("function")
        tool.finish()
        return function

    return _parse_tools(fields, function_fields)


def parse_responses_tools(fields: FieldReader) -> ToolSet | None:
    """Parse the tools of /v1/responses, in which functions are not nested."""
    return _parse_tools(fields, lambda tool: tool)


def _parse_tools(
    fields: FieldReader, function_fields: Callable[[FieldReader], FieldReader]
) -> ToolSet | None:
    """Parse tools; built-in tools of other servers are ignored."""
    tools = fields.take_typed("tools", list, "a list of functions") or []
    choice = fields.take("tool_choice")
    parallel = fields.take_typed("parallel_tool_calls", bool, "true or false")
    if len(tools) > MAX_FUNCTIONS:
        message = f"tools must be at most {MAX_FUNCTIONS} functions, got {len(tools)}"
        raise ApiError(message, "tools", "invalid_value")
    functions = []
    for i, value in enumerate(tools):
        tool = fields.child(value, f"tools[{i}]")
        tool_type = tool.peek("type")
        if fields.ignored is not None and tool_type not in (None, "function"):
            fields.ignored.add(f"{tool.path}.{tool_type}")
        else:
            functions.append(_parse_function(tool, function_fields))
    names = [function.name for function in functions]
    if duplicate := next((name for name in names if names.count(name) > 1), None):
        message = f"tools contains the function {excerpt(duplicate)} twice"
        raise ApiError(message, "tools", "invalid_value")
    allowed_names = None
    if names and isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice, allowed_names = _parse_allowed_tools(fields, choice, names)
    choice_name, required_name = _parse_choice(fields, choice, function_fields, names)
    if not functions or choice_name == "none":
        return None
    is_parallel = parallel is not False
    return ToolSet(tuple(functions), choice_name, required_name, is_parallel, allowed_names)


def _parse_function(
    tool: FieldReader, function_fields: Callable[[FieldReader], FieldReader]
) -> FunctionTool:
    if tool.is_strict or tool.peek("type") is not None:
        _check_type(tool)
    fields = function_fields(tool)
    keys = fields.names
    name = fields.take_typed("name", str, "a name")
    if name is None or not _NAME.fullmatch(name):
        message = f"name must be 1 to 128 letters, digits, _ and -, got {excerpt(name)}"
        raise fields.error("name", message)
    description = fields.take_typed("description", str, "text") or ""
    parameters = _parse_parameters(fields)
    strict = fields.take_flag("strict")
    fields.finish()
    return FunctionTool(name, description, parameters, strict, keys)


def _check_type(tool: FieldReader) -> None:
    if (tool_type := tool.take("type")) != "function":
        message = f'type must be "function", the only supported one, got {excerpt(tool_type)}'
        raise tool.error("type", message, UNSUPPORTED)


def _parse_parameters(fields: FieldReader) -> dict[str, Any]:
    """Return the schema of the arguments; by default an object without properties."""
    schema: dict[str, Any] | None = fields.take_typed("parameters", dict, "an object")
    if schema is None:
        return _NO_PARAMETERS | {"additionalProperties": False}
    if schema.get("type", "object") != "object":
        message = f'parameters must be of type "object", got {excerpt(schema["type"])}'
        raise fields.error("parameters", message)
    return schema | {k: v for k, v in _NO_PARAMETERS.items() if k not in schema}


def _parse_choice(
    fields: FieldReader,
    value: Any,
    function_fields: Callable[[FieldReader], FieldReader],
    names: list[str],
) -> tuple[str, str | None]:
    """Return "auto", "required" or "none", and the name of the required function, if any."""
    field_name = "tool_choice"
    if value is None or value == "none":
        return value or "auto", None
    if not names:
        if value == "auto" and not fields.is_strict:
            return "auto", None
        raise ApiError("tool_choice requires tools", field_name, "invalid_value")
    if not isinstance(value, dict):
        if value not in _CHOICES:
            choices = ", ".join(_CHOICES)
            message = f"tool_choice must be one of {choices}, or name a function, got "
            raise ApiError(message + excerpt(value), field_name, UNSUPPORTED)
        return str(value), None
    tool = fields.child(value, field_name)
    _check_type(tool)
    function = function_fields(tool)
    name = function.take_typed("name", str, "a name")
    function.finish()
    if name not in names:
        message = f"tool_choice names {excerpt(name)}, which is not a function in tools"
        raise ApiError(message, field_name, "invalid_value")
    return "auto", name


def _parse_allowed_tools(
    fields: FieldReader, value: dict[str, Any], names: list[str]
) -> tuple[str, tuple[str, ...]]:
    """Return the mode and the function names of an "allowed_tools" choice.

    They are nested in a further object in chats, but not in /v1/responses.
    """
    choice = fields.child(value, "tool_choice")
    choice.skip("type")
    options = choice.take_object("allowed_tools") or choice
    mode = options.take_typed("mode", str, "auto or required") or "auto"
    allowed = []
    for i, item in enumerate(options.take_list("tools", "a list of functions")):
        tool = fields.child(item, f"{options.path}.tools[{i}]")
        if tool.take("type") in (None, "function"):
            function = tool.take_object("function") or tool
            allowed.append(function.take_typed("name", str, "a name"))
    choice.finish()
    options.finish()
    unknown = next((name for name in allowed if name not in names), None)
    if unknown is not None or not allowed:
        message = f"tool_choice allows {excerpt(unknown)}, which is not a function in tools"
        message = message if allowed else "tool_choice allows no function"
        raise ApiError(message, "tool_choice", "invalid_value")
    return mode, tuple(allowed)
