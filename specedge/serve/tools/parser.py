"""Streaming parser of tool calls in generated text."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specedge.runtime.text.detokenizer import partial_match_length

from .declarations import ToolSet
from .families import ARGS, CALL_ID, HERMES, LLAMA, MISTRAL, CallFamily
from .json_scanner import JsonScanner
from .scanner import CLOSING, CallScanner
from .syntaxes import DECODER, Schemas, call_of, parse_syntax


@dataclass(frozen=True)
class CallDelta:
    """Part of a call, with part of its arguments; only the first part has id and name."""

    index: int
    id: str | None
    name: str | None
    arguments: str


TextOrCall = str | CallDelta
Calls = list[tuple[str, str]]  # (name, arguments as JSON text)


class ToolCallParser:
    """Streaming parser that splits generated text into text and tool calls.

    Under a grammar, a call begins as soon as its name is complete, and its arguments are streamed.
    Otherwise, a call is a single part, emitted after its end; calls that cannot be parsed are text.
    Whitespace around calls is dropped. The parts do not depend on the boundaries of the pieces.
    """

    def __init__(self, tools: ToolSet, family: CallFamily, has_grammar: bool) -> None:
        self._schemas = {function.name: function.parameters for function in tools.callable}
        self._names = list(self._schemas)
        self._family = family
        self._has_grammar = has_grammar and family.pairs is None
        self._max_calls = None if tools.parallel and tools.required_name is None else 1
        self._num_ends = 0  # occurrences of `family.end` in the pending text when last parsed
        self._header = family.header(self._names)
        self._pending = ""  # text that has not been emitted
        self._pending_space = ""  # whitespace before it, dropped if a call follows
        self._has_output = self._after_call = False  # any part so far; the last one was a call
        self._inside = False  # the pending text may be a call
        self._scan: CallScanner | None = None
        self._arguments: JsonScanner | None = None
        self.num_calls = 0

    @property
    def is_complete(self) -> bool:
        """Return True unless the last call is incomplete."""
        return self._arguments is None

    def feed(self, text: str) -> list[TextOrCall]:
        """Append text; return the parts completed by it."""
        self._pending += text
        return list(self._parts(ended=False))

    def end(self) -> list[TextOrCall]:
        """Return the remaining parts at the end of the text."""
        return list(self._parts(ended=True))

    def _parts(self, ended: bool) -> Iterator[TextOrCall]:
        while True:
            if not self._inside:
                yield from self._text(ended)
            if not self._inside:
                return
            if self._has_grammar:
                yield from self._grammar_calls()
                return
            calls = self._calls(ended)
            if calls == []:
                return
            if calls is None:
                # Not a call: emit its first character, since a marker may follow.
                yield from self._emit(self._pending_space + self._pending[:1])
                self._pending, self._inside = self._pending[1:], False
                continue
            for name, arguments in calls:
                if self._max_calls is None or self.num_calls < self._max_calls:
                    yield self._begin_call(name, arguments)

    def _calls(self, ended: bool) -> Calls | None:
        """Take the calls at the start of the pending text.

        Returns:
            The calls; an empty list if more text is needed, None if the text is not a call.
        """
        if self._family.syntax:
            return self._syntax_calls(ended)
        self._scan = self._scan or CallScanner(self._family, self._names, self._begins_calls)
        self._scan.read(self._pending)
        if self._scan.is_possible and not (self._scan.is_complete or ended):
            return []
        result = None
        if self._scan.is_possible:
            result = _parse_calls(self._family, self._pending, self._schemas)
        self._scan = None
        if result is None and self._family.arguments is not None:  # complete calls, then others
            result = _dumped(parse_syntax(_JSON_CALLS, self._pending, self._schemas))
        return self._take_calls(result)

    def _syntax_calls(self, ended: bool) -> Calls | None:
        """Take the calls at the start of the pending text after their end has been read."""
        end = self._family.end
        num_ends = self._pending.count(end) if end else 0
        if not ended and num_ends == self._num_ends:
            return []
        self._num_ends = num_ends
        result = _dumped(parse_syntax(self._family, self._pending, self._schemas))
        if result is None and not ended:
            return []  # `end` may be part of an argument
        return self._take_calls(result)

    def _take_calls(self, result: tuple[Calls, str] | None) -> Calls | None:
        if result is None:
            return None
        calls, self._pending = result
        self._inside, self._num_ends = False, 0
        return calls

    def _begins_calls(self, text: str) -> bool:
        return _parse_calls(self._family, text, self._schemas) is not None

    def _text(self, ended: bool) -> Iterator[TextOrCall]:
        """Yield the pending text before a call, except trailing whitespace."""
        position, is_call = self._find_call(ended)
        text, rest = self._pending[:position], self._pending[position:]
        certain = text.rstrip()
        if ended and not is_call and (certain or not self._after_call):
            certain = text
        blank = text[len(certain) :]
        if is_call:
            self._pending_space, self._pending, self._inside = blank, rest, True
        else:
            self._pending = "" if ended else blank + rest
        yield from self._emit(certain)

    def _find_call(self, ended: bool) -> tuple[int, bool]:
        """Return the position of a call or a partial marker, and True if it is a call."""
        text, family = self._pending, self._family
        if not family.requires_marker and (not self._has_output or self._after_call):
            rest = text.lstrip(" \t\r\n;")
            starts = (family.marker, *(family.alternatives or ("{",)))
            if rest.startswith(starts):
                return len(text) - len(rest), True
            if not ended and any(start.startswith(rest) for start in starts):
                return 0, False
        markers = [m for m in (family.marker, *family.alternatives) if len(m) > 1]
        if not family.requires_marker and not family.syntax:
            markers = []
        positions = [at for marker in markers if (at := text.find(marker)) >= 0]
        if positions:
            return min(positions), True
        num_held = 0 if ended else max((partial_match_length(text, m) for m in markers), default=0)
        return len(text) - num_held, False

    def _emit(self, text: str) -> Iterator[TextOrCall]:
        if text:
            self._has_output, self._after_call = True, False
            yield text

    def _grammar_calls(self) -> Iterator[TextOrCall]:
        """Yield parts of the calls in a text that follows a grammar."""
        while True:
            if self._arguments is None:
                header = self._header.search(self._pending)
                if header is None:
                    return
                self._pending = self._pending[header.end() :]
                self._arguments = JsonScanner()
                yield self._begin_call(header[1], "")
            length = self._arguments.read(self._pending)
            if length:
                yield CallDelta(self.num_calls - 1, None, None, self._pending[:length])
            self._pending = self._pending[length:]
            if not self._arguments.closed:
                return
            self._arguments = None

    def _begin_call(self, name: str, arguments: str) -> CallDelta:
        self.num_calls += 1
        self._has_output = self._after_call = True
        return CallDelta(self.num_calls - 1, f"call_{secrets.token_hex(12)}", name, arguments)


# For complete calls that are followed by a truncated or invalid one.
_JSON_CALLS = CallFamily("JSON", LLAMA, syntax="json")


def _parse_calls(family: CallFamily, text: str, schemas: Schemas) -> tuple[Calls, str] | None:
    """Parse the calls at the start of a text.

    Returns:
        The first call and the remaining text if each call has an end marker, else all calls and "";
        None if the text does not begin with a call.
    """
    try:
        if family.marker == HERMES:
            return _parse_hermes(text, schemas)
        if family.arguments is None:
            calls = list(_parse_marked(text, schemas))
        else:
            value = DECODER.decode(text.removeprefix(family.marker).strip())
            items = value if isinstance(value, list) else [value]
            calls = [_dump(*call_of(item, schemas)) for item in items]
    except (ValueError, RecursionError):
        return None
    return (calls, "") if calls else None


def _parse_hermes(text: str, schemas: Schemas) -> tuple[Calls, str]:
    """Parse one call; its end tag may be missing at the end of the text."""
    start = len(text) - len(text.removeprefix(HERMES).lstrip())
    value, end = DECODER.raw_decode(text, start)
    rest = text[end:].lstrip()
    if rest and not rest.startswith(CLOSING):
        raise ValueError("no call")
    return [_dump(*call_of(value, schemas))], rest.removeprefix(CLOSING)


def _parse_marked(text: str, schemas: Schemas) -> Iterator[tuple[str, str]]:
    """Yield calls whose names and arguments are separated by markers."""
    head = re.compile(
        rf"\s*{re.escape(MISTRAL)}\s*([\w-]+)(?:{re.escape(CALL_ID)}\w*)?{re.escape(ARGS)}\s*"
    )
    at = 0
    while text[at:].strip():
        match = head.match(text, at)
        if match is None:
            raise ValueError("no call")
        value, at = DECODER.raw_decode(text, match.end())
        yield _dump(*call_of({"name": match[1], "arguments": value}, schemas))


def _dumped(
    result: tuple[Sequence[tuple[str, dict[str, Any]]], str] | None,
) -> tuple[Calls, str] | None:
    """Return parsed calls with arguments as JSON text, or None if they cannot be serialized."""
    try:
        return None if result is None else ([_dump(*call) for call in result[0]], result[1])
    except ValueError:
        return None


def _dump(name: str, arguments: dict[str, Any]) -> tuple[str, str]:
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)  # 1e999 is parsed as infinity
    text.encode()  # raises UnicodeEncodeError, a ValueError, for unpaired surrogates
    return name, text
