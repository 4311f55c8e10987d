"""Twenty typical JSON schemas, with and without whitespace."""

_TEXT = {"type": "string", "maxLength": 12}
_NUMBER = {"type": "integer", "minimum": 0, "maximum": 9999}


def _object(required=None, **properties):
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


PLAIN = [
    _object(name=_TEXT, age=_NUMBER),
    _object(["name"], name=_TEXT, age=_NUMBER, email=_TEXT),
    _object(label={"enum": ["positive", "negative", "neutral"]}),
    _object(label={"enum": ["spam", "ham"]}, score={"type": "number"}),
    _object(done={"type": "boolean"}, note={"anyOf": [_TEXT, {"type": "null"}]}),
    _object(tags={"type": "array", "items": {"enum": ["a", "b", "cd"]}, "maxItems": 3}),
    _object(pair={"type": "array", "prefixItems": [_TEXT, _NUMBER], "items": False, "minItems": 2}),
    _object(inner=_object(inner=_object(value=_NUMBER))),
    _object(date={"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"}),
    _object(when={"type": "string", "format": "date"}),
    _object(id={"type": "string", "format": "uuid"}),
    _object(kind={"const": "point"}, x={"type": "number"}, y={"type": "number"}),
    {"type": "array", "items": _object(word=_TEXT, count=_NUMBER), "minItems": 1, "maxItems": 3},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    {"anyOf": [_object(circle=_NUMBER), _object(square=_NUMBER, side=_TEXT)]},
    {"enum": ["one", 2, [3], {"four": 4}, None]},
    {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
    {"$defs": {"one": _object(n=_NUMBER)}, **_object(left={"$ref": "#/$defs/one"})},
    {
        "$defs": {"node": _object(["n"], n=_NUMBER, next={"$ref": "#/$defs/node"})},
        "$ref": "#/$defs/node",
    },
    {"type": ["string", "integer", "null"], "maxLength": 6},
]
SCHEMAS = [one | {"x-guidance": {"whitespace_flexible": False}} for one in PLAIN]
