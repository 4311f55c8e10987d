"""Incremental scanner that decides in linear time if a text may become tool calls.

The parser validates calls; the scanner rejects a text as soon as it cannot be continued to a call.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from .families import ARGS, CALL_ID, HERMES, LLAMA, MISTRAL, CallFamily
from .json_scanner import JsonScanner

CLOSING = HERMES.replace("<", "</")

# Coroutines that receive a character, and yield True if the previous one ended a JSON value. They
# raise ValueError for an invalid character.
_Steps = Generator[bool, str, None]


class CallScanner:
    """Scanner of a growing text; `begins` validates a text that ends with a JSON value."""

    def __init__(
        self, family: CallFamily, names: Sequence[str], begins: Callable[[str], bool]
    ) -> None:
        self._steps, self._begins, self._num_read = _steps(family, names), begins, 0
        next(self._steps)
        self.is_possible = True  # the text may become calls
        self.is_complete = False  # the calls have ended

    def read(self, text: str) -> None:
        """Scan new characters of the text, until it cannot become calls."""
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
    """Scan calls whose names and arguments are separated by markers, after the first marker."""
    while True:
        character, name = (yield from _after_space((yield False))), ""
        while character != "[":
            name += character
            _check(any(other.startswith(name) for other in names))
            character = yield False
        _check(name in names)
        marker = character
        while marker not in (ARGS, CALL_ID):
            marker += yield False
            _check(ARGS.startswith(marker) or CALL_ID.startswith(marker))
        if marker == CALL_ID:
            while (character := (yield False)).isalnum() or character == "_":
                pass
            yield from _literal(ARGS, character)
        yield from _value("{", (yield False))
        yield from _literal(MISTRAL, (yield from _after_space((yield False))))


def _literal(text: str, first: str) -> _Steps:
    """Scan a literal whose first character has been read."""
    _check(first == text[0])
    for character in text[1:]:
        _check((yield False) == character)


def _after_space(character: str) -> Generator[bool, str, str]:
    while character.isspace():
        character = yield False
    return character


def _value(opening: str, first: str) -> _Steps:
    """Scan a JSON object or list after optional whitespace."""
    character, value = (yield from _after_space(first)), JsonScanner()
    _check(character == opening and value.take(character))
    while not value.closed:
        _check(value.take((yield False)))


def _end_of_value() -> _Steps:
    """Scan whitespace up to the end of the text."""
    character = yield True
    while True:
        _check(character.isspace())
        character = yield False


def _check(condition: bool) -> None:
    if not condition:
        raise ValueError("no call")
