"""The options of a request. Standard library only, so that every room can name them."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_DRAFT_TOKENS = 64
MAX_MATCH = 64
DRAFTERS = ("model", "lookup", "chain", "block", "random")
NGRAM = "ngram:"  # and a file's name
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


@dataclass(frozen=True)
class Request:
    """What a caller asks for beside the prompt, as `Pipeline.generate` explains it.

    A value that cannot be is a ValueError that names it.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    num_draft_tokens: int | None = None
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False
    drafter: Any = "model"
    lookup_min: int | None = None
    lookup_max: int | None = None

    def __post_init__(self) -> None:
        self._set("max_new_tokens", whole("max_new_tokens", self.max_new_tokens, 1))
        if self.seed is not None:
            self._set("seed", whole("seed", self.seed, -(2**64), 2**64))
        if (k := self.num_draft_tokens) is not None:
            self._set("num_draft_tokens", whole("num_draft_tokens", k, 0, MAX_DRAFT_TOKENS))
        self._set("stop", _stop_strings(self.stop))
        if self.ignore_eos not in (True, False):
            raise ValueError(f"ignore_eos must be true or false, got {self.ignore_eos!r}")
        _ = self.sampling
        _check_drafter(self.drafter)
        for name in ("lookup_min", "lookup_max"):
            self._set_match(name)
        if self.lookup_min and self.lookup_max and self.lookup_min > self.lookup_max:
            raise ValueError(
                f"lookup_min must be at most lookup_max, got {self.lookup_min} and "
                f"{self.lookup_max}"
            )

    @property
    def sampling(self) -> Sampling:
        """How the next token is drawn."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)

    def _set_match(self, name: str) -> None:
        """Check a match length, which only drafters that look matches up can have."""
        if (length := getattr(self, name)) is not None:
            self._set(name, whole(name, length, 1, MAX_MATCH))
            if self.drafter not in ("lookup", "chain"):
                raise ValueError(f"{name} is for the drafters lookup and chain")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _check_drafter(drafter: object) -> None:
    if not isinstance(drafter, str):
        ours = all(callable(getattr(drafter, name, None)) for name in ("propose", "truncate"))
        if not (ours and isinstance(getattr(drafter, "name", None), str)):
            raise ValueError(
                f"drafter must be a name or an object with name, propose and truncate, "
                f"got {str(drafter)[:40]}"
            )
    elif drafter not in DRAFTERS and drafter.removeprefix(NGRAM) in ("", drafter):
        raise ValueError(f"drafter must be {', '.join(DRAFTERS)} or {NGRAM}FILE, got {drafter!r}")


def _stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, list | tuple) or not all(isinstance(text, str) for text in stops):
        raise ValueError(f"stop must be text or a list of texts, got {stop!r}")
    if not all(stops):
        raise ValueError("a stop string must not be empty")
    return tuple(stops)
