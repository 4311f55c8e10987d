"""Thinking of models: its markers, its parser, and grammars that begin after it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from specedge.runtime.text.grammars import WHITE_SPACE
from specedge.runtime.text.schemas import simplify

MAX_TAIL = 24  # tokens at the end of a prompt in which thinking may begin


@dataclass(frozen=True)
class ReasoningDelta:
    """A part of a text that is thinking."""

    text: str


@dataclass(frozen=True)
class ThinkingFormat:
    """Markers around a model's thinking."""

    opening: str
    closing: str

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the parts of the markers that may be special tokens."""
        return self.opening.partition("thought")[0], self.closing

    def is_open(self, prompt_end: str) -> bool:
        """Return True if a text that follows the end of a prompt begins within thinking."""
        return prompt_end.rstrip().endswith(self.opening.rstrip())

    def is_closed(self, prompt_end: str) -> bool:
        """Return True if the prompt itself ends the thinking."""
        return prompt_end.rstrip().endswith(self.closing)


FORMATS = (
    ThinkingFormat("<|channel>thought\n", "<channel|>"),  # Gemma 4
    ThinkingFormat("[THINK]", "[/THINK]"),  # Magistral
    ThinkingFormat("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A Reasoning
    ThinkingFormat("<think>", "</think>"),
)


def thinking_format_of(template: str, tokenizer: Tokenizer) -> ThinkingFormat | None:
    """Return the format of a model's thinking, None if it has no known one."""
    for thinking in FORMATS:
        opening = thinking.marks[0]
        if opening in template and thinking.closing in template:
            return thinking
        if all(tokenizer.token_to_id(mark) is not None for mark in thinking.marks):
            return thinking
    return None


class ReasoningParser:
    """Splits a text into thinking and the rest, independently of how its pieces are cut.

    Line breaks around the markers belong to neither.
    """

    def __init__(self, thinking: ThinkingFormat, is_open: bool) -> None:
        self._format = thinking
        self._pending = ""
        self._steps = self._inside if is_open else self._start
        self._is_first = True  # no thinking was emitted yet

    @property
    def is_inside(self) -> bool:
        """Return True if the text so far ends within thinking."""
        return self._steps == self._inside

    def feed(self, text: str) -> list[ReasoningDelta | str]:
        """Add more of the text; return the parts that it completes."""
        self._pending += text
        return list(self._parts(is_end=False))

    def end(self) -> list[ReasoningDelta | str]:
        """Return the remaining parts at the end of the text."""
        return list(self._parts(is_end=True))

    def _parts(self, is_end: bool) -> Iterator[ReasoningDelta | str]:
        step = None
        while step != self._steps:  # until a step leaves the state as it is
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
        thought, mark, rest = self._pending.partition(closing)
        if mark:
            self._pending, self._steps = rest, self._after
        else:
            num_held = 0 if is_end else overlap(thought, closing)
            thought, self._pending = _split_at(thought, len(thought) - num_held)
        if self._is_first:
            thought = thought.lstrip("\n")
        if not mark and not is_end:
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


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of a text that begins a mark."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)


def _split_at(text: str, index: int) -> tuple[str, str]:
    return text[:index], text[index:]


def grammar_after_thinking(
    options: Mapping[str, Any], thinking: ThinkingFormat, tokenizer: Tokenizer, is_open: bool
) -> str | None:
    """Return a grammar of thinking, then of the text that the options allow; None if that is free.

    Args:
        options: Options of the pipeline's request.
        thinking: The format of the thinking.
        tokenizer: The tokenizer, which may have tokens for the markers.
        is_open: True if the text begins within thinking; else it may begin with the opening.
    """
    body = lark_rules(options, "body__")
    if body is None:
        return None
    ids = {mark: tokenizer.token_to_id(mark) for mark in (thinking.opening, thinking.closing)}
    opening, closing = (_literal(mark, ids[mark]) for mark in ids)
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
    """Return rules in Lark's syntax, of which `name` is the text that the options allow."""
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
    """Return a pattern as a literal in Lark's syntax."""
    escaped = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", pattern, flags=re.DOTALL)
    return f"/{escaped}/".replace("\n", r"\n")


def _literal(mark: str, token: int | None) -> str:
    return json.dumps(mark, ensure_ascii=False) if token is None else f"<[{token}]>"
