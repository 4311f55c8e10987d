"""The form that an answer must have: `response_format`, and in the newer shape `text`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .errors import UNSUPPORTED, ApiError
from .fields import Fields, shown, within

TYPES = ("text", "json_object", "json_schema")


@dataclass(frozen=True)
class Format:
    """What a client wants. `schema` is that of JSON, None of any text; `facts` are as given, in the
    field `name`.
    """

    name: str
    schema: dict[str, Any] | None = None
    facts: dict[str, Any] = field(default_factory=lambda: {"type": "text"})

    @property
    def field_of_schema(self) -> str | None:
        """The field that gave a JSON schema, if one did."""
        return None if self.schema is None else self.name


def of_chat(fields: Fields) -> Format:
    """Of /v1/chat/completions, where a schema is in an object of its own."""
    name = "response_format"
    given = fields.typed(name, dict, "an object")
    if given is None:
        return Format(name)
    inner = Fields(given)
    with within(name):
        if _type(inner) != "json_schema":
            return _plain(inner, name, given)
        named = _given(inner, "json_schema")
        inner.end()
    with within(f"{name}.json_schema"):
        return Format(name, _schema(Fields(named)), given)


def of_responses(fields: Fields) -> Format:
    """Of /v1/responses, where it is all in one object."""
    name = "text"
    text = Fields(fields.typed(name, dict, "an object") or {})
    with within(name):
        given = text.typed("format", dict, "an object")
        text.skip({"verbosity": ()})
        text.end()
    if given is None:
        return Format(name)
    inner = Fields(given)
    with within(f"{name}.format"):
        if _type(inner) != "json_schema":
            return _plain(inner, name, given)
        return Format(name, _schema(inner), given)


def _type(fields: Fields) -> str:
    kind = fields.typed("type", str, "a name")
    if kind not in TYPES:
        said = f"type must be one of {', '.join(TYPES)}, got {shown(kind)}"
        raise ApiError(said, "type", UNSUPPORTED)
    return str(kind)


def _plain(fields: Fields, name: str, given: dict[str, Any]) -> Format:
    """Any text, or any object of JSON."""
    fields.end()
    schema = {"type": "object"} if given["type"] == "json_object" else None
    return Format(name, schema, given)


def _schema(fields: Fields) -> dict[str, Any]:
    """A schema with its name; whether it is `strict` or not, the answer follows it."""
    fields.typed("name", str, "text")
    fields.typed("description", str, "text")
    fields.flag("strict")
    schema = _given(fields, "schema")
    fields.end()
    return schema


def _given(fields: Fields, name: str) -> dict[str, Any]:
    """An object that must be there."""
    value: dict[str, Any] | None = fields.typed(name, dict, "an object")
    if value is None:
        raise ApiError(f"{name} must be given", name, "invalid_value")
    return value
