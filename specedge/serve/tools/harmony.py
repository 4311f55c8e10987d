"""Parser of harmony, the response format of gpt-oss: channels of thinking, text and calls."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator

from tokenizers import Tokenizer

from ..reasoning import ReasoningDelta, overlap
from .families import lark_literal
from .parser import CallDelta

MARKS = (
    "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>",
)  # fmt: skip
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")


def is_harmony(template: str) -> bool:
    """Return True if a chat template writes harmony."""
    return "<|channel|>" in template and "<|message|>" in template


def final_rules(rules: str, name: str, tokenizer: Tokenizer) -> str:
    """Return rules of which `name` is a text in the final channel.

    Args:
        rules: Rules of which `inner__` is the text itself.
        name: Name of the rule.
        tokenizer: The tokenizer with the marks.
    """
    header = lark_literal("<|channel|>final<|message|>", _mark_tokens(tokenizer))
    return f"{name}: {header} inner__\n{rules}"


def after_analysis(rules: str, tokenizer: Tokenizer) -> str:
    """Return the grammar of optional thinking before `body__` of some rules."""
    tokens = _mark_tokens(tokenizer)
    opening = lark_literal("<|channel|>analysis<|message|>", tokens)
    closing = lark_literal("<|end|><|start|>assistant", tokens)
    return f"start: ({opening} THOUGHT__? {closing})? body__\nTHOUGHT__: /(?s:.+)/\n{rules}"


def _mark_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    ids = {mark: tokenizer.token_to_id(mark) for mark in MARKS}
    return {mark: token for mark, token in ids.items() if token is not None}


class HarmonyParser:
    """Splits a text in harmony into thinking, text and calls, however its pieces are cut.

    A message is a header, `<|message|>`, a body and an end mark. The header of the first message
    begins behind the prompt's `<|start|>assistant`. Text without any mark is an answer.

    Args:
        names: Functions that may be called; calls of others are text.
    """

    def __init__(self, names: tuple[str, ...] = ()) -> None:
        self._names = names
        self._pending, self._header = "", ""
        self._kind: str | None = None  # of the body: "text", "reasoning" or "call"; None: a header
        self._num_calls = 0
        self._is_first = True  # no body has begun

    @property
    def is_complete(self) -> bool:
        """Return True if the last call has all of its arguments."""
        return self._kind != "call"

    @property
    def is_reasoning(self) -> bool:
        """Return True if the text so far ends within thinking."""
        return self._kind == "reasoning"

    def feed(self, text: str) -> list[str | CallDelta | ReasoningDelta]:
        """Add more of the text; return the parts that it completes."""
        self._pending += text
        return list(self._parts(is_end=False))

    def end(self) -> list[str | CallDelta | ReasoningDelta]:
        """Return the remaining parts at the end of the text, which is no longer within a call."""
        parts = list(self._parts(is_end=True))
        if self._is_first and not any(mark in self._header for mark in MARKS):
            parts += [self._header] if self._header else []
        self._kind = None if self._kind == "call" else self._kind
        return parts

    def _parts(self, is_end: bool) -> Iterator[str | CallDelta | ReasoningDelta]:
        while True:
            ends = ("<|message|>",) if self._kind is None else _ENDS
            positions = [(at, mark) for mark in ends if (at := self._pending.find(mark)) >= 0]
            if positions:
                at, mark = min(positions)
                text, self._pending = self._pending[:at], self._pending[at + len(mark) :]
            else:
                num_held = 0 if is_end else max(overlap(self._pending, mark) for mark in ends)
                cut = len(self._pending) - num_held
                text, mark = self._pending[:cut], ""
                self._pending = self._pending[cut:]
            yield from self._add(text)
            if not mark:
                return
            if self._kind is None:
                yield from self._begin()
            else:
                self._kind, self._header = None, ""

    def _begin(self) -> Iterator[CallDelta]:
        """Begin the body behind a header."""
        self._is_first = False
        recipient = _RECIPIENT.search(self._header)
        if recipient and recipient[1] in self._names:
            self._kind = "call"
            self._num_calls += 1
            id_ = f"call_{secrets.token_hex(12)}"
            yield CallDelta(self._num_calls - 1, id_, recipient[1], "")
            return
        self._kind = "reasoning" if "analysis" in self._header else "text"

    def _add(self, text: str) -> Iterator[str | CallDelta | ReasoningDelta]:
        if self._kind is None:
            self._header += text
        elif text and self._kind == "call":
            yield CallDelta(self._num_calls - 1, None, None, text)
        elif text:
            yield text if self._kind == "text" else ReasoningDelta(text)
