"""Harmony, the response format of gpt-oss: channels of thinking, text and calls."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator

from tokenizers import Tokenizer

from specedge.runtime.text.detokenizer import partial_match_length

from ..reasoning import ReasoningDelta
from .families import lark_literal
from .parser import CallDelta

SPECIAL_TOKENS = (
    "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>",
)  # fmt: skip
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")


def is_harmony(template: str) -> bool:
    """Return True if a chat template uses harmony."""
    return "<|channel|>" in template and "<|message|>" in template


def final_rules(rules: str, name: str, tokenizer: Tokenizer) -> str:
    """Return Lark rules in which `name` is a message in the final channel.

    Args:
        rules: Rules in which `inner__` is the body of the message.
        name: Name of the new rule.
        tokenizer: Tokenizer with harmony's special tokens.
    """
    header = lark_literal("<|channel|>final<|message|>", _token_ids(tokenizer))
    return f"{name}: {header} inner__\n{rules}"


def after_analysis(rules: str, tokenizer: Tokenizer) -> str:
    """Return a grammar with optional thinking before the rule `body__`."""
    tokens = _token_ids(tokenizer)
    opening = lark_literal("<|channel|>analysis<|message|>", tokens)
    closing = lark_literal("<|end|><|start|>assistant", tokens)
    return f"start: ({opening} THOUGHT__? {closing})? body__\nTHOUGHT__: /(?s:.+)/\n{rules}"


def _token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    ids = {name: tokenizer.token_to_id(name) for name in SPECIAL_TOKENS}
    return {name: token for name, token in ids.items() if token is not None}


class HarmonyParser:
    """Streaming parser that splits harmony text into thinking, text and calls.

    A message consists of a header, `<|message|>`, a body and an end token. The header of the first
    message follows `<|start|>assistant` in the prompt. Text without special tokens is an answer.

    Args:
        names: Names of functions that may be called; other calls are returned as text.
    """

    def __init__(self, names: tuple[str, ...] = ()) -> None:
        self._names = names
        self._pending, self._header = "", ""
        self._part: str | None = None  # "text", "reasoning", "call", or None in a header
        self._num_calls = 0
        self._is_first = True  # no body has begun

    @property
    def is_complete(self) -> bool:
        """Return True unless the last call is incomplete."""
        return self._part != "call"

    @property
    def is_reasoning(self) -> bool:
        """Return True if the current position is within thinking."""
        return self._part == "reasoning"

    def feed(self, text: str) -> list[str | CallDelta | ReasoningDelta]:
        """Append text; return the parts completed by it."""
        self._pending += text
        return list(self._parts(is_end=False))

    def end(self) -> list[str | CallDelta | ReasoningDelta]:
        """Return the remaining parts at the end of the text."""
        parts = list(self._parts(is_end=True))
        if self._is_first and not any(name in self._header for name in SPECIAL_TOKENS):
            parts += [self._header] if self._header else []
        self._part = None if self._part == "call" else self._part
        return parts

    def _parts(self, is_end: bool) -> Iterator[str | CallDelta | ReasoningDelta]:
        while True:
            ends = ("<|message|>",) if self._part is None else _ENDS
            pending = self._pending
            positions = [(at, marker) for marker in ends if (at := pending.find(marker)) >= 0]
            if positions:
                at, marker = min(positions)
            else:
                num_held = 0 if is_end else max(partial_match_length(pending, m) for m in ends)
                at, marker = len(pending) - num_held, ""
            self._pending = pending[at + len(marker) :]
            yield from self._add(pending[:at])
            if not marker:
                return
            if self._part is None:
                yield from self._begin()
            else:
                self._part, self._header = None, ""

    def _begin(self) -> Iterator[CallDelta]:
        """Begin the body after a header."""
        self._is_first = False
        recipient = _RECIPIENT.search(self._header)
        if recipient and recipient[1] in self._names:
            self._part = "call"
            self._num_calls += 1
            id_ = f"call_{secrets.token_hex(12)}"
            yield CallDelta(self._num_calls - 1, id_, recipient[1], "")
            return
        self._part = "reasoning" if "analysis" in self._header else "text"

    def _add(self, text: str) -> Iterator[str | CallDelta | ReasoningDelta]:
        if self._part is None:
            self._header += text
        elif text and self._part == "call":
            yield CallDelta(self._num_calls - 1, None, None, text)
        elif text:
            yield text if self._part == "text" else ReasoningDelta(text)
