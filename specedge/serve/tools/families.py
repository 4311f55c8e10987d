"""Formats of tool calls, detected from the text of the chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

HERMES, LLAMA = "<tool_call>", "<|python_tag|>"
MISTRAL, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
GEMMA_QUOTE = '<|"|>'
_DEEPSEEK = "<｜tool▁calls▁begin｜>"


@dataclass(frozen=True)
class Pairs:
    """Format of arguments as key-value pairs instead of a JSON object.

    Attributes:
        before: Text before a key.
        middle: Text between key and value.
        after: Text after a value.
        between: Text between pairs.
        quote: Delimiter of strings; "" for raw text, None for JSON strings.
    """

    before: str
    middle: str
    after: str = ""
    between: str = ""
    quote: str | None = ""


@dataclass(frozen=True)
class CallFamily:
    """Format of tool calls.

    Calls are written as

        `opening` CALL `between` CALL ... `closing`

    where CALL is

        `before` NAME `middle` ARGUMENTS `after`

    Attributes:
        name: Name of the format.
        marker: Text that delimiters the beginning of calls.
        before: Text before a function's name.
        middle: Text between name and arguments.
        after: Text after the arguments.
        between: Text between calls.
        opening: Text before the first call.
        closing: Text after the last call.
        delimiters: Parts of these texts that may be special tokens.
        arguments: Key of the arguments if a call is a JSON object.
        requires_marker: False if text that begins with a brace or bracket may also be a call.
        parallel: False if grammars allow at most one call.
        short_ids: True if the template accepts only ids of nine alphanumeric characters.
        syntax: Name of the parser in `syntaxes`; "" for JSON objects.
        end: End of calls in that syntax; "" for the end of the text.
        pairs: Format of arguments as key-value pairs.
        is_native: False if the template does not support tools, so that messages describe them.
        alternatives: Further markers, accepted in generated text.
    """

    name: str
    marker: str
    before: str = '{"name": "'
    middle: str = '", "arguments": '
    after: str = "}"
    between: str = ""
    opening: str = ""
    closing: str = ""
    delimiters: tuple[str, ...] = ()
    arguments: str | None = "arguments"
    requires_marker: bool = True
    parallel: bool = True
    short_ids: bool = False
    syntax: str = ""
    end: str = ""
    pairs: Pairs | None = None
    is_native: bool = True
    alternatives: tuple[str, ...] = ()

    def header(self, names: Sequence[str]) -> re.Pattern[str]:
        """Return the pattern of the text before the arguments, as enforced by the grammar."""
        either = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
        middle = re.escape(self.middle).replace(re.escape(_ID), "[a-zA-Z0-9]{9}")
        return re.compile(f"{re.escape(self.before)}({either}){middle}")

    def format_calls(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return the text of calls whose arguments are JSON text; for formats without pairs."""
        middle = self.middle.replace(_ID, "000000000")
        spelled = [f"{self.before}{name}{middle}{text}{self.after}" for name, text in calls]
        return self.opening + self.between.join(spelled) + self.closing


