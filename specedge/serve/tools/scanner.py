"""Incremental check that a text may still become calls, reading each character once.

The parser validates calls; the scanner rejects a text as soon as no continuation makes it a call.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from .families import ARGS, CALL_ID, HERMES, LLAMA, MISTRAL, CallFamily
from .json_scanner import JsonScanner

CLOSING = HERMES.replace("<", "</")

# Coroutines that take a character and yield True if a JSON value ended with the one before;
# ValueError if the character cannot follow.
_Steps = Generator[bool, str, None]


class CallScanner:
    """Scans a growing text; `begins` returns True if a complete JSON value in it is a call."""

    def __init__(
        self, family: CallFamily, names: Sequence[str], begins: Callable[[str], bool]
    ) -> None:
        self._steps, self._begins, self._num_read = _steps(family, names), begins, 0
        next(self._steps)
        self.is_possible = True  # the text may be calls
        self.is_complete = False  # the calls have ended

    def read(self, text: str) -> None:
        """Scan up to the end of the text, or until it cannot be calls."""
        try:
            while self._num_read < len(text) and self.is_possible:
                character = text[self._num_read]
                self._num_read += 1
                if self._steps.send(character):
                    self.is_possible = self._begins(text[: self._num_read])
        except StopIteration:
            self.is_complete = True
        except ValueError:
            self.is_possible = False


def _steps(family: CallFamily, names: Sequence[str]) -> _Steps:
    first = yield False
    if family.marker == LLAMA:
        if first == LLAMA[0]:
            yield from _literal(LLAMA[1:], (yield False))
            first = yield False
        yield from _value("{", first)
        yield from _end_of_value()
    yield from _literal(family.marker, first)
    if family.marker == HERMES:
        yield from _value("{", (yield False))
        yield from _literal(CLOSING, (yield from _after_space((yield True))))
    elif family.arguments is None:
        yield from _marked_calls(names)
    else:
        yield from _value("[", (yield False))
        yield from _end_of_value()


def _marked_calls(names: Sequence[str]) -> _Steps:
    """Scan calls whose names and arguments are between marks, after the first marker."""
    while True:
        character, name = (yield from _after_space((yield False))), ""
        while character != "[":
            name += character
            _check(any(other.startswith(name) for other in names))
            character = yield False
        _check(name in names)
        mark = character
        while mark not in (ARGS, CALL_ID):
            mark += yield False
            _check(ARGS.startswith(mark) or CALL_ID.startswith(mark))
        if mark == CALL_ID:
            while (character := (yield False)).isalnum() or character == "_":
                pass
            yield from _literal(ARGS, character)
        yield from _value("{", (yield False))
        yield from _literal(MISTRAL, (yield from _after_space((yield False))))


def _literal(text: str, first: str) -> _Steps:
    """Scan a literal text whose first character is read already."""
    _check(first == text[0])
    for character in text[1:]:
        _check((yield False) == character)


def _after_space(character: str) -> Generator[bool, str, str]:
    while character.isspace():
        character = yield False
    return character


def _value(opening: str, first: str) -> _Steps:
    """Scan a JSON object or list after optional white space."""
    character, value = (yield from _after_space(first)), JsonScanner()
    _check(character == opening and value.take(character))
    while not value.closed:
        _check(value.take((yield False)))


def _end_of_value() -> _Steps:
    """Scan white space to the end of the text."""
    character = yield True
    while True:
        _check(character.isspace())
        character = yield False


def _check(condition: bool) -> None:
    if not condition:
        raise ValueError("no call")
