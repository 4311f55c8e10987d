"""How an option of a request is declared, once: what it takes, its default, and what it does.

The declarations are fields of dataclasses. From them come the checks and their errors, the command
line's options, the keys of JSONL and the table in docs/commands.md. Standard library only.
"""

from __future__ import annotations

import difflib
import operator
import sys
from collections.abc import Iterable
from dataclasses import Field, dataclass, field, fields
from enum import StrEnum
from numbers import Real
from typing import Any

from .errors import OptionError


class NameEnum(StrEnum):
    """A name out of a fixed set; it is the text that it prints as."""

    __repr__ = str.__repr__


@dataclass(frozen=True)
class OptionSpec:
    """What an option takes beside its name and its default, which are its field's.

    `kind` is "number", "whole", "flag", or "other" for values with checks of their own, which
    `values` describes. A number is at least `least`, or above `above`, and at most `most`.
    """

    help: str
    kind: str = "other"
    values: str = ""
    least: float | None = None
    above: float | None = None
    most: float | None = None

    @property
    def limits(self) -> str:
        """What a number must be."""
        if self.least is not None and self.most is not None:
            return f"between {self.least} and {self.most}"
        low = f"at least {self.least}" if self.above is None else f"above {self.above}"
        if self.most is not None:
            return f"{low} and at most {self.most}"
        return f"{low} and finite" if self.kind == "number" else low

    def checked(self, name: str, value: Any, option: str | None = None) -> Any:
        """Return the value if it is valid.

        Args:
            name: What an error calls the value.
            value: The value.
            option: The name of the option that an error has; by default `name`.

        Raises:
            OptionError: If the value is invalid.
        """
        if self.kind == "whole":
            most = None if self.most is None else int(self.most)
            return check_integer(name, value, int(self.least or 0), most, option)
        if self.kind == "flag" and value not in (True, False):
            raise OptionError(f"{name} must be true or false, got {shorten(value)}", option or name)
        if self.kind == "number":
            self._check_number(name, value, option or name)
        return value

    def _check_number(self, name: str, value: Any, option: str) -> None:
        check_number(name, value, option)
        low = value > self.above if self.above is not None else value >= (self.least or 0)
        if not (low and value <= (_LARGEST if self.most is None else self.most)):
            raise OptionError(f"{name} must be {self.limits}, got {value}", option)


_LARGEST = sys.float_info.max


def number_option(
    default: float,
    help: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
) -> Any:
    """A field for a number."""
    return _declare(default, OptionSpec(help, "number", least=least, above=above, most=most))


def integer_option(default: int | None, help: str, least: int = 0, most: int | None = None) -> Any:
    """A field for a whole number; None where there need be none."""
    return _declare(default, OptionSpec(help, "whole", least=least, most=most))


def flag_option(help: str) -> Any:
    """A field that is off unless it is asked for."""
    return _declare(False, OptionSpec(help, "flag"))


def custom_option(default: Any, help: str, values: str) -> Any:
    """A field whose class checks it."""
    return _declare(default, OptionSpec(help, values=values))


def _declare(default: Any, declared: OptionSpec) -> Any:
    return field(default=default, metadata={"declared": declared})


def option_specs(kind: Any) -> dict[str, tuple[Field[Any], OptionSpec]]:
    """The options that a dataclass declares, by name."""
    return {
        one.name: (one, one.metadata["declared"])
        for one in fields(kind)
        if "declared" in one.metadata
    }


def format_default(one: Field[Any]) -> str:
    """An option's default as a user reads it, nothing where none is needed."""
    default = one.default
    return "" if default is None or default is False or default == () else f"{default}"


def validate_options(options: Any) -> None:
    """Check a frozen dataclass's declared fields in place; None becomes the default."""
    for name, (its_field, declared) in option_specs(options).items():
        value = getattr(options, name)
        if value is None:
            value = its_field.default
        if value is not None:
            value = declared.checked(name, value)
        object.__setattr__(options, name, value)


def suggest(name: str, known: Iterable[str]) -> str:
    """A hint for a name that is not known: "; did you mean '...'?", or nothing."""
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean '{near[0]}'?" if near else ""


def check_integer(
    name: str, value: object, least: int, most: int | None = None, option: str | None = None
) -> int:
    """Return `value` as an integer within limits.

    Raises:
        OptionError: If it is anything else; its option is `option`, by default `name`.
    """
    limits = f"at least {least}" if most is None else f"between {least} and {most}"
    try:
        found = operator.index(value)  # type: ignore[arg-type]
    except TypeError as error:
        raise OptionError(
            f"{name} must be a whole number {limits}, got {shorten(value)}", option or name
        ) from error
    if found < least or (most is not None and found > most):
        raise OptionError(f"{name} must be {limits}, got {found}", option or name)
    return found


def check_number(name: str, value: object, option: str | None = None) -> None:
    """Raise OptionError for what is no real number."""
    try:
        if not isinstance(value, Real):
            raise TypeError
        float(value)
    except (TypeError, OverflowError) as error:
        raise OptionError(
            f"{name} must be a number, got {shorten(value)}", option or name
        ) from error


def shorten(value: object) -> str:
    """A value as an error shows it, however long it is."""
    return repr(value[:20]) if isinstance(value, str) else repr(value)[:20]