_ID = "\0"  # placeholder of an id in `middle`
_HERMES = CallFamily(
    "Hermes",
    HERMES,
    before=f'{HERMES}\n{{"name": "',
    after="}\n</tool_call>",
    between="\n",
    delimiters=(HERMES, "</tool_call>"),
)
_GENERIC = CallFamily(
    "JSON",
    HERMES,
    between="\n",
    requires_marker=False,
    syntax="json",
    alternatives=("```json", "{", "["),
)
EXPLAINED = replace(_HERMES, name="explained", is_native=False)
_XML = CallFamily(
    "Qwen3-Coder",
    HERMES,
    before=f"{HERMES}\n<function=",
    middle=">\n",
    after="</function>\n</tool_call>",
    between="\n",
    delimiters=(HERMES, "</tool_call>"),
    syntax="xml",
    end="</tool_call>",
    pairs=Pairs("<parameter=", ">\n", "\n</parameter>\n"),
    alternatives=("<function=",),
)
_GLM = CallFamily(
    "GLM 4",
    HERMES,
    before=HERMES,
    middle="\n",
    after="</tool_call>",
    between="\n",
    delimiters=(HERMES, "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    syntax="glm",
    end="</tool_call>",
    pairs=Pairs("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
)
_LFM2 = CallFamily(
    "LFM2",
    "<|tool_call_start|>",
    before="",
    middle="(",
    after=")",
    between=", ",
    opening="<|tool_call_start|>[",
    closing="]<|tool_call_end|>",
    delimiters=("<|tool_call_start|>", "<|tool_call_end|>"),
    syntax="pythonic",
    end="<|tool_call_end|>",
    pairs=Pairs("", "=", between=", ", quote=None),
)
_PYTHONIC = CallFamily(
    "pythonic",
    LLAMA,
    before="",
    middle="(",
    after=")",
    between=", ",
    opening="[",
    closing="]",
    delimiters=(LLAMA,),
    requires_marker=False,
    syntax="pythonic",
    pairs=Pairs("", "=", between=", ", quote=None),
    alternatives=("[",),
)
_GEMMA = CallFamily(
    "Gemma 4",
    "<|tool_call>",
    before="<|tool_call>call:",
    middle="{",
    after="}<tool_call|>",
    delimiters=("<|tool_call>", "<tool_call|>", GEMMA_QUOTE),
    syntax="gemma",
    end="<tool_call|>",
    pairs=Pairs("", ":", between=",", quote=GEMMA_QUOTE),
)
_COMMAND = CallFamily(
    "Command R",
    "<|START_ACTION|>",
    before='{"tool_call_id": "0", "tool_name": "',
    middle='", "parameters": ',
    between=",\n    ",
    opening="<|START_ACTION|>[\n    ",
    closing="\n]<|END_ACTION|>",
    delimiters=("<|START_ACTION|>", "<|END_ACTION|>"),
    arguments="parameters",
    syntax="json",
    end="<|END_ACTION|>",
)
_HARMONY = CallFamily(
    "harmony",
    "<|channel|>commentary to=functions.",
    before="<|channel|>commentary to=functions.",
    middle=" <|constrain|>json<|message|>",
    after="<|call|>",
    delimiters=("<|channel|>", "<|constrain|>", "<|message|>", "<|call|>"),
    arguments=None,
    parallel=False,
    syntax="harmony",
)
_LLAMA = CallFamily(
    "Llama 3",
    LLAMA,
    middle='", "parameters": ',
    delimiters=(LLAMA,),
    arguments="parameters",
    requires_marker=False,
    parallel=False,
)


def family_of(template: str, token_names: Sequence[str] = ()) -> CallFamily:
    """Return the call format of a chat template.

    For templates without tools, it is that of Hermes, which is described in messages. For templates
    with tools in an unknown format, it is detected from the tokenizer's added tokens, and defaults
    to JSON objects.
    """
    family = _family_of_text(template)
    if family is _GENERIC and token_names:
        return _family_of_text("tools " + " ".join(token_names))
    return family


def _family_of_text(template: str) -> CallFamily:
    if not re.search(r"\btools\b", template):
        return EXPLAINED
    if "<|channel|>" in template and "<|message|>" in template:
        return _HARMONY
    if MISTRAL in template:
        return _mistral(template)
    if _DEEPSEEK in template:
        return _deepseek(template)
    families = {
        "<|tool_call>": _GEMMA,
        "<function=": _XML,
        "<arg_key>": _GLM,
        "<|tool_call_start|>": _LFM2,
        "<|START_ACTION|>": _COMMAND,
        "<|tool_call|>": _listed("<|/tool_call|>" if "<|/tool_call|>" in template else ""),
        HERMES: _HERMES,
    }
    family = next((family for marker, family in families.items() if marker in template), None)
    if family is not None:
        return family
    if "<|start_header_id|>" in template and '"parameters": ' in template:
        return _LLAMA
    return _PYTHONIC if re.search(r"\[func_name1\(", template) else _GENERIC


def _mistral(template: str) -> CallFamily:
    short = re.search(r"length\s*!=\s*9", template) is not None
    if ARGS in template:
        return CallFamily(
            "Mistral",
            MISTRAL,
            before=MISTRAL,
            middle=f"{CALL_ID}{_ID}{ARGS}" if CALL_ID in template else ARGS,
            after="",
            delimiters=(MISTRAL, CALL_ID, ARGS),
            arguments=None,
            short_ids=short,
        )
    space = " " if f"{MISTRAL} [" in template else ""
    return CallFamily(
        "Mistral",
        MISTRAL,
        between=", ",
        opening=f"{MISTRAL}{space}[",
        closing="]",
        delimiters=(MISTRAL,),
        short_ids=short,
    )


def _listed(end: str) -> CallFamily:
    """Return the format of Granite 3 and Phi-4-mini, whose calls are a list of JSON objects."""
    return CallFamily(
        "Phi-4-mini" if end else "Granite 3",
        "<|tool_call|>",
        between=", ",
        opening="<|tool_call|>[",
        closing=f"]{end}",
        delimiters=("<|tool_call|>", *([end] if end else [])),
        syntax="json",
        end=end,
    )


def _deepseek(template: str) -> CallFamily:
    begin, call_end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    separator, end = "<｜tool▁sep｜>", "<｜tool▁calls▁end｜>"
    is_fenced = "```json" in template  # V3 and R1; calls of V3.1 begin with the name
    return CallFamily(
        "DeepSeek V3" if is_fenced else "DeepSeek V3.1",
        _DEEPSEEK,
        before=f"{begin}function{separator}" if is_fenced else begin,
        middle="\n```json\n" if is_fenced else separator,
        after=f"\n```{call_end}" if is_fenced else call_end,
        between="\n" if is_fenced else "",
        opening=_DEEPSEEK,
        closing=end,
        delimiters=(_DEEPSEEK, begin, call_end, separator, end),
        arguments=None,
        syntax="deepseek",
        end=end,
    )


def lark_literal(text: str, tokens: dict[str, int]) -> str:
    """Return a text as a Lark literal, with token ids for the delimiters in `tokens`."""
    cuts = "|".join(map(re.escape, (*tokens, _ID)))
    return " ".join(_piece(piece, tokens) for piece in re.split(f"({cuts})", text) if piece)


def _piece(text: str, tokens: dict[str, int]) -> str:
    if text == _ID:
        return "/[a-zA-Z0-9]{9}/"
    return f"<[{tokens[text]}]>" if text in tokens else json.dumps(text, ensure_ascii=False)
