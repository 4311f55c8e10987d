"""The grammar of a text that calls functions, in Lark's syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from .declared import Function, Tools
from .families import Family, in_lark

# Arguments are spaced as templates write them; what a function says itself goes before.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def grammar_of(
    tools: Tools, family: Family, tokens: dict[str, int], others: Sequence[int] = ()
) -> str | None:
    """What a text must follow, None if nothing. `tokens` are the family's marks that are one.

    Where a call is wanted, calls alone. Where the model may choose and a function is strict, any
    text without the family's marker, and after it calls alone. `others` are added tokens that such
    a text may have, which llguidance takes for no text.
    """
    if tools.wanted:
        return "\n".join(["start: calls", *_calls(tools, family, tokens)])
    if not any(one.strict for one in tools.functions):
        return None
    marker, rules, read = re.escape(family.marker), [], 0
    other = f"<[{','.join(map(str, others))}]>" if others else None
    if not family.marked:
        text = rf"/[^{{\s](?s:.*)/ & ~/{marker}(?s:.*)/"
        more = f"({other} MORE?)*" if other else ""
        start = f"start: TEXT? {more} | {in_lark(family.marker, tokens)}? calls"
        rules = ["MORE: /(?s:.+)/"] if other else []
    else:
        text = f"/(?s:.*)/ & ~/(?s:.*){marker}(?s:.*)/"
        start = f"start: (TEXT? {other})* " if other else "start: "
        if family.marker in tokens:
            start += "TEXT? calls?"
        else:
            start += "(TEXT? | to_calls calls)"
            rules, read = [f"to_calls[lazy]: /(?s:.*){marker}/"], len(family.marker)
    return "\n".join([start, f"TEXT: {text}", *rules, *_calls(tools, family, tokens, read)])


def _calls(tools: Tools, family: Family, tokens: dict[str, int], read: int = 0) -> list[str]:
    """The rules of one call, or one and more, of whose text so many characters are read."""

    def call(lead: str) -> str:
        return " | ".join(
            f"{in_lark(lead + one.name + family.middle, tokens)} arguments_{i} "
            f"{in_lark(family.after, tokens)}"
            for i, one in enumerate(tools.callable)
        )

    several = tools.parallel and family.parallel and tools.named is None
    more = f"({in_lark(family.between, tokens)} call)*" if several else ""
    rules = [f"calls: first {more} {in_lark(family.closing, tokens)}"]
    rules += [f"first: {call((family.opening + family.before)[read:])}"]
    rules += [f"call: {call(family.before)}"] if several else []
    return rules + [
        f"arguments_{i}: %json {json.dumps(_schema(one, tools.wanted), ensure_ascii=False)}"
        for i, one in enumerate(tools.callable)
    ]


def _schema(function: Function, wanted: bool) -> dict[str, Any]:
    """What a function's arguments follow: any object, where the model chose it and may."""
    schema = function.parameters if wanted or function.strict else {"type": "object"}
    given = schema.get("x-guidance")
    return schema | {"x-guidance": _SPACING | (given if isinstance(given, dict) else {})}
