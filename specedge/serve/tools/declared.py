"""What a client declares: functions, and which of them the model may, must or cannot call."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import UNSUPPORTED, ApiError
from ..fields import Fields, shown, within

MAX_FUNCTIONS = 128
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True)
class Function:
    """A function. `parameters` is the JSON schema of its arguments, which they follow wherever it
    is called if it is `strict`.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    strict: bool

    @property
    def facts(self) -> dict[str, Any]:
        """As transformers passes it to a template."""
        named = {"name": self.name, "description": self.description}
        return {"type": "function", "function": named | {"parameters": self.parameters}}


@dataclass(frozen=True)
class Tools:
    """Functions, at least one. `choice` is one of auto and required, or `named` is what the model
    must call. Where not `parallel`, it calls once at most.
    """

    functions: tuple[Function, ...]
    choice: str = "auto"
    named: str | None = None
    parallel: bool = True

    @property
    def wanted(self) -> bool:
        """Whether the answer must call."""
        return self.choice == "required" or self.named is not None

    @property
    def callable(self) -> list[Function]:
        """Those that the model may call."""
        return [one for one in self.functions if self.named in (None, one.name)]


def of_chat(fields: Fields) -> Tools | None:
    """Of /v1/chat/completions, where a function is in an object of its own; None if there are none,
    or none may be called.
    """

    def inner(tool: Fields) -> Fields:
        given = tool.typed("function", dict, "an object")
        if given is None:
            raise ApiError("function must be given", "function", "invalid_value")
        tool.end()
        return Fields(given)

    return _tools(fields, inner, "function.")


def of_responses(fields: Fields) -> Tools | None:
    """Of /v1/responses, where it is all in one object."""
    return _tools(fields, lambda tool: tool, "")


def _tools(fields: Fields, inner: Callable[[Fields], Fields], place: str) -> Tools | None:
    given = fields.typed("tools", list, "a list of functions") or []
    choice = fields.take("tool_choice")
    parallel = fields.typed("parallel_tool_calls", bool, "true or false")
    if len(given) > MAX_FUNCTIONS:
        said = f"tools must be at most {MAX_FUNCTIONS} functions, got {len(given)}"
        raise ApiError(said, "tools", "invalid_value")
    functions = [_function(one, f"tools[{i}]", inner, place) for i, one in enumerate(given)]
    names = [one.name for one in functions]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ApiError(f"tools has two functions {shown(twice)}", "tools", "invalid_value")
    chosen, named = _choice(choice, inner, names)
    if not functions or chosen == "none":
        return None
    return Tools(tuple(functions), chosen, named, parallel is not False)


def _function(given: object, where: str, inner: Callable[[Fields], Fields], place: str) -> Function:
    if not isinstance(given, dict):
        raise ApiError(f"{where} must be an object, got {shown(given)}", where, "invalid_type")
    tool = Fields(given)
    with within(where):
        _is_function(tool)
        fields = inner(tool)
    with within(f"{where}.{place}".rstrip(".")):
        name = fields.typed("name", str, "a name")
        if name is None or not _NAME.fullmatch(name):
            said = f"name must be 1 to 64 letters, digits, _ and -, got {shown(name)}"
            raise ApiError(said, "name", "invalid_value")
        description = fields.typed("description", str, "text") or ""
        parameters = _parameters(fields.typed("parameters", dict, "an object"))
        strict = fields.flag("strict")
        fields.end()
    return Function(name, description, parameters, strict)


def _is_function(tool: Fields) -> None:
    if (kind := tool.take("type")) != "function":
        said = f'type must be "function", the only kind of tools here, got {shown(kind)}'
        raise ApiError(said, "type", UNSUPPORTED)


def _parameters(given: dict[str, Any] | None) -> dict[str, Any]:
    """The schema of arguments, which are an object; of none where it is not given."""
    if given is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if given.get("type", "object") != "object":
        said = f'parameters must be of type "object", got {shown(given["type"])}'
        raise ApiError(said, "parameters", "invalid_value")
    return {"type": "object", "properties": {}} | given


def _choice(
    given: Any, inner: Callable[[Fields], Fields], names: list[str]
) -> tuple[str, str | None]:
    """Auto, required or none, and the function that must be called, if one is named."""
    name = "tool_choice"
    if given is None or given == "none":
        return given or "auto", None
    if not names:
        raise ApiError("tool_choice needs tools", name, "invalid_value")
    if not isinstance(given, dict):
        if given not in _CHOICES:
            may = ", ".join(_CHOICES)
            said = f"tool_choice must be one of {may}, or name a function, got {shown(given)}"
            raise ApiError(said, name, UNSUPPORTED)
        return str(given), None
    with within(name):
        tool = Fields(given)
        _is_function(tool)
        fields = inner(tool)
        named = fields.typed("name", str, "a name")
        fields.end()
    if named not in names:
        said = f"tool_choice names {shown(named)}, which is no function of tools"
        raise ApiError(said, name, "invalid_value")
    return "auto", named
