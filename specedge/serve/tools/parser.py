"""Streaming parser of tool calls in generated text."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .declarations import ToolSet
from .families import ARGS, CALL_ID, HERMES, LLAMA, MISTRAL, CallFamily
from .scanner import CLOSING, CallScanner
from .syntaxes import DECODER, Schemas, call_of, parse_syntax


@dataclass(frozen=True)
class CallDelta:
    """A part of a call: more of its arguments; the first part has its id and its name, too."""

    index: int
    id: str | None
    name: str | None
    arguments: str


TextOrCall = str | CallDelta
Calls = list[tuple[str, str]]  # names, and arguments as JSON


class ToolCallParser:
    """Splits a text into parts of text and of calls, independently of how its pieces are cut.

    In a text that follows a grammar, a call begins as soon as its name is complete, and its
    arguments are streamed. In any other text a call is one part, once its end is read; a call that
    does not parse is text. White space around a call is dropped.
    """

    def __init__(self, tools: ToolSet, family: CallFamily, has_grammar: bool) -> None:
        self._schemas = {function.name: function.parameters for function in tools.callable}
        self._names = list(self._schemas)
        self._family = family
        self._has_grammar = has_grammar and family.pairs is None
        self._max_calls = None if tools.parallel and tools.required_name is None else 1
        self._num_ends = 0  # texts of the family's end among the pending text, as parsed last
        self._header = family.header(self._names)
        self._pending = ""  # text that is not emitted yet
        self._pending_space = ""  # white space before it, dropped if a call follows
        self._has_output = self._after_call = False  # parts so far; the last was a call
        self._inside = False  # pending text begins with a marker or follows one
        self._scan: CallScanner | None = None
        self._arguments: _Arguments | None = None
        self.num_calls = 0

    @property
    def is_complete(self) -> bool:
        """Return True if the last call has all of its arguments."""
        return self._arguments is None

    def feed(self, text: str) -> list[TextOrCall]:
        """Add more of the text; return the parts that it completes."""
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
                # Not a call: its first character is text, and another marker may follow.
                yield from self._emit(self._pending_space + self._pending[:1])
                self._pending, self._inside = self._pending[1:], False
                continue
            for name, arguments in calls:
                if self._max_calls is None or self.num_calls < self._max_calls:
                    yield self._begin_call(name, arguments)

    def _calls(self, ended: bool) -> Calls | None:
        """Take the calls at the start of the pending text.

        Returns:
            The calls; none if more text is needed, None if the text is no call.
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
        if result is None and self._family.arguments is not None:  # complete calls before others
            result = _dumped(parse_syntax(_JSON_CALLS, self._pending, self._schemas))
        return self._take_calls(result)

    def _syntax_calls(self, ended: bool) -> Calls | None:
        """Take the calls at the start of the pending text, once their end is there."""
        end = self._family.end
        num_ends = self._pending.count(end) if end else 0
        if not ended and num_ends == self._num_ends:
            return []
        self._num_ends = num_ends
        result = _dumped(parse_syntax(self._family, self._pending, self._schemas))
        if result is None and not ended:
            return []  # the end may be within an argument
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
        """Yield the pending text before a call, without white space that a call may follow."""
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
        """Return the position of a call or of a possible beginning, and True if it is a call."""
        text, family = self._pending, self._family
        if not family.marked and (not self._has_output or self._after_call):
            rest = text.lstrip(" \t\r\n;")
            starts = (family.marker, *(family.others or ("{",)))
            if rest.startswith(starts):
                return len(text) - len(rest), True
            if not ended and any(start.startswith(rest) for start in starts):
                return 0, False
        markers = [m for m in (family.marker, *family.others) if len(m) > 1]
        if not family.marked and not family.syntax:
            markers = []
        positions = [at for marker in markers if (at := text.find(marker)) >= 0]
        if positions:
            return min(positions), True
        num_held = 0 if ended else max((_overlap(text, m) for m in markers), default=0)
        return len(text) - num_held, False

    def _emit(self, text: str) -> Iterator[TextOrCall]:
        if text:
            self._has_output, self._after_call = True, False
            yield text

    def _grammar_calls(self) -> Iterator[TextOrCall]:
        """Yield the calls of a text that follows a grammar, as far as it goes."""
        while True:
            if self._arguments is None:
                header = self._header.search(self._pending)
                if header is None:
                    return
                self._pending = self._pending[header.end() :]
                self._arguments = _Arguments()
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


class _Arguments:
    """Finds the end of a JSON object."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = self.closed = False

    def read(self, text: str) -> int:
        """Return the number of characters that belong to the object."""
        for i, character in enumerate(text):
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._in_string = True
            else:
                self._depth += (character in "{[") - (character in "}]")
                if not self._depth:
                    self.closed = True
                    return i + 1
        return len(text)


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of a text that begins a marker."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)


# Reads complete calls before one that is cut or broken.
_JSON_CALLS = CallFamily("JSON", LLAMA, "", "", "", syntax="json", others=(HERMES, MISTRAL))


def _parse_calls(family: CallFamily, text: str, schemas: Schemas) -> tuple[Calls, str] | None:
    """Parse the calls at the start of a text.

    Returns:
        The first call and the rest of the text if calls end one by one, else all calls and no rest;
        None if the text does not begin with a call.
    """
    try:
        if family.marker == HERMES:
            return _parse_hermes(text, schemas)
        if family.marker == LLAMA:
            value = DECODER.decode(text.removeprefix(LLAMA).strip())
            calls = [_dump(*call_of(value, schemas))]
        elif family.arguments is None:
            calls = list(_parse_marked(text, schemas))
        else:
            value = DECODER.decode(text.removeprefix(MISTRAL).strip())
            calls = [_dump(*call_of(item, schemas)) for item in _call_list(value)]
    except (ValueError, RecursionError):
        return None
    return calls, ""


def _parse_hermes(text: str, schemas: Schemas) -> tuple[Calls, str]:
    """Parse one call, whose end tag may be missing at the end of the text."""
    start = len(text) - len(text.removeprefix(HERMES).lstrip())
    value, end = DECODER.raw_decode(text, start)
    rest = text[end:].lstrip()
    if rest and not rest.startswith(CLOSING):
        raise ValueError("no call")
    return [_dump(*call_of(value, schemas))], rest.removeprefix(CLOSING)


def _parse_marked(text: str, schemas: Schemas) -> Iterator[tuple[str, str]]:
    """Yield calls whose names and arguments are between marks."""
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


def _call_list(value: object) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError("no calls")
    return value


def _dumped(
    result: tuple[Sequence[tuple[str, dict[str, Any]]], str] | None,
) -> tuple[Calls, str] | None:
    """Return parsed calls with their arguments as JSON, None if they cannot be written as it."""
    try:
        return None if result is None else ([_dump(*call) for call in result[0]], result[1])
    except ValueError:
        return None


def _dump(name: str, arguments: dict[str, Any]) -> tuple[str, str]:
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)  # 1e999 is parsed as infinity
    text.encode()  # UnicodeEncodeError, a ValueError, for half a pair of surrogates
    return name, text
