"""Formats of tool calls, recognized by the text of the chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

HERMES, LLAMA = "<tool_call>", "<|python_tag|>"
MISTRAL, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


@dataclass(frozen=True)
class CallFamily:
    """A format of calls.

    A `marker` begins the calls. One call of a function is

        `before` NAME `middle` ARGUMENTS `after`

    with `between` two calls, after `opening` and before `closing` of all.

    Attributes:
        name: Name of the format.
        marker: Text that begins the calls.
        before: Text before a function's name.
        middle: Text between name and arguments.
        after: Text after the arguments.
        between: Text between two calls.
        opening: Text before the first call.
        closing: Text after the last call.
        marks: Parts of these texts that may be special tokens.
        arguments: Key of the arguments if a call is an object.
        marked: False if a text that begins with a brace is a call, too.
        parallel: False if there is at most one call.
        short_ids: True if the template takes only ids of nine letters and digits.
    """

    name: str
    marker: str
    before: str
    middle: str
    after: str
    between: str = ""
    opening: str = ""
    closing: str = ""
    marks: tuple[str, ...] = ()
    arguments: str | None = "arguments"
    marked: bool = True
    parallel: bool = True
    short_ids: bool = False

    def header(self, names: Sequence[str]) -> re.Pattern[str]:
        """Return the pattern of the text before a call's arguments, as a grammar writes it."""
        either = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
        middle = re.escape(self.middle).replace(re.escape(_ID), "[a-zA-Z0-9]{9}")
        return re.compile(f"{re.escape(self.before)}({either}){middle}")


_ID = "\0"  # stands for an id in `middle`
_OBJECT = '{"name": "'


def family_of(template: str) -> CallFamily | None:
    """Return the call format of a chat template, None if it has no supported one."""
    if not re.search(r"\btools\b", template):
        return None
    if MISTRAL in template:
        return _mistral(template)
    if HERMES in template and not re.search("<function=|<arg_key>", template):
        return CallFamily(
            "Hermes",
            HERMES,
            before=f"{HERMES}\n{_OBJECT}",
            middle='", "arguments": ',
            after="}\n</tool_call>",
            between="\n",
            marks=(HERMES, "</tool_call>"),
        )
    if "<|start_header_id|>" in template and '"parameters": ' in template:
        return CallFamily(
            "Llama 3",
            LLAMA,
            before=_OBJECT,
            middle='", "parameters": ',
            after="}",
            marks=(LLAMA,),
            arguments="parameters",
            marked=False,
            parallel=False,
        )
    return None


def _mistral(template: str) -> CallFamily:
    short = re.search(r"length\s*!=\s*9", template) is not None
    if ARGS in template:
        middle = f"{CALL_ID}{_ID}{ARGS}" if CALL_ID in template else ARGS
        marks = (MISTRAL, CALL_ID, ARGS)
        return CallFamily(
            "Mistral", MISTRAL, MISTRAL, middle, "", marks=marks, arguments=None, short_ids=short
        )
    space = " " if f"{MISTRAL} [" in template else ""
    return CallFamily(
        "Mistral",
        MISTRAL,
        before=_OBJECT,
        middle='", "arguments": ',
        after="}",
        between=", ",
        opening=f"{MISTRAL}{space}[",
        closing="]",
        marks=(MISTRAL,),
        short_ids=short,
    )


def lark_literal(text: str, tokens: dict[str, int]) -> str:
    """Return a text in Lark's syntax, with token ids for the marks in `tokens`."""
    cuts = "|".join(map(re.escape, (*tokens, _ID)))
    return " ".join(_piece(piece, tokens) for piece in re.split(f"({cuts})", text) if piece)


def _piece(text: str, tokens: dict[str, int]) -> str:
    if text == _ID:
        return "/[a-zA-Z0-9]{9}/"
    return f"<[{tokens[text]}]>" if text in tokens else json.dumps(text, ensure_ascii=False)
