"""Simplification of JSON schemas to equivalent ones with the keywords that llguidance supports."""

from __future__ import annotations

from typing import Any

# Enforced formats; others are annotations (JSON Schema 2020-12, section 7).
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_SCHEMAS = (
    "items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
# Values of keywords that allow everything.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "not": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
}


def simplify(schema: Any) -> Any:
    """Return an equivalent schema with fewer keywords.

    Formats that are annotations, and keywords with values that allow everything, are removed.
    `propertyNames` with a pattern or an enumeration is replaced by properties.
    """
    try:
        return _simplified(schema)
    except RecursionError:  # llguidance rejects it
        return schema


def _simplified(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    simple = {key: _simplified_part(key, value) for key, value in schema.items()}
    for key, values in _NEUTRAL.items():
        if any(type(simple.get(key)) is type(v) and simple[key] == v for v in values):
            del simple[key]
    if isinstance(simple.get("format"), str) and simple["format"] not in FORMATS:
        del simple["format"]
    if simple.get("uniqueItems") is True and simple.get("maxItems") in (0, 1):
        del simple["uniqueItems"]
    return _without_property_names(simple)


def _simplified_part(key: str, value: Any) -> Any:
    if key in _MAPS and isinstance(value, dict):
        return {name: _simplified(part) for name, part in value.items()}
    if key in _LISTS and isinstance(value, list):
        return [_simplified(part) for part in value]
    return _simplified(value) if key in _SCHEMAS else value


def _without_property_names(schema: dict[str, Any]) -> dict[str, Any]:
    """Replace `propertyNames` by properties if the schema has no others."""
    names = schema.get("propertyNames")
    if not isinstance(names, dict) or "properties" in schema or "patternProperties" in schema:
        return schema
    keywords = names.keys() - {"type", "title", "description"}
    if names.get("type", "string") != "string":
        return schema
    rest = {key: value for key, value in schema.items() if key != "propertyNames"}
    value = rest.pop("additionalProperties", True)
    if keywords == {"pattern"}:
        return rest | {
            "patternProperties": {names["pattern"]: value},
            "additionalProperties": False,
        }
    choices = names.get("enum") if keywords == {"enum"} else None
    if isinstance(choices, list) and all(isinstance(name, str) for name in choices):
        return rest | {"properties": dict.fromkeys(choices, value), "additionalProperties": False}
    return schema
