"""Lenient parsers of complete tool calls in several syntaxes."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from .families import GEMMA_QUOTE, CallFamily

Schemas = Mapping[str, dict[str, Any]]  # schemas of arguments by the names of functions
Calls = list[tuple[str, dict[str, Any]]]
NAMES, ARGUMENTS = ("name", "tool_name"), ("arguments", "parameters", "args")
_LITERALS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}


def parse_syntax(family: CallFamily, text: str, schemas: Schemas) -> tuple[Calls, str] | None:
    """Parse the calls at the start of a text.

    Returns:
        The calls and the remaining text; None if the text does not begin with a call.
    """
    try:
        calls, rest = _PARSERS[family.syntax](family, text, schemas)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return (calls, rest) if calls else None


def refuse_constant(constant: str) -> None:
    """Raise ValueError for NaN and Infinity."""
    raise ValueError(f"{constant} is not JSON")


DECODER = json.JSONDecoder(parse_constant=refuse_constant)


def call_of(value: object, schemas: Schemas) -> tuple[str, dict[str, Any]]:
    """Return name and arguments of a call that is a JSON object.

    Arguments may be JSON text, empty or missing.

    Raises:
        ValueError: The value is not a call of a function in `schemas`.
    """
    call = value if isinstance(value, dict) else {}
    if isinstance(call.get("function"), dict):  # as in OpenAI's messages
        call = call["function"]
    name = next((call[key] for key in NAMES if isinstance(call.get(key), str)), None)
    if name not in schemas:
        raise ValueError("no call")
    arguments = next((call[key] for key in ARGUMENTS if call.get(key) is not None), None)
    return str(name), parse_arguments(arguments)


def parse_arguments(arguments: object) -> dict[str, Any]:
    """Return arguments as an object; they may be JSON text, empty or missing."""
    if isinstance(arguments, str):
        arguments = DECODER.decode(arguments) if arguments.strip() else {}
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        raise ValueError("arguments are not an object")
    return arguments


def _parse_json(family: CallFamily, text: str, schemas: Schemas) -> tuple[Calls, str]:
    """Parse a sequence of JSON objects or lists of objects."""
    openings = (family.marker, "```json", "[TOOL_CALLS]", "[")
    closings = (";", ",", "]", "```", "</tool_call>", *filter(None, [family.end]))
    calls: Calls = []
    end = 0
    while (start := _skip(text, end, *openings)) < len(text):
        try:
            value, after = DECODER.raw_decode(text, start)
            calls.append(call_of(value, schemas))
        except ValueError:
            break
        end = _skip(text, after, *closings)
    return calls, text[end:]


def _skip(text: str, position: int, *markers: str) -> int:
    """Return the position after whitespace and markers."""
    while position < len(text):
        if text[position].isspace():
            position += 1
            continue
        marker = next((marker for marker in markers if text.startswith(marker, position)), None)
        if marker is None:
            break
        position += len(marker)
    return position


_FUNCTION = re.compile(
    r"\s*(?:<tool_call>)?\s*<function=([^>\s]+)>(.*?)</function>\s*(?:</tool_call>)?", re.DOTALL
)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)(?:\n?</parameter>|$)", re.DOTALL)


_GLM_CALL = re.compile(r"\s*<tool_call>\s*([^\s<]+)\s*(.*?)\s*</tool_call>", re.DOTALL)
_GLM_PAIR = re.compile(r"<arg_key>\s*(.*?)\s*</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _parse_tagged(
    call: re.Pattern[str], pair: re.Pattern[str], family: CallFamily, text: str, schemas: Schemas
) -> tuple[Calls, str]:
    """Parse a call whose arguments are tagged pairs; `call` and `pair` have two groups each."""
    match = call.match(text)
    if match is None or match[1] not in schemas:
        raise ValueError("no call")
    schema = schemas[match[1]]
    pairs = pair.findall(match[2])
    return [(match[1], {k: _typed(v, schema, k) for k, v in pairs})], text[match.end() :]


def _typed(text: str, schema: Mapping[str, Any], key: str) -> Any:
    """Return raw text unchanged if its property is a string, else parsed as JSON."""
    properties = schema.get("properties")
    declared = properties.get(key) if isinstance(properties, dict) else None
    if isinstance(declared, dict) and declared.get("type") == "string":
        return text
    try:
        return DECODER.decode(text.strip())
    except ValueError:
        return _LITERALS.get(text.strip(), text)


def _parse_pythonic(family: CallFamily, text: str, schemas: Schemas) -> tuple[Calls, str]:
    """Parse a list of calls in Python syntax, with constants of Python or JSON."""
    position = _skip(text, 0, family.marker)
    has_bracket = text.startswith("[", position)
    position += has_bracket
    calls: Calls = []
    while (end := _call_end(text, start := _skip(text, position, ","))) is not None:
        try:
            calls.append(_python_call(text[start:end], schemas))
        except (ValueError, SyntaxError):
            break
        position = end
    closed = _skip(text, position)
    if has_bracket and text.startswith("]", closed):
        position = closed + 1
    closed = _skip(text, position)
    if family.end and text.startswith(family.end, closed):
        position = closed + len(family.end)
    return calls, text[position:]


_CALL_START = re.compile(r"[\w.-]+\s*\(")


def _call_end(text: str, start: int) -> int | None:
    """Return the end of a call in Python syntax, or None if there is no complete call."""
    match = _CALL_START.match(text, start)
    position, depth, quote = 0 if match is None else match.end(), 1, ""
    if match is None:
        return None
    while position < len(text) and depth:
        character = text[position]
        if quote:
            position += character == "\\"
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        else:
            depth += (character in "([{") - (character in ")]}")
        position += 1
    return None if depth else position


def _python_call(text: str, schemas: Schemas) -> tuple[str, dict[str, Any]]:
    name, parenthesis, arguments = text.partition("(")
    node = ast.parse(f"f{parenthesis}{arguments}", mode="eval").body  # names may have hyphens
    if not isinstance(node, ast.Call) or node.args or name.strip() not in schemas:
        raise ValueError("no call")
    return name.strip(), {str(k.arg): _literal(k.value) for k in node.keywords}


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _LITERALS:
        return _LITERALS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [str(_literal(key)) for key in node.keys if key is not None]
        return dict(zip(keys, map(_literal, node.values), strict=True))
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("not a JSON value")
    return value


_DEEPSEEK_CALL = re.compile(
    r"\s*<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>",
    re.DOTALL,
)
_FENCED = re.compile(r"\s*([^\n]+)\n```json\n(.*?)\n?```\s*", re.DOTALL)


def _parse_deepseek(family: CallFamily, text: str, schemas: Schemas) -> tuple[Calls, str]:
    position = _skip(text, 0, family.marker)
    calls: Calls = []
    while match := _DEEPSEEK_CALL.match(text, position):
        name, arguments = match[1].strip(), match[2]
        if fenced := _FENCED.fullmatch(arguments):
            name, arguments = fenced[1].strip(), fenced[2]
        if name not in schemas:
            break
        calls.append((name, parse_arguments(arguments)))
        position = _skip(text, match.end())
    return calls, text[_skip(text, position, family.end) :]


def _parse_gemma(family: CallFamily, text: str, schemas: Schemas) -> tuple[Calls, str]:
    match = re.compile(r"\s*<\|tool_call>\s*call:\s*([\w.-]+)\s*").match(text)
    if match is None or match[1] not in schemas:
        raise ValueError("no call")
    reader = _GemmaReader(text, match.end())
    arguments = reader.read()
    if not isinstance(arguments, dict):
        raise ValueError("no call")
    return [(match[1], arguments)], text[_skip(text, reader.position, family.end) :]


class _GemmaReader:
    """Reader of Gemma 4's values: JSON with unquoted keys, and a special token as string quote."""

    def __init__(self, text: str, position: int) -> None:
        self._text, self.position = text, position

    def read(self) -> Any:
        for quote in (GEMMA_QUOTE, '"'):
            if self._take(quote):
                return self._until(quote)
        if self._take("{"):
            return self._object()
        if self._take("["):
            return self._list()
        match = re.compile(r"[^,{}\[\]<]+").match(self._text, self.position)
        if match is None:
            raise ValueError("no value")
        self.position = match.end()
        text = match[0].strip()
        try:
            return DECODER.decode(text)
        except ValueError:
            return _LITERALS.get(text, text)

    def _object(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while not self._take("}"):
            key = self._until(":").strip().strip('"').replace(GEMMA_QUOTE, "")
            values[key] = self.read()
            self._take(",")
        return values

    def _list(self) -> list[Any]:
        values = []
        while not self._take("]"):
            values.append(self.read())
            self._take(",")
        return values

    def _take(self, marker: str) -> bool:
        self.position = _skip(self._text, self.position)
        is_next = self._text.startswith(marker, self.position)
        self.position += len(marker) if is_next else 0
        return is_next

    def _until(self, marker: str) -> str:
        end = self._text.index(marker, self.position)
        text, self.position = self._text[self.position : end], end + len(marker)
        return text


_PARSERS: dict[str, Callable[[CallFamily, str, Schemas], tuple[Calls, str]]] = {
    "json": _parse_json,
    "xml": partial(_parse_tagged, _FUNCTION, _PARAMETER),
    "glm": partial(_parse_tagged, _GLM_CALL, _GLM_PAIR),
    "pythonic": _parse_pythonic,
    "deepseek": _parse_deepseek,
    "gemma": _parse_gemma,
}
