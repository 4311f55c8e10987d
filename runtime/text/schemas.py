"""Simplification of JSON schemas to the keywords that llguidance takes, without another meaning."""

from __future__ import annotations

from typing import Any

# Others are annotations by the standard.
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_SCHEMAS = (
    "items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
# Values with which a keyword allows everything.
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
    """Return a schema for the same values without keywords that can be written otherwise.

    Formats that are annotations, and keywords with values that allow everything, are left out.
    Names of properties by pattern or enumeration become properties.
    """
    try:
        return _simplified(schema)
    except RecursionError:  # llguidance refuses it
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
    """Return a schema with properties instead of `propertyNames`, if there are no others."""
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
