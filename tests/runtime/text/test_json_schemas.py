"""JSON schemas of clients are simplified without another meaning."""

import json

import jsonschema
import llguidance
import pytest

from specedge.runtime.text.schemas import FORMATS, simplify


def is_taken(schema):
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    return not llguidance.LLMatcher.validate_grammar(grammar)


RECORD = {"type": "object", "additionalProperties": {"type": "integer"}}
VALUES = [{}, {"a": 1}, {"ab": 1}, {"b": 2}, {"a": "x"}, {"a": 1, "c": 2}, [], [1], [1, 1], "a", 3]
CASES = [
    {"type": "string", "format": "binary"},
    {"type": "object", "properties": {"format": {"type": "string", "format": "password"}}},
    RECORD | {"propertyNames": {"type": "string"}},
    RECORD | {"propertyNames": {"type": "string", "pattern": "^a+$"}},
    RECORD | {"propertyNames": {"enum": ["a", "b"]}, "required": ["a"]},
    {"type": "array", "items": {"type": "integer"}, "uniqueItems": False},
    {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 1},
    {"anyOf": [{"type": "string", "format": "color"}, {"type": "integer", "not": False}]},
    {"$defs": {"a": {"type": "string", "format": "x"}}, "$ref": "#/$defs/a"},
    {"type": "object", "dependentRequired": {}, "unevaluatedProperties": True},
]


@pytest.mark.parametrize("schema", CASES)
def test_simple_schema_is_compiled_and_allows_the_same_values(schema):
    simple = simplify(schema)
    assert not is_taken(schema)
    assert is_taken(simple)
    for value in VALUES:
        valid = [jsonschema.Draft202012Validator(each).is_valid(value) for each in (schema, simple)]
        assert valid[0] == valid[1], value


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True},
        {"not": {"const": 1}},
        {"if": {"const": 1}, "then": {"type": "integer"}},
        {"contains": {"const": 1}},
        RECORD | {"propertyNames": {"minLength": 2}},
        RECORD | {"properties": {"b": {}}, "propertyNames": {"pattern": "a"}},
    ],
)
def test_semantic_keywords_are_kept(schema):
    assert simplify(schema) == schema
    assert not is_taken(schema)


def test_non_keyword_properties_are_kept():
    schema = {"enum": [{"format": "x"}], "const": {"uniqueItems": False}, "properties": {"not": {}}}
    assert simplify(schema) == schema
    deep = {}
    for _ in range(5000):
        deep = {"items": deep}
    assert simplify(deep) is deep
    assert simplify(True) is True


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_formats_that_are_kept_are_enforced(name):
    assert is_taken({"type": "string", "format": name})
