"""The formats in which models write calls, each known by the text of its chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

HERMES, LLAMA = "<tool_call>", "<|python_tag|>"
MISTRAL, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


@dataclass(frozen=True)
class Family:
    """How calls look. A `marker` begins them; what follows it is, for one call of a function,

        `before` NAME `middle` ARGUMENTS `after`

    with `between` two calls, after `opening` and before `closing` of all. Marks in the texts may
    be special tokens. Where not `marked`, a text that begins with a brace is a call, too; where not
    `parallel`, there is one at most. `arguments` is the member of the object that holds them, if a
    call is an object. Where `short_ids`, the template takes ids of nine letters and digits alone.
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
        """What stands before a call's arguments, where a grammar wrote it."""
        either = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
        middle = re.escape(self.middle).replace(re.escape(_ID), "[a-zA-Z0-9]{9}")
        return re.compile(f"{re.escape(self.before)}({either}){middle}")


_ID = "\0"  # where a grammar writes an id
_OBJECT = '{"name": "'


def family_of(template: str) -> Family | None:
    """The family of a chat template, None where it is of none that is known here."""
    if not re.search(r"\btools\b", template):
        return None
    if MISTRAL in template:
        return _mistral(template)
    if HERMES in template and not re.search("<function=|<arg_key>", template):
        return Family(
            "Hermes",
            HERMES,
            before=f"{HERMES}\n{_OBJECT}",
            middle='", "arguments": ',
            after="}\n</tool_call>",
            between="\n",
            marks=(HERMES, "</tool_call>"),
        )
    if "<|start_header_id|>" in template and '"parameters": ' in template:
        return Family(
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


def _mistral(template: str) -> Family:
    short = re.search(r"length\s*!=\s*9", template) is not None
    if ARGS in template:
        middle = f"{CALL_ID}{_ID}{ARGS}" if CALL_ID in template else ARGS
        marks = (MISTRAL, CALL_ID, ARGS)
        return Family(
            "Mistral", MISTRAL, MISTRAL, middle, "", marks=marks, arguments=None, short_ids=short
        )
    space = " " if f"{MISTRAL} [" in template else ""
    return Family(
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


def in_lark(text: str, tokens: dict[str, int]) -> str:
    """A text as a grammar in Lark's syntax has it, with `tokens` for the marks that are one."""
    cuts = "|".join(map(re.escape, (*tokens, _ID)))
    return " ".join(_piece(piece, tokens) for piece in re.split(f"({cuts})", text) if piece)


def _piece(text: str, tokens: dict[str, int]) -> str:
    if text == _ID:
        return "/[a-zA-Z0-9]{9}/"
    return f"<[{tokens[text]}]>" if text in tokens else json.dumps(text, ensure_ascii=False)
