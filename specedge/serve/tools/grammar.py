"""Grammars of texts with tool calls, in Lark syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from specedge.runtime.text.schemas import simplify

from .declarations import FunctionTool, ToolSet
from .families import CallFamily, Pairs, lark_literal

# Whitespace of arguments as in templates; settings in a function's schema take precedence.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def grammar_of(
    tools: ToolSet,
    family: CallFamily,
    tokens: dict[str, int],
    other_tokens: Sequence[int] = (),
    text_rules: str | None = None,
) -> str | None:
    """Return the grammar of a text, or None if it is unconstrained.

    If a call is required, the grammar allows calls only. If calls are optional and a function is
    strict, it allows any text without the family's marker, followed by calls.

    Args:
        tools: Functions of the request.
        family: Format of calls.
        tokens: Token ids of the family's delimiters that are special tokens.
        other_tokens: Added tokens that are allowed in free text; llguidance's regular expressions
            do not match them.
        text_rules: Rules of text without calls; the first one is named `text__`.
    """
    calls = _calls(tools, family, tokens)
    if tools.is_call_required:
        return "\n".join(["start: calls", *calls])
    if text_rules is not None:
        return "\n".join(["start: text__ | calls", text_rules, *calls])
    if not any(f.strict for f in tools.functions):
        return None
    marker, rules, num_read = re.escape(family.marker), [], 0
    other = f"<[{','.join(map(str, other_tokens))}]>" if other_tokens else None
    if not family.requires_marker:
        text = rf"/[^{{\[\s](?s:.*)/ & ~/{marker}(?s:.*)/"
        more = f"({other} MORE?)*" if other else ""
        start = f"start: TEXT? {more} | {lark_literal(family.marker, tokens)}? calls"
        rules = ["MORE: /(?s:.+)/"] if other else []
    else:
        text = f"/(?s:.*)/ & ~/(?s:.*){marker}(?s:.*)/"
        start = f"start: (TEXT? {other})* " if other else "start: "
        if family.marker in tokens:
            start += "TEXT? calls?"
        else:
            start += "(TEXT? | to_calls calls)"
            rules, num_read = [f"to_calls[lazy]: /(?s:.*){marker}/"], len(family.marker)
    return "\n".join([start, f"TEXT: {text}", *rules, *_calls(tools, family, tokens, num_read)])


def _calls(
    tools: ToolSet, family: CallFamily, tokens: dict[str, int], num_read: int = 0
) -> list[str]:
    """Return the rules of the calls, without the first `num_read` characters."""

    def call(lead: str) -> str:
        return " | ".join(
            f"{lark_literal(lead + function.name + family.middle, tokens)} arguments_{i} "
            f"{lark_literal(family.after, tokens)}"
            for i, function in enumerate(tools.callable)
        )

    several = tools.parallel and family.parallel and tools.required_name is None
    more = f"({lark_literal(family.between, tokens)} call)*" if several else ""
    rules = [f"calls: first {more} {lark_literal(family.closing, tokens)}"]
    rules += [f"first: {call((family.opening + family.before)[num_read:])}"]
    rules += [f"call: {call(family.before)}"] if several else []
    for i, function in enumerate(tools.callable):
        if family.pairs is None:
            rules.append(f"arguments_{i}: %json {_schema(function, tools.is_call_required)}")
        else:
            schema = simplify(function.parameters)
            rules += _pair_rules(f"arguments_{i}", schema, family.pairs, tokens)
    return rules


def _pair_rules(
    name: str, schema: Mapping[str, Any], pairs: Pairs, tokens: dict[str, int]
) -> list[str]:
    """Return the rules of arguments as key-value pairs."""
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    required = schema.get("required", [])
    keys = sorted(properties, key=lambda key: key not in required)
    rules, items = [], []
    for i, key in enumerate(keys):
        value = f"{name}_{i}"
        before = lark_literal(pairs.before + key + pairs.middle, tokens)
        after = lark_literal(pairs.after, tokens)
        items.append(f"{before} {value} {after}".strip())
        rules += _value_rules(value, properties[key], schema, pairs, tokens)
    between = lark_literal(pairs.between, tokens)
    tail = ""  # optional pairs, in order
    num_required = sum(key in required for key in keys)
    for i in range(len(items) - 1, num_required - 1, -1):
        separator = f"{between} " if i else ""
        tail = f"({separator}{items[i]} {tail})?".replace("  ", " ")
    body = f" {between} ".join(items[:num_required])
    return [f"{name}: {body} {tail}".rstrip(), *rules]


def _value_rules(
    name: str,
    value: Any,
    schema: Mapping[str, Any],
    pairs: Pairs,
    tokens: dict[str, int],
) -> list[str]:
    """Return the rules of a value: raw or quoted text for strings, else JSON."""
    declared = value if isinstance(value, dict) else {}
    choices = declared.get("enum")
    is_string = declared.get("type") == "string" or (
        isinstance(choices, list) and all(isinstance(choice, str) for choice in choices)
    )
    if not is_string or pairs.quote is None:
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        return [f"{name}: %json {json.dumps(declared | definitions, ensure_ascii=False)}"]
    quote = lark_literal(pairs.quote, tokens)
    if isinstance(choices, list):
        literals = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
        return [f"{name}: {quote} ({literals}) {quote}"]
    # Text up to "<", which begins the tag or delimiter after it.
    text = f"{name.upper()}: /[^<]+/"
    return [f"{name}: {quote} {name.upper()}? {quote}", text]


def _schema(function: FunctionTool, is_required: bool) -> str:
    """Return the JSON schema of the arguments; any object if it is not to be enforced."""
    is_free = not (is_required or function.strict)
    schema = {"type": "object"} if is_free else simplify(function.parameters)
    settings = schema.get("x-guidance")
    schema = schema | {"x-guidance": _SPACING | (settings if isinstance(settings, dict) else {})}
    return json.dumps(schema, ensure_ascii=False)
