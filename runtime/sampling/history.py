"""Tokens before a position, which penalties, bad words and grammars depend on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .distribution import Ids
from .source import Source


def common_prefix_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two texts.

    Bisection compares slices, which is faster than comparing tokens of long texts.
    """
    # Slices of sequences of different types are not equal.
    first, second = (text if isinstance(text, list) else list(text) for text in (first, second))
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class History:
    """Tokens of a prompt, followed by generated tokens and draft tokens, if any.

    The `source` of an encoder-decoder's text is not part of its tokens.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        generated: Sequence[int] = (),
        source: Source | None = None,
    ) -> None:
        self.num_prompt_tokens = len(prompt)
        self.source = source
        self._committed = [*prompt, *generated]
        self._length = len(self._committed)
        self._drafted: list[int] = []
        self._counts = _TokenCounts()

    @property
    def tokens(self) -> list[int]:
        """All tokens."""
        return self._committed + self._drafted if self._drafted else self._committed

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self._length + len(self._drafted)

    @property
    def num_new_tokens(self) -> int:
        """Number of tokens after the prompt."""
        return self.length - self.num_prompt_tokens

    @property
    def num_committed(self) -> int:
        """Number of tokens without draft tokens."""
        return self._length

    num_kept = num_committed  # name in version 0.1, which drafters of applications may use

    def extend(self, tokens: Sequence[int]) -> None:
        """Commit tokens."""
        assert not self._drafted
        self._committed += tokens
        self._length = len(self._committed)

    def then(self, tokens: Sequence[int]) -> History:
        """Return the text followed by draft tokens, valid until this one is extended."""
        if not tokens:
            return self
        continued = object.__new__(History)
        continued.num_prompt_tokens, continued.source = self.num_prompt_tokens, self.source
        continued._counts = self._counts
        continued._committed, continued._length = self._committed, self._length
        continued._drafted = [*self._drafted, *tokens]
        return continued

    def last(self, count: int) -> list[int]:
        """Return the last `count` tokens, fewer if the text is shorter."""
        assert self._length == len(self._committed)
        missing = count - len(self._drafted)
        if missing <= 0:
            return self._drafted[len(self._drafted) - count :]
        return self._committed[-missing:] + self._drafted

    def counts(self) -> tuple[Ids, Ids]:
        """Return each token of the text and its number of occurrences after the prompt.

        -> [n], [n]
        """
        assert self._length == len(self._committed)
        self._counts.read(self._committed, self.num_prompt_tokens)
        return self._counts.with_drafted(self._drafted)


class _TokenCounts:
    """Token counts of a growing text, updated incrementally."""

    def __init__(self) -> None:
        self._num_read = 0
        self._columns: dict[int, int] = {}
        self._ids = np.zeros(0, np.intp)
        self._counts = np.zeros(0, np.intp)

    def read(self, tokens: list[int], num_prompt_tokens: int) -> None:
        for i in range(self._num_read, len(tokens)):
            column = self._column(tokens[i])
            self._counts[column] += i >= num_prompt_tokens
        self._num_read = len(tokens)

    def with_drafted(self, tokens: Sequence[int]) -> tuple[Ids, Ids]:
        """Return ids and counts, including those of draft tokens."""
        length = len(self._columns)
        ids, counts = self._ids[:length], self._counts[:length]
        if not tokens:
            return ids, counts
        new = list(dict.fromkeys(token for token in tokens if token not in self._columns))
        ids = np.concatenate([ids, np.array(new, np.intp)])
        counts = np.concatenate([counts, np.zeros(len(new), np.intp)])
        for token in tokens:
            column = self._columns.get(token)
            counts[length + new.index(token) if column is None else column] += 1
        return ids, counts

    def _column(self, token: int) -> int:
        column = self._columns.setdefault(token, len(self._columns))
        if column == len(self._ids):
            zeros = np.zeros(max(64, column), np.intp)
            self._ids = np.concatenate([self._ids, zeros])
            self._counts = np.concatenate([self._counts, zeros])
        self._ids[column] = token
        return column
