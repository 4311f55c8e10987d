"""Strict JSON in and out of dataclasses: every key present, none unknown, all types right."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
MAX_INTEGER = 2**53  # a reader that keeps its numbers as doubles loses what is beyond


class JsonError(ValueError):
    """The text is not JSON, or not of the shape asked for; the message names the key.

    A message quotes what others wrote, so it is cut and kept to one printable line.
    """

    def __init__(self, message: str) -> None:
        shown = message if len(message) <= 400 else message[:397] + "..."
        super().__init__("".join(map(_printable, shown)))


def parse(text: str) -> Any:
    """JSON text to plain values; repeated keys and NaN are errors."""
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except JsonError:
        raise
    except (ValueError, RecursionError) as error:
        raise JsonError(f"not valid JSON: {error}") from error


def build(kind: type[T], value: Any, key: str = "") -> T:
    """Plain JSON values to an object of type `kind`; `key` says where in the file we are."""
    return typing.cast(T, _build(kind, value, key))


def to_plain(value: Any) -> Any:
    """Return a dataclass as values that json can write, the inverse of `build`."""
    if dataclasses.is_dataclass(value):
        return {key: to_plain(getattr(value, f.name)) for key, f in _keys(type(value)).items()}
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: to_plain(item) for name, item in value.items()}
    return value


def dump(value: Any, indent: int = 0, before: int = 0) -> str:
    """JSON text for people, too: what fits on a line of 120 characters is on one.

    It begins `indent` levels deep, after `before` characters of its line.
    """
    line = json.dumps(value, ensure_ascii=False)
    if indent + before + len(line) < 120 or not isinstance(value, list | dict) or not value:
        return line
    if isinstance(value, list):
        items, (begin, end) = [dump(item, indent + 1) for item in value], "[]"
    else:
        pairs = ((json.dumps(name, ensure_ascii=False), item) for name, item in value.items())
        items = [f"{name}: {dump(item, indent + 1, len(name) + 2)}" for name, item in pairs]
        begin, end = "{}"
    between = ",\n" + " " * (indent + 1)
    return f"{begin}\n{' ' * (indent + 1)}{between.join(items)}\n{' ' * indent}{end}"


def _build(kind: Any, value: Any, key: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        if value is None and types.NoneType in arguments:
            return None
        kinds = [a for a in arguments if a is not types.NoneType]
        return _build(type(value) if type(value) in kinds else kinds[0], value, key)
    if origin is tuple:
        items = _expect(list, value, key)
        return tuple(_build(arguments[0], item, f"{key}[{i}]") for i, item in enumerate(items))
    if origin is dict:
        entries = _expect(dict, value, key)
        return {name: _build(arguments[1], e, f"{key}.{name}") for name, e in entries.items()}
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(typing.cast(type, kind), _expect(dict, value, key), key)
    if kind is float and type(value) is int and abs(value) < 1e300:
        return float(value)
    if kind is float and type(value) is float and not math.isfinite(value):
        raise JsonError(f"key '{key}' must be a finite number")
    return _check_range(_expect(kind, value, key), key)


def _build_dataclass(kind: type, value: dict[str, Any], key: str) -> Any:
    hints = typing.get_type_hints(kind)
    fields = _keys(kind)
    prefix = f"{key}." if key else ""
    if missing := sorted(fields.keys() - value.keys()):
        raise JsonError(f"key '{prefix}{missing[0]}' is missing")
    if unknown := sorted(value.keys() - fields.keys()):
        raise JsonError(f"key '{prefix}{unknown[0]}' is unknown")
    built = {
        field.name: _build(hints[field.name], value[name], prefix + name)
        for name, field in sorted(fields.items())
    }
    try:
        return kind(**built)
    except JsonError:
        raise
    except ValueError as error:
        raise JsonError(f"key '{key}': {error}" if key else str(error)) from error


def _keys(kind: type) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of a dataclass by JSON key: the metadata's `key`, else the name."""
    fields = dataclasses.fields(kind)
    return {field.metadata.get("key", field.name): field for field in fields if field.init}


def _expect(kind: type, value: Any, key: str) -> Any:
    if type(value) is not kind:
        what = f"key '{key}'" if key else "the whole"
        raise JsonError(f"{what} must be {_NAMES[kind]}, got {_shown(value)}")
    return value


def _check_range(value: Any, key: str) -> Any:
    if type(value) is int and abs(value) > MAX_INTEGER:
        raise JsonError(f"key '{key}' must be at most 2^53 either way")
    if type(value) is str:
        _check_unicode(f"the text of key '{key}'", value)
    return value


def _check_unicode(what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise JsonError(f"{what} has half of a surrogate pair, which is no character") from error


def _shown(value: Any) -> str:
    """A value for a message; one that is nested can be too deep to show."""
    if isinstance(value, list | dict):
        return _NAMES[type(value)]
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        _check_unicode(f"key '{name}'", name)
        if name in result:
            raise JsonError(f"key '{name}' appears twice")
        result[name] = value
    return result


def _printable(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]


def _constant(name: str) -> NoReturn:
    raise JsonError(f"{name} is not a number that JSON knows")


_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}
