"""Text as a draft model reads it: one token for each of the text's, or several."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from specedge.bundle.token_readings import TokenReadings

from ..sampling.history import History

PLACEHOLDER = 0


class TextReading:
    """Reading of a text by a draft model with the target's tokenizer, token by token.

    Tokens outside its vocabulary are replaced by `PLACEHOLDER`; dropping them would shift later
    positions.

    Attributes:
        longest: Number of the model's tokens for a token of the text, at most.
    """

    longest = 1

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def follow(self, history: History) -> None:
        """Extend the known text to the end of `history`."""

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens of the text."""

    def length(self, num_tokens: int) -> int:
        """Return the number of the model's tokens for the first `num_tokens` of the text."""
        return num_tokens

    def position(self, length: int) -> int:
        """Return the first position of the text whose reading begins at `length` or later."""
        return length

    def read(self, tokens: Sequence[int], start: int) -> list[int]:
        """Return the model's tokens for tokens of the text from position `start` on."""
        return [token if token < self.vocab_size else PLACEHOLDER for token in tokens]

    def last(self, history: History, count: int) -> list[int]:
        """Return the last `count` of the model's tokens for a text."""
        return self.read(history.last(count), history.length - count)


class TranslatedText(TextReading):
    """Reading of a text by a draft model with another tokenizer.

    A token of the text is one or more of the model's, so that the length of the model's cache is
    not that of the text.
    """

    def __init__(self, readings: TokenReadings) -> None:
        self._readings = readings
        self._ends = [0]  # number of the model's tokens up to each position of the text
        self.longest = readings.longest

    def follow(self, history: History) -> None:
        if (known := len(self._ends) - 1) < history.length:
            self._extend(history.last(history.length - known), known)

    def truncate(self, length: int) -> None:
        del self._ends[length + 1 :]

    def length(self, num_tokens: int) -> int:
        return self._ends[min(num_tokens, len(self._ends) - 1)]

    def position(self, length: int) -> int:
        return bisect_left(self._ends, length)

    def read(self, tokens: Sequence[int], start: int) -> list[int]:
        self._extend(tokens[max(0, len(self._ends) - 1 - start) :], len(self._ends) - 1)
        return self._readings.read(tokens, start)

    def last(self, history: History, count: int) -> list[int]:
        start = bisect_left(self._ends, self._ends[history.length] - count + 1) - 1
        read = self._readings.read(history.last(history.length - start), start)
        return read[len(read) - count :]

    def _extend(self, tokens: Sequence[int], start: int) -> None:
        """Record the lengths of tokens from position `start` on, where the known text ends."""
        for i, token in enumerate(tokens, start):
            reading = self._readings.of(token) if i else self._readings.of_first(token)
            self._ends.append(self._ends[-1] + len(reading))
