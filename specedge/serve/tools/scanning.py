"""Whether a text that begins with a family's marker may still be calls, each character read once.

What it lets pass is checked when it is parsed: here a text is only found out as soon as nothing can
make calls of it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

from .families import ARGS, CALL_ID, HERMES, LLAMA, MISTRAL, Family
from .json_value import JsonValue

CLOSING = HERMES.replace("<", "</")

# Each takes a character when it goes on, and says whether a value of JSON ended with the one that
# it took before; ValueError where a character cannot follow.
_Steps = Generator[bool, str, None]


class Scan:
    """Reads a text as it grows; `begins` says of one that holds a whole value of JSON whether that
    is calls.
    """

    def __init__(self, family: Family, names: Sequence[str], begins: Callable[[str], bool]) -> None:
        self._steps, self._begins, self._num_read = _steps(family, names), begins, 0
        next(self._steps)
        self.may_be = True  # calls
        self.whole = False  # whether they have ended

    def read(self, text: str) -> None:
        """Go on to the end of a text, unless it is settled before."""
        try:
            while self._num_read < len(text) and self.may_be:
                character = text[self._num_read]
                self._num_read += 1
                if self._steps.send(character):
                    self.may_be = self._begins(text[: self._num_read])
        except StopIteration:
            self.whole = True
        except ValueError:
            self.may_be = False


def _steps(family: Family, names: Sequence[str]) -> _Steps:
    first = yield False
    if family.marker == LLAMA:
        if first == LLAMA[0]:
            yield from _spelled(LLAMA[1:], (yield False))
            first = yield False
        yield from _value("{", first)
        yield from _nothing()
    yield from _spelled(family.marker, first)
    if family.marker == HERMES:
        yield from _value("{", (yield False))
        yield from _spelled(CLOSING, (yield from _after_space((yield True))))
    elif family.arguments is None:
        yield from _named(names)
    else:
        yield from _value("[", (yield False))
        yield from _nothing()


def _named(names: Sequence[str]) -> _Steps:
    """Calls whose names and arguments are between marks, behind the first marker."""
    while True:
        character, name = (yield from _after_space((yield False))), ""
        while character != "[":
            name += character
            _check(any(one.startswith(name) for one in names))
            character = yield False
        _check(name in names)
        mark = character
        while mark not in (ARGS, CALL_ID):
            mark += yield False
            _check(ARGS.startswith(mark) or CALL_ID.startswith(mark))
        if mark == CALL_ID:
            while (character := (yield False)).isalnum() or character == "_":
                pass
            yield from _spelled(ARGS, character)
        yield from _value("{", (yield False))
        yield from _spelled(MISTRAL, (yield from _after_space((yield False))))


def _spelled(text: str, first: str) -> _Steps:
    """These characters; the first is there already."""
    _check(first == text[0])
    for character in text[1:]:
        _check((yield False) == character)


def _after_space(character: str) -> Generator[bool, str, str]:
    while character.isspace():
        character = yield False
    return character


def _value(opening: str, first: str) -> _Steps:
    """An object or a list of JSON, perhaps behind white space."""
    character, value = (yield from _after_space(first)), JsonValue()
    _check(character == opening and value.take(character))
    while not value.closed:
        _check(value.take((yield False)))


def _nothing() -> _Steps:
    """The end of a value, and white space without an end."""
    character = yield True
    while True:
        _check(character.isspace())
        character = yield False


def _check(holds: bool) -> None:
    if not holds:
        raise ValueError("no call")
