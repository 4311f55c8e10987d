"""Draft model's tokens for each token of a target with another tokenizer, and their file."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

_TYPE = "i"  # 32 bits on all supported platforms


@dataclass(frozen=True)
class TokenReadings:
    """Tokens that a draft model reads for each token of a text.

    Attributes:
        starts: Index of each reading in `tokens`, and their number. [V + 1]
        tokens: The readings one after another.
        prefix: Tokens that the draft's tokenizer adds at the beginning of a text.
    """

    starts: Sequence[int]
    tokens: Sequence[int]
    prefix: tuple[int, ...] = ()

    @classmethod
    def from_lists(cls, readings: Sequence[Sequence[int]], prefix: Sequence[int]) -> TokenReadings:
        """Return the readings of tokens 0 to V - 1, at least one token each."""
        starts = array(_TYPE, accumulate(map(len, readings), initial=0))
        return cls(starts, array(_TYPE, [t for reading in readings for t in reading]), (*prefix,))

    @classmethod
    def unpack(cls, data: bytes, num_readings: int, prefix: Sequence[int] = ()) -> TokenReadings:
        """Read the content of a file. Raises ValueError if it is inconsistent."""
        values = array(_TYPE)
        values.frombytes(data)
        if sys.byteorder == "big":
            values.byteswap()
        starts, tokens = values[: num_readings + 1], values[num_readings + 1 :]
        if len(starts) <= num_readings or starts[0] or starts[-1] != len(tokens):
            raise ValueError(f"it does not have {num_readings} readings")
        if any(a >= b for a, b in pairwise(starts)):
            raise ValueError("it has a reading without tokens")
        return cls(starts, tokens, (*prefix,))

    def pack(self) -> bytes:
        """Return the content of the file: `starts` and `tokens`, little-endian 32-bit integers."""
        values = array(_TYPE, [*self.starts, *self.tokens])
        if sys.byteorder == "big":
            values.byteswap()
        return values.tobytes()

    def __len__(self) -> int:
        return len(self.starts) - 1

    def of(self, token: int) -> Sequence[int]:
        """Return the reading of a token within a text."""
        return self.tokens[self.starts[token] : self.starts[token + 1]]

    def of_first(self, token: int) -> list[int]:
        """Return the reading of a text's first token, which begins with `prefix`."""
        reading = [*self.of(token)]
        return (
            reading if reading[: len(self.prefix)] == [*self.prefix] else [*self.prefix, *reading]
        )

    def read(self, text: Sequence[int], start: int = 0) -> list[int]:
        """Return the readings of tokens of a text from position `start` on."""
        tokens: list[int] = []
        for i, token in enumerate(text, start):
            tokens += self.of(token) if i else self.of_first(token)
        return tokens

    @cached_property
    def longest(self) -> int:
        """Number of tokens of the longest reading, at the beginning of a text."""
        return len(self.prefix) + max(b - a for a, b in pairwise(self.starts))
