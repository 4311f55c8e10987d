"""Response formats: `response_format` of chats and completions, `text` of /v1/responses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .errors import UNSUPPORTED
from .fields import FieldReader, excerpt

TYPES = ("text", "json_object", "json_schema")


@dataclass(frozen=True)
class ResponseFormat:
    """Response format: text without constraints, or JSON that matches a schema.

    Attributes:
        field_name: Field of the request that sets the format.
        schema: JSON schema, or None for text without constraints.
        value: Format as sent by the client.
    """

    field_name: str
    schema: dict[str, Any] | None = None
    value: dict[str, Any] = field(default_factory=lambda: {"type": "text"})


def parse_chat_format(fields: FieldReader) -> ResponseFormat:
    """Parse `response_format`, in which the schema is in a nested object."""
    name = "response_format"
    value = fields.peek(name)
    inner = fields.take_object(name)
    if inner is None or not value:
        return ResponseFormat(name)
    if _take_type(inner) != "json_schema":
        return _schemaless_format(inner, name, value)
    schema_fields = inner.require_object("json_schema")
    inner.finish()
    return ResponseFormat(name, _take_schema(schema_fields), value)


def parse_responses_format(fields: FieldReader) -> ResponseFormat:
    """Parse `text` of /v1/responses, in which the schema's fields are part of `format`."""
    name = "text"
    text = fields.take_object(name)
    if text is None:
        return ResponseFormat(name)
    value = text.peek("format")
    inner = text.take_object("format")
    text.skip("verbosity")
    text.finish()
    if inner is None:
        return ResponseFormat(name)
    if _take_type(inner) != "json_schema":
        return _schemaless_format(inner, name, value)
    return ResponseFormat(name, _take_schema(inner), value)


def _take_type(fields: FieldReader) -> str:
    format_type = fields.take_typed("type", str, "a name")
    if format_type not in TYPES:
        message = f"type must be one of {', '.join(TYPES)}, got {excerpt(format_type)}"
        raise fields.error("type", message, UNSUPPORTED)
    return str(format_type)


def _schemaless_format(fields: FieldReader, name: str, value: dict[str, Any]) -> ResponseFormat:
    """Return the format of type "text" or "json_object", with llama.cpp's optional `schema`."""
    schema: dict[str, Any] | None = None
    if value["type"] == "json_object":
        schema = fields.take_typed("schema", dict, "an object") or {"type": "object"}
    fields.finish()
    return ResponseFormat(name, schema, value)


def _take_schema(fields: FieldReader) -> dict[str, Any]:
    """Return a schema, which is enforced even if `strict` is false."""
    fields.take_typed("name", str, "text")
    fields.take_typed("description", str, "text")
    fields.take_flag("strict")
    schema: dict[str, Any] | None = fields.take_typed("schema", dict, "an object")
    if schema is None:
        raise fields.error("schema", "schema is required")
    fields.finish()
    return schema
