"""The options of a request. Standard library only, so that every room can name them."""

from __future__ import annotations

from dataclasses import dataclass


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
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be at least 0 and finite, got {self.temperature}")
        if self.top_k < 0 or self.top_k != int(self.top_k):
            raise ValueError(f"top_k must be 0 (off) or a positive integer, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be between 0 and 1, got {self.min_p}")

    @property
    def greedy(self) -> bool:
        """Whether the next token is the largest logit, with no randomness."""
        return self.temperature == 0
