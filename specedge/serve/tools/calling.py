"""What a bundle's own format of calls means for one request."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from specedge.bundle import Bundle

from ..errors import ApiError
from ..fields import MAX_GRAMMAR
from .declared import Tools
from .families import Family, family_of
from .grammar import grammar_of
from .parsing import Parser

_SHORT_ID = re.compile("[a-zA-Z0-9]{9}")


@dataclass(frozen=True)
class Calling:
    """How a request's messages show calls, what its text follows, and what reads its calls.

    `tools` is None where earlier messages alone have calls. Special tokens that are `shown` mark
    calls in the text.
    """

    family: Family
    tools: Tools | None
    grammar: str | None
    shown: frozenset[int]

    @property
    def facts(self) -> list[dict[str, Any]] | None:
        """The functions as a template takes them."""
        return None if self.tools is None else [one.facts for one in self.tools.functions]

    def messages(self, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages as the template takes them: with its kind of ids."""
        return [self._message(one) for one in given] if self.family.short_ids else given

    def _message(self, given: dict[str, Any]) -> dict[str, Any]:
        found = dict(given)
        if "tool_calls" in given:
            found["tool_calls"] = [
                call | {"id": _short(call["id"])} for call in given["tool_calls"]
            ]
        if "tool_call_id" in given:
            found["tool_call_id"] = _short(given["tool_call_id"])
        return found

    def parser(self) -> Parser:
        """What reads one text."""
        assert self.tools is not None
        return Parser(self.tools, self.family, forced=self.grammar is not None)


def calling_of(bundle: Bundle, tokenizer: Tokenizer, tools: Tools | None, where: str) -> Calling:
    """Of a request; ApiError if the bundle's template is of no family that is known."""
    family = family_of(bundle.chat_template or "")
    if family is None:
        param = where if tools is None else "tools"
        raise ApiError(
            f"{param}: the chat template of {bundle.target.source.id} has no format of calls that "
            "is known here (Hermes and Qwen's, Llama 3's, Mistral's); leave tools and calls out",
            param,
            "unsupported_value",
        )
    added = tokenizer.get_added_tokens_decoder()
    special = {token for token, one in added.items() if one.special}
    ids = {mark: tokenizer.token_to_id(mark) for mark in family.marks}
    tokens = {mark: token for mark, token in ids.items() if token is not None}
    others = sorted(added.keys() - special - {*tokens.values(), *bundle.end_tokens})
    try:
        grammar = None if tools is None else grammar_of(tools, family, tokens, others)
    except RecursionError as error:
        raise ApiError("tools are nested too deeply", "tools", "invalid_value") from error
    if grammar is not None and len(grammar) > MAX_GRAMMAR:
        raise ApiError(
            f"tools must make a grammar of at most {MAX_GRAMMAR} characters, got {len(grammar)}",
            "tools",
            "invalid_value",
        )
    shown = frozenset(tokens.values()) & special if tools is not None else frozenset()
    return Calling(family, tools, grammar, frozenset(shown))


def _short(id_: str) -> str:
    """An id of nine letters and digits: itself, if it is one."""
    return id_ if _SHORT_ID.fullmatch(id_) else hashlib.sha256(id_.encode()).hexdigest()[:9]
