"""Strict JSON parsing into dataclasses: every key required, none unknown, exact types.

Fields with the metadata `OPTIONAL` may be missing, and are not written if they have the default.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
OPTIONAL = {"optional": True}
MAX_INTEGER = 2**53  # larger integers are not exact as doubles


class JsonError(ValueError):
    """Invalid JSON, or JSON of another structure than expected; the message names the key.

    A message quotes input, so it is truncated and restricted to one printable line.
    """

    def __init__(self, message: str) -> None:
        shown = message if len(message) <= 400 else message[:397] + "..."
        super().__init__(escape_unprintable(shown))


def escape_unprintable(text: str) -> str:
    """Escape unprintable characters, such as control sequences and bidirectional marks."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def parse(text: str) -> Any:
    """Parse JSON text; repeated keys and NaN are errors."""
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except JsonError:
        raise
    except (ValueError, RecursionError) as error:
        raise JsonError(f"not valid JSON: {error}") from error


def build(type_: type[T], value: Any, key: str = "") -> T:
    """Build an object of type `type_` from JSON values; `key` is the path in the file."""
    return typing.cast(T, _build(type_, value, key))


def to_plain(value: Any) -> Any:
    """Return a dataclass as values for `json.dumps`, the inverse of `build`."""
    if dataclasses.is_dataclass(value):
        items = ((key, f, getattr(value, f.name)) for key, f in _keys(type(value)).items())
        return {key: to_plain(item) for key, f, item in items if not _is_default(f, item)}
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: to_plain(item) for name, item in value.items()}
    return value


def dump(value: Any, indent: int = 0, before: int = 0) -> str:
    """Return readable JSON text: values that fit 120 characters are on one line.

    Args:
        value: JSON value.
        indent: Nesting level.
        before: Characters before the value on its line.
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


def _build(type_: Any, value: Any, key: str) -> Any:
    origin, arguments = typing.get_origin(type_), typing.get_args(type_)
    if origin is types.UnionType:
        if value is None and types.NoneType in arguments:
            return None
        types_ = [a for a in arguments if a is not types.NoneType]
        return _build(type(value) if type(value) in types_ else types_[0], value, key)
    if origin is tuple:
        items = _expect(list, value, key)
        return tuple(_build(arguments[0], item, f"{key}[{i}]") for i, item in enumerate(items))
    if origin is dict:
        entries = _expect(dict, value, key)
        return {name: _build(arguments[1], e, f"{key}.{name}") for name, e in entries.items()}
    if dataclasses.is_dataclass(type_):
        return _build_dataclass(typing.cast(type, type_), _expect(dict, value, key), key)
    if type_ is float and type(value) is int and abs(value) < 1e300:
        return float(value)
    if type_ is float and type(value) is float and not math.isfinite(value):
        raise JsonError(f"key '{key}' must be a finite number")
    return _check_range(_expect(type_, value, key), key)


def _build_dataclass(type_: type, value: dict[str, Any], key: str) -> Any:
    hints = _type_hints(type_)
    fields = _keys(type_)
    prefix = f"{key}." if key else ""
    optional = {key for key, field in fields.items() if field.metadata.get("optional")}
    if missing := sorted(fields.keys() - optional - value.keys()):
        raise JsonError(f"key '{prefix}{missing[0]}' is missing")
    if unknown := sorted(value.keys() - fields.keys()):
        raise JsonError(f"key '{prefix}{unknown[0]}' is unknown")
    built = {
        field.name: _build(hints[field.name], value[name], prefix + name)
        for name, field in sorted(fields.items())
        if name in value
    }
    try:
        return type_(**built)
    except JsonError:
        raise
    except ValueError as error:
        raise JsonError(f"key '{key}': {error}" if key else str(error)) from error


@functools.cache
def _type_hints(type_: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields, whose annotations take long to evaluate."""
    return typing.get_type_hints(type_)


def _keys(type_: type) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of a dataclass by JSON key: the metadata's `key`, else the name."""
    fields = dataclasses.fields(type_)
    return {field.metadata.get("key", field.name): field for field in fields if field.init}


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    """Return True if an optional field has its default."""
    if not field.metadata.get("optional"):
        return False
    factory = field.default_factory
    default = field.default if factory is dataclasses.MISSING else factory()
    return bool(value == default)


def _expect(type_: type, value: Any, key: str) -> Any:
    if type(value) is not type_:
        name = f"key '{key}'" if key else "the document"
        raise JsonError(f"{name} must be {_NAMES[type_]}, got {_shown(value)}")
    return value


def _check_range(value: Any, key: str) -> Any:
    if type(value) is int and abs(value) > MAX_INTEGER:
        raise JsonError(f"key '{key}' must be between -2^53 and 2^53")
    if type(value) is str:
        _check_unicode(f"the text of key '{key}'", value)
    return value


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise JsonError(f"{name} has an unpaired surrogate, which is not a character") from error


def _shown(value: Any) -> str:
    """Return a value for an error message; containers are named by their type only."""
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


def _constant(name: str) -> NoReturn:
    raise JsonError(f"{name} is not a JSON number")


_NAMES = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "true or false",
    list: "an array",
    dict: "an object",
}
