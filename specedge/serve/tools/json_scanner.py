"""Incremental JSON scanner that rejects the first invalid character."""

from __future__ import annotations

from collections.abc import Callable

_SPACE = " \t\n\r"
_WORDS = {"t": "rue", "f": "alse", "n": "ull"}
_CLOSERS = {"{": "}", "[": "]"}
# State machine of a number: "-" sign, "0" leading zero, "1" digits, "." point, "f" fraction digits,
# "e" exponent letter, "+" its sign, "x" its digits.
_NUMBERS = {
    "": {"-": "-", "0": "0", "1": "1"},
    "-": {"0": "0", "1": "1"},
    "0": {".": ".", "e": "e"},
    "1": {"0": "1", "1": "1", ".": ".", "e": "e"},
    ".": {"0": "f", "1": "f"},
    "f": {"0": "f", "1": "f", "e": "e"},
    "e": {"+": "+", "-": "+", "0": "x", "1": "x"},
    "+": {"0": "x", "1": "x"},
    "x": {"0": "x", "1": "x"},
}
_CHARACTER_CLASSES = dict.fromkeys("123456789", "1") | {"E": "e"}  # in numbers


class JsonScanner:
    """Scanner of a JSON object or list."""

    def __init__(self) -> None:
        self.closed = False
        self._closers: list[str] = []  # expected closing characters
        self._take: Callable[[str], bool] = self._value
        self._rest = self._number = ""
        self._is_key = False
        self._num_digits = 0

    def take(self, character: str) -> bool:
        """Read a character; return False if it is invalid at this position."""
        return self._take(character)

    def _value(self, character: str) -> bool:
        if character in _SPACE:
            return True
        if character in _CLOSERS:
            self._closers.append(_CLOSERS[character])
            self._take = self._first_key if character == "{" else self._first_item
        elif character == '"':
            self._is_key, self._take = False, self._string
        elif character in _WORDS:
            self._rest, self._take = _WORDS[character], self._word
        else:
            self._number, self._take = "", self._in_number
            return self._in_number(character)
        return True

    def _first_item(self, character: str) -> bool:
        return self._closes(character) or self._value(character)

    def _first_key(self, character: str) -> bool:
        return self._closes(character) or self._key(character)

    def _key(self, character: str) -> bool:
        if character == '"':
            self._is_key, self._take = True, self._string
            return True
        return character in _SPACE

    def _colon(self, character: str) -> bool:
        if character == ":":
            self._take = self._value
            return True
        return character in _SPACE

    def _after(self, character: str) -> bool:
        """Read a character after a value."""
        if character == ",":
            self._take = self._key if self._closers[-1] == "}" else self._value
            return True
        return character in _SPACE or self._closes(character)

    def _closes(self, character: str) -> bool:
        if character != self._closers[-1]:
            return False
        self._closers.pop()
        self._take, self.closed = self._after, not self._closers
        return True

    def _string(self, character: str) -> bool:
        if character == '"':
            self._take = self._colon if self._is_key else self._after
        elif character == "\\":
            self._take = self._escape
        return character >= " "

    def _escape(self, character: str) -> bool:
        self._num_digits, self._take = 0, self._hexadecimal if character == "u" else self._string
        return character in '"\\/bfnrtu'

    def _hexadecimal(self, character: str) -> bool:
        self._num_digits += 1
        if self._num_digits == 4:
            self._take = self._string
        return character in "0123456789abcdefABCDEF"

    def _word(self, character: str) -> bool:
        expected, self._rest = self._rest[0], self._rest[1:]
        if not self._rest:
            self._take = self._after
        return character == expected

    def _in_number(self, character: str) -> bool:
        state = _NUMBERS[self._number].get(_CHARACTER_CLASSES.get(character, character))
        if state is not None:
            self._number = state
            return True
        self._take = self._after
        return self._number in ("0", "1", "f", "x") and self._after(character)
