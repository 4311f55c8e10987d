"""From the text of an answer, as it comes, to what is text in it and the calls."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .declared import Tools
from .families import ARGS, CALL_ID, HERMES, LLAMA, MISTRAL, Family
from .scanning import CLOSING, Scan


@dataclass(frozen=True)
class Called:
    """A part of a call: what its arguments go on with; with its first part its id and its name."""

    index: int
    id: str | None
    name: str | None
    arguments: str


Part = str | Called
Calls = list[tuple[str, str]]  # names, and arguments as JSON


class Parser:
    """Reads an answer in pieces: parts of text and of calls, the same however it is cut.

    A text that a grammar wrote calls as soon as a name is known, and arguments come as they are
    written (`forced`). Of any other text a call comes whole, when its end is read: one that does
    not parse is text. White space beside a call is no text.
    """

    def __init__(self, tools: Tools, family: Family, forced: bool) -> None:
        self._names = [one.name for one in tools.callable]
        self._family, self._forced = family, forced
        self._most = None if tools.parallel and family.parallel and tools.named is None else 1
        self._header = family.header(self._names)
        self._left = ""  # what was read and is not yet told
        self._blank = ""  # white space before that, where a call may follow it
        self._begun = self._after_call = False  # whether something was told; a call, the last time
        self._inside = False  # what is left begins with a marker, or came after one
        self._scan: Scan | None = None
        self._arguments: _Arguments | None = None
        self.num_calls = 0

    @property
    def complete(self) -> bool:
        """Whether the last call has all of its arguments."""
        return self._arguments is None

    def feed(self, text: str) -> list[Part]:
        """What has become certain with more of the text."""
        self._left += text
        return list(self._parts(ended=False))

    def end(self) -> list[Part]:
        """What is left, now that nothing follows."""
        return list(self._parts(ended=True))

    def _parts(self, ended: bool) -> Iterator[Part]:
        while True:
            if not self._inside:
                yield from self._text(ended)
            if not self._inside:
                return
            if self._forced:
                yield from self._written()
                return
            found = self._calls(ended)
            if found == []:
                return
            if found is None:
                # It begins no call: its first character is text, and another marker may follow.
                yield from self._told(self._blank + self._left[:1])
                self._left, self._inside = self._left[1:], False
                continue
            for name, arguments in found:
                if self._most is None or self.num_calls < self._most:
                    yield self._called(name, arguments)

    def _calls(self, ended: bool) -> Calls | None:
        """The calls with which what is left begins, and that are left no more; none as long as more
        must be read to know, and None if there can be none.
        """
        self._scan = self._scan or Scan(self._family, self._names, self._begins_calls)
        self._scan.read(self._left)
        if self._scan.may_be and not (self._scan.whole or ended):
            return []
        found = _read(self._family, self._left, self._names) if self._scan.may_be else None
        self._scan = None
        if found is None:
            return None
        calls, self._left = found
        self._inside = False
        return calls

    def _begins_calls(self, text: str) -> bool:
        return _read(self._family, text, self._names) is not None

    def _text(self, ended: bool) -> Iterator[Part]:
        """What is left up to where a call begins, but white space that one may follow."""
        at, found = self._start(ended)
        text, rest = self._left[:at], self._left[at:]
        certain = text.rstrip()
        if ended and not found and (certain or not self._after_call):
            certain = text
        blank = text[len(certain) :]
        if found:
            self._blank, self._left, self._inside = blank, rest, True
        else:
            self._left = "" if ended else blank + rest
        yield from self._told(certain)

    def _start(self, ended: bool) -> tuple[int, bool]:
        """Where a call begins in what is left, and whether it does: else, where one may yet."""
        text, marker = self._left, self._family.marker
        if not self._family.marked:
            rest = text.lstrip()
            if not self._begun and rest.startswith(("{", marker)):
                return len(text) - len(rest), True
            may = not self._begun and not ended and marker.startswith(rest)
            return (0 if may else len(text)), False
        if (at := text.find(marker)) >= 0:
            return at, True
        longest = 0 if ended else min(len(marker) - 1, len(text))
        held = next((n for n in range(longest, 0, -1) if text.endswith(marker[:n])), 0)
        return len(text) - held, False

    def _told(self, text: str) -> Iterator[Part]:
        if text:
            self._begun, self._after_call = True, False
            yield text

    def _written(self) -> Iterator[Part]:
        """Calls of a text that a grammar wrote, as far as they are there."""
        while True:
            if self._arguments is None:
                header = self._header.search(self._left)
                if header is None:
                    return
                self._left = self._left[header.end() :]
                self._arguments = _Arguments()
                yield self._called(header[1], "")
            length = self._arguments.read(self._left)
            if length:
                yield Called(self.num_calls - 1, None, None, self._left[:length])
            self._left = self._left[length:]
            if not self._arguments.closed:
                return
            self._arguments = None

    def _called(self, name: str, arguments: str) -> Called:
        self.num_calls += 1
        self._begun = self._after_call = True
        return Called(self.num_calls - 1, f"call_{secrets.token_hex(12)}", name, arguments)


class _Arguments:
    """Finds where an object of JSON ends."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = self.closed = False

    def read(self, text: str) -> int:
        """How many more characters are the object's."""
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


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _read(family: Family, text: str, names: Sequence[str]) -> tuple[Calls, str] | None:
    """The calls with which a text begins, and the rest of it; None if it begins with none. Where
    one may follow another without a common end, it is the first; else all, and no rest.
    """
    try:
        if family.marker == HERMES:
            return _read_hermes(text, names)
        if family.marker == LLAMA:
            given = _DECODER.decode(text.removeprefix(LLAMA).strip())
            calls = [_call(given, names, family.arguments)]
        elif family.arguments is None:
            calls = list(_read_args(text, names))
        else:
            given = _DECODER.decode(text.removeprefix(MISTRAL).strip())
            calls = [_call(one, names, family.arguments) for one in _list(given)]
    except (ValueError, RecursionError):
        return None
    return calls, ""


def _read_hermes(text: str, names: Sequence[str]) -> tuple[Calls, str]:
    """One call, whose end may be missing where the text has ended."""
    start = len(text) - len(text.removeprefix(HERMES).lstrip())
    given, end = _DECODER.raw_decode(text, start)
    rest = text[end:].lstrip()
    if rest and not rest.startswith(CLOSING):
        raise ValueError("no call")
    return [_call(given, names, "arguments")], rest.removeprefix(CLOSING)


def _read_args(text: str, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Calls whose names and arguments are between marks."""
    head = re.compile(
        rf"\s*{re.escape(MISTRAL)}\s*([\w-]+)(?:{re.escape(CALL_ID)}\w*)?{re.escape(ARGS)}\s*"
    )
    at = 0
    while text[at:].strip():
        found = head.match(text, at)
        if found is None:
            raise ValueError("no call")
        given, at = _DECODER.raw_decode(text, found.end())
        yield _call({"name": found[1], "arguments": given}, names, "arguments")


def _list(given: object) -> list[Any]:
    if not isinstance(given, list) or not given:
        raise ValueError("no calls")
    return given


def _call(given: object, names: Sequence[str], member: str | None) -> tuple[str, str]:
    """The name and the arguments of a call; ValueError if it is of no function that there is."""
    facts = given if isinstance(given, dict) else {}
    name, arguments = facts.get("name"), facts.get(member)
    if name not in names or not isinstance(arguments, dict):
        raise ValueError("no call")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)  # 1e999 was read as infinite
    text.encode()  # UnicodeEncodeError, a ValueError, where half a pair of surrogates is escaped
    return str(name), text
