"""Thinking of reasoning models: markers, parser, and grammars that apply after the thinking."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from specedge.runtime.text.detokenizer import partial_match_length
from specedge.runtime.text.grammars import WHITE_SPACE
from specedge.runtime.text.schemas import simplify

MAX_TAIL = 24  # tokens at the end of a prompt in which thinking may begin


@dataclass(frozen=True)
class ReasoningDelta:
    """Part of a text that is thinking."""

    text: str


@dataclass(frozen=True)
class ThinkingFormat:
    """Markers around a model's thinking."""

    opening: str
    closing: str

    @property
    def delimiters(self) -> tuple[str, ...]:
        """Return the delimiters, which may be special tokens."""
        return self.opening.partition("thought")[0], self.closing

    def is_open(self, prompt_end: str) -> bool:
        """Return True if the prompt ends within thinking."""
        return prompt_end.rstrip().endswith(self.opening.rstrip())

    def is_closed(self, prompt_end: str) -> bool:
        """Return True if the prompt ends with a closing marker, which disables thinking."""
        return prompt_end.rstrip().endswith(self.closing)


FORMATS = (
    ThinkingFormat("<|channel>thought\n", "<channel|>"),  # Gemma 4
    ThinkingFormat("[THINK]", "[/THINK]"),  # Magistral
    ThinkingFormat("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A Reasoning
    ThinkingFormat("<think>", "</think>"),
)


def thinking_format_of(template: str, tokenizer: Tokenizer) -> ThinkingFormat | None:
    """Return the thinking format of a model, or None if it is not known to support thinking."""
    for thinking in FORMATS:
        opening = thinking.delimiters[0]
        if opening in template and thinking.closing in template:
            return thinking
        if all(tokenizer.token_to_id(text) is not None for text in thinking.delimiters):
            return thinking
    return None


class ReasoningParser:
    """Streaming parser that splits a text into thinking and the rest.

    The parts do not depend on the boundaries of the pieces. Line breaks around markers are dropped.
    """

    def __init__(self, thinking: ThinkingFormat, is_open: bool) -> None:
        self._format = thinking
        self._pending = ""
        self._steps = self._inside if is_open else self._start
        self._is_first = True  # no thinking has been emitted

    @property
    def is_inside(self) -> bool:
        """Return True if the current position is within thinking."""
        return self._steps == self._inside

    def feed(self, text: str) -> list[ReasoningDelta | str]:
        """Append text; return the parts completed by it."""
        self._pending += text
        return list(self._parts(is_end=False))

    def end(self) -> list[ReasoningDelta | str]:
        """Return the remaining parts at the end of the text."""
        return list(self._parts(is_end=True))

    def _parts(self, is_end: bool) -> Iterator[ReasoningDelta | str]:
        step = None
        while step != self._steps:  # until the state does not change
            step = self._steps
            yield from step(is_end)

    def _start(self, is_end: bool) -> Iterator[ReasoningDelta | str]:
        text, opening = self._pending.lstrip(), self._format.opening
        if text.startswith(opening):
            self._pending, self._steps = text[len(opening) :], self._inside
        elif is_end or not opening.startswith(text):
            self._steps = self._outside
        yield from ()

    def _inside(self, is_end: bool) -> Iterator[ReasoningDelta | str]:
        closing = self._format.closing
        thought, marker, rest = self._pending.partition(closing)
        if marker:
            self._pending, self._steps = rest, self._after
        else:
            num_held = 0 if is_end else partial_match_length(thought, closing)
            at = len(thought) - num_held
            thought, self._pending = thought[:at], thought[at:]
        if self._is_first:
            thought = thought.lstrip("\n")
        if not marker and not is_end:
            kept = thought.rstrip("\n")
            self._pending, thought = thought[len(kept) :] + self._pending, kept
        else:
            thought = thought.rstrip("\n")
        if thought:
            self._is_first = False
            yield ReasoningDelta(thought)

    def _after(self, is_end: bool) -> Iterator[ReasoningDelta | str]:
        self._pending = self._pending.lstrip("\n")
        if self._pending:
            self._steps = self._outside
        yield from ()

    def _outside(self, is_end: bool) -> Iterator[ReasoningDelta | str]:
        text, self._pending = self._pending, ""
        if text:
            yield text


def grammar_after_thinking(
    options: Mapping[str, Any], thinking: ThinkingFormat, tokenizer: Tokenizer, is_open: bool
) -> str | None:
    """Return a grammar that applies the options' grammar after the thinking.

    Args:
        options: Pipeline options of the request.
        thinking: Thinking format of the model.
        tokenizer: Tokenizer, which may have tokens for the markers.
        is_open: True if the text begins within thinking; else thinking is optional.

    Returns:
        The grammar in Lark syntax; None if the options have no grammar.
    """
    body = lark_rules(options, "body__")
    if body is None:
        return None
    ids = {text: tokenizer.token_to_id(text) for text in (thinking.opening, thinking.closing)}
    opening, closing = (_literal(text, token) for text, token in ids.items())
    added = sorted({*tokenizer.get_added_tokens_decoder()} - {ids[thinking.closing]})
    if ids[thinking.closing] is None:
        rules = [f"thinking__[lazy]: {_regex('(?s:.*)' + re.escape(thinking.closing))}"]
    else:
        other = f" (<[{','.join(map(str, added))}]> THOUGHT__?)*" if added else ""
        rules = [f"thinking__: THOUGHT__?{other} {closing}", "THOUGHT__: /(?s:.+)/"]
    thought = "thinking__ SPACE__? body__"
    start = thought if is_open else f"body__ | {opening} {thought}"
    return "\n".join([f"start: {start}", *rules, r"SPACE__: /\s{1,4}/", body])


def lark_rules(options: Mapping[str, Any], name: str) -> str | None:
    """Return the options' grammar as Lark rules with the start rule `name`, or None."""
    if (schema := options.get("json_schema")) is not None:
        value = simplify(json.loads(schema) if isinstance(schema, str) else dict(schema))
        if "x-guidance" not in value:
            value["x-guidance"] = {"whitespace_pattern": WHITE_SPACE}
        return f"{name}: %json {json.dumps(value, ensure_ascii=False)}"
    if (regex := options.get("regex")) is not None:
        return f"{name}: {_regex(regex)}"
    if (grammar := options.get("grammar")) is not None:
        return re.sub(r"(?m)^start\b", name, str(grammar))
    return None


def _regex(pattern: str) -> str:
    """Return a regular expression in Lark syntax."""
    escaped = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", pattern, flags=re.DOTALL)
    return f"/{escaped}/".replace("\n", r"\n")


def _literal(text: str, token: int | None) -> str:
    return json.dumps(text, ensure_ascii=False) if token is None else f"<[{token}]>"
