"""Incremental JSON scanner that rejects the first invalid character."""

from __future__ import annotations

_SPACE = " \t\n\r"
_CLOSERS = {"{": "}", "[": "]"}
_DIGITS = "0123456789"
_WORDS = ("true", "false", "null")
_FRACTION, _EXPONENT = {".": "point"}, dict.fromkeys("eE", "exponent")
_KEYS = ("key", "first key")  # "first": after the opening character, before which it may close
_VALUES = ("value", "first item")
_BETWEEN_TOKENS = (*_KEYS, *_VALUES, "colon", "after")  # whitespace is allowed

# Next state by state and character. Those of strings, and after values, depend on what is open.
_STATES: dict[str, dict[str, str]] = {
    **{state: {'"': "string"} for state in _KEYS},
    **{
        state: {'"': "string", "-": "minus", "0": "zero"}
        | dict.fromkeys(_DIGITS[1:], "digits")
        | {word[0]: word[0] for word in _WORDS}
        for state in _VALUES
    },
    "colon": {":": "value"},
    "escape": dict.fromkeys('"\\/bfnrt', "string") | {"u": "u"},
    **{
        "u" * i: dict.fromkeys("0123456789abcdefABCDEF", "u" * (i + 1) if i < 4 else "string")
        for i in range(1, 5)
    },
    "minus": {"0": "zero"} | dict.fromkeys(_DIGITS[1:], "digits"),
    "point": dict.fromkeys(_DIGITS, "fraction"),
    "exponent": dict.fromkeys("+-", "exponent sign") | dict.fromkeys(_DIGITS, "exponent digits"),
    "exponent sign": dict.fromkeys(_DIGITS, "exponent digits"),
    **{word[:i]: {word[i]: word[: i + 1]} for word in _WORDS for i in range(1, len(word))},
}
# States in which a number or word may be complete: other characters follow the value.
_COMPLETE: dict[str, dict[str, str]] = {
    "zero": _FRACTION | _EXPONENT,
    "digits": _FRACTION | _EXPONENT | dict.fromkeys(_DIGITS, "digits"),
    "fraction": _EXPONENT | dict.fromkeys(_DIGITS, "fraction"),
    "exponent digits": dict.fromkeys(_DIGITS, "exponent digits"),
    **{word: {} for word in _WORDS},
}


class JsonScanner:
    """Scanner of a JSON object or list."""

    def __init__(self) -> None:
        self.closed = False
        self._closers: list[str] = []  # expected closing characters
        self._state = "value"
        self._is_key = False  # the string is a key

    def read(self, text: str) -> int:
        """Return the number of characters of a valid text up to the end of the value."""
        for i, character in enumerate(text, 1):
            if self.take(character) and self.closed:
                return i
        return len(text)

    def take(self, character: str) -> bool:
        """Read a character; return False if it is invalid at this position."""
        transitions = _COMPLETE.get(self._state)
        if transitions is not None and character not in transitions:
            self._state = "after"
        state = self._state
        if state == "string":
            if character == '"':
                self._state = "colon" if self._is_key else "after"
            elif character == "\\":
                self._state = "escape"
            return character >= " "
        if state in _BETWEEN_TOKENS:
            if character in _SPACE:
                return True
            self._is_key = state in _KEYS
        if state in ("after", "first key", "first item") and character == self._closers[-1]:
            self._closers.pop()
            self._state, self.closed = "after", not self._closers
            return True
        if state == "after":
            self._state = "key" if self._closers[-1] == "}" else "value"
            return character == ","
        if state in _VALUES and character in _CLOSERS:
            self._closers.append(_CLOSERS[character])
            self._state = "first key" if character == "{" else "first item"
            return True
        next_state = (transitions or _STATES[state]).get(character)
        self._state = next_state or state
        return next_state is not None
