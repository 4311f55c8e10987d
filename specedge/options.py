"""The options of a request. Standard library only, so that every room can name them."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

MAX_DRAFT_TOKENS = 64
MAX_EXPORTED_DRAFT_TOKENS = 16  # a row of the verify pass each


def whole(name: str, value: object, least: int, most: int | None = None) -> int:
    """`value` as an integer within limits; anything else is a ValueError that names it."""
    limits = f"at least {least}" if most is None else f"between {least} and {most}"
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError as error:
        raise ValueError(f"{name} must be a whole number {limits}, got {value!r}") from error
    if number < least or (most is not None and number > most):
        raise ValueError(f"{name} must be {limits}, got {number}")
    return number


def _check_number(name: str, value: object) -> None:
    try:
        math.isfinite(value)  # type: ignore[arg-type]
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{name} must be a number, got {str(value)[:20]!r}") from error


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: filters in the order of the fields, as in transformers.

    `temperature` 0 is greedy: the largest logit, the lowest id on ties. `top_k` 0, `top_p` 1 and
    `min_p` 0 are off. `min_p` drops tokens less likely than `min_p` times the likeliest one.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            _check_number(name, getattr(self, name))
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be at least 0 and finite, got {self.temperature}")
        whole("top_k", self.top_k, 0)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be between 0 and 1, got {self.min_p}")

    @property
    def greedy(self) -> bool:
        """Whether the next token is the largest logit, with no randomness."""
        return self.temperature == 0
