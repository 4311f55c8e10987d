"""The text before a position, which a distribution may depend on beside the model's logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .distribution import Ids


class History:
    """A prompt's tokens and those that follow it: generated ones, then perhaps drafted ones."""

    def __init__(self, prompt: Sequence[int], generated: Sequence[int] = ()) -> None:
        self.num_prompt_tokens = len(prompt)
        self._kept = [*prompt, *generated]
        self._length = len(self._kept)
        self._drafted: list[int] = []
        self._tally = _Tally()

    @property
    def tokens(self) -> list[int]:
        return self._kept + self._drafted if self._drafted else self._kept

    @property
    def length(self) -> int:
        return self._length + len(self._drafted)

    @property
    def num_new_tokens(self) -> int:
        """How many follow the prompt."""
        return self.length - self.num_prompt_tokens

    @property
    def num_kept(self) -> int:
        """How many of the tokens are the text's own, not drafted."""
        return self._length

    def extend(self, tokens: Sequence[int]) -> None:
        assert not self._drafted
        self._kept += tokens
        self._length = len(self._kept)

    def then(self, tokens: Sequence[int]) -> History:
        """The text that goes on with these. It shares this one's tokens, and may be asked until
        this one is extended.
        """
        further = object.__new__(History)
        further.__dict__ |= self.__dict__
        further._drafted = [*self._drafted, *tokens]
        return further

    def last(self, count: int) -> list[int]:
        """The last `count` tokens, fewer if there are not so many."""
        assert self._length == len(self._kept)
        missing = count - len(self._drafted)
        if missing <= 0:
            return self._drafted[len(self._drafted) - count :]
        return self._kept[-missing:] + self._drafted

    def counts(self) -> tuple[Ids, Ids]:
        """Each token that is in the text, and how often it follows the prompt. -> [n], [n]"""
        assert self._length == len(self._kept)
        self._tally.read(self._kept, self.num_prompt_tokens)
        return self._tally.with_also(self._drafted)


class _Tally:
    """Counts of a text that grows: each token is read once, however often it is asked."""

    def __init__(self) -> None:
        self._num_read = 0
        self._places: dict[int, int] = {}
        self._ids = np.zeros(0, np.intp)
        self._counts = np.zeros(0, np.intp)

    def read(self, tokens: list[int], num_prompt_tokens: int) -> None:
        for i in range(self._num_read, len(tokens)):
            place = self._place(tokens[i])
            self._counts[place] += i >= num_prompt_tokens
        self._num_read = len(tokens)

    def with_also(self, tokens: Sequence[int]) -> tuple[Ids, Ids]:
        """The ids and counts, with those of a few generated tokens more."""
        length = len(self._places)
        ids, counts = self._ids[:length], self._counts[:length]
        if not tokens:
            return ids, counts
        new = list(dict.fromkeys(token for token in tokens if token not in self._places))
        ids = np.concatenate([ids, np.array(new, np.intp)])
        counts = np.concatenate([counts, np.zeros(len(new), np.intp)])
        for token in tokens:
            place = self._places.get(token)
            counts[length + new.index(token) if place is None else place] += 1
        return ids, counts

    def _place(self, token: int) -> int:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            room = np.zeros(max(64, place), np.intp)
            self._ids = np.concatenate([self._ids, room])
            self._counts = np.concatenate([self._counts, room])
        self._ids[place] = token
        return place
