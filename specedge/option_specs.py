"""Declarations of request options: type, limits, default and help, in one place.

Options are fields of dataclasses. Validation, error messages, command-line options, JSONL keys and
the table in docs/commands.md are derived from them. Standard library only.
"""

from __future__ import annotations

import difflib
import operator
import sys
from collections.abc import Iterable
from dataclasses import Field, dataclass, field, fields
from enum import Enum
from numbers import Real
from typing import Any

from .errors import OptionError


class NameEnum(str, Enum):
    """Enumeration of names whose members are their text; StrEnum requires Python 3.11."""

    __repr__ = str.__repr__
    __str__ = str.__str__

    def __format__(self, format_spec: str) -> str:
        return str.__format__(self, format_spec)


@dataclass(frozen=True)
class OptionSpec:
    """Type, limits and help of an option.

    Attributes:
        help: Help text of the command line.
        type: "number", "integer", "flag", or "custom" for an option that its class validates.
        values: Description of a custom option's values.
        minimum: Smallest value, inclusive.
        exclusive_minimum: Lower limit, exclusive.
        maximum: Largest value, inclusive.
    """

    help: str
    type: str = "custom"
    values: str = ""
    minimum: float | None = None
    exclusive_minimum: float | None = None
    maximum: float | None = None

    @property
    def limits(self) -> str:
        """Description of the limits of a number."""
        if self.minimum is not None and self.maximum is not None:
            return f"between {self.minimum} and {self.maximum}"
        low = (
            f"at least {self.minimum}"
            if self.exclusive_minimum is None
            else f"above {self.exclusive_minimum}"
        )
        return f"{low} and {'finite' if self.maximum is None else f'at most {self.maximum}'}"

    def validate(self, name: str, value: Any, option: str | None = None) -> Any:
        """Return a value if it is valid.

        Args:
            name: Name of the value in error messages.
            value: The value.
            option: The error's `option`; by default `name`.

        Raises:
            OptionError: If the value is invalid.
        """
        if self.type == "integer":
            maximum = None if self.maximum is None else int(self.maximum)
            return check_integer(name, value, int(self.minimum or 0), maximum, option)
        if self.type == "flag" and value not in (True, False):
            raise OptionError(f"{name} must be true or false, got {shorten(value)}", option or name)
        if self.type == "number":
            self._check_number(name, value, option or name)
        return value

    def _check_number(self, name: str, value: Any, option: str) -> None:
        try:
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if not is_number:
                raise TypeError
            float(value)
        except (TypeError, OverflowError) as error:
            raise OptionError(f"{name} must be a number, got {shorten(value)}", option) from error
        low = (
            value > self.exclusive_minimum
            if self.exclusive_minimum is not None
            else value >= (self.minimum or 0)
        )
        if not (low and value <= (_LARGEST if self.maximum is None else self.maximum)):
            raise OptionError(f"{name} must be {self.limits}, got {value}", option)


_LARGEST = sys.float_info.max


def option_field(default: Any, help: str, values: str = "", **limits: float) -> Any:
    """Return a dataclass field for an option, of the type of its default.

    Args:
        default: Default; None for an optional integer.
        help: Help text of the command line.
        values: Description of the values of an option that its class validates.
        **limits: Limits of a number or integer, as in `OptionSpec`.
    """
    types = {bool: "flag", float: "number"}
    declared = OptionSpec(
        help, "custom" if values else types.get(type(default), "integer"), values, **limits
    )
    return field(default=default, metadata={"declared": declared})


def option_specs(options: Any) -> dict[str, tuple[Field[Any], OptionSpec]]:
    """Return the fields and declarations of a dataclass's options by name."""
    return {
        option.name: (option, option.metadata["declared"])
        for option in fields(options)
        if "declared" in option.metadata
    }


def validate_options(options: Any) -> None:
    """Validate a frozen dataclass's options in place; None becomes the default."""
    for name, (its_field, declared) in option_specs(options).items():
        value = getattr(options, name)
        if value is None:
            value = its_field.default
        if value is not None:
            value = declared.validate(name, value)
        object.__setattr__(options, name, value)


def suggest(name: str, names: Iterable[str]) -> str:
    """Return "; did you mean '...'?" for an unknown name, or an empty string."""
    matches = difflib.get_close_matches(name, names, 1)
    return f"; did you mean '{matches[0]}'?" if matches else ""


def check_integer(
    name: str, value: object, minimum: int, maximum: int | None = None, option: str | None = None
) -> int:
    """Return `value` as an integer within limits.

    Args:
        name: Name of the value in error messages.
        value: The value.
        minimum: Smallest integer, inclusive.
        maximum: Largest integer, inclusive; None is unlimited.
        option: The error's `option`; by default `name`.

    Raises:
        OptionError: If the value is not an integer or out of range.
    """
    limits = f"at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"
    try:
        if isinstance(value, bool):
            raise TypeError
        integer = operator.index(value)  # type: ignore[arg-type]
    except TypeError as error:
        raise OptionError(
            f"{name} must be an integer {limits}, got {shorten(value)}", option or name
        ) from error
    if integer < minimum or (maximum is not None and integer > maximum):
        raise OptionError(f"{name} must be {limits}, got {integer}", option or name)
    return integer


def shorten(value: object) -> str:
    """Return a value's representation, truncated for an error message."""
    return repr(value[:20]) if isinstance(value, str) else repr(value)[:20]
