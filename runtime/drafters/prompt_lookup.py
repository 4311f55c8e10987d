"""Prompt lookup: what followed an earlier copy of the text's end may follow again."""

from __future__ import annotations

from collections.abc import Sequence

from specedge.request import DrafterName
from specedge.sampling_options import Sampling

from ..decoding.verification import Draft
from ..sampling.distribution import Floats
from ..sampling.history import History, common_prefix_length

MIN_MATCH = 2
MAX_MATCH = 5  # longer matches chose no better among earlier copies, and each length costs memory


class Lookup:
    """Copies what followed the longest earlier match of the text's end, the latest among equals.

    A match has `min_match` to `max_match` tokens. The copy ends with the text; only where the text
    already repeats itself does it go on into the copy, as the period wants it. Tokens are certain.
    """

    name = DrafterName.LOOKUP

    def __init__(self, min_match: int = MIN_MATCH, max_match: int | None = None) -> None:
        if max_match is None:
            max_match = max(MAX_MATCH, min_match)
        if not 1 <= min_match <= max_match:
            raise ValueError(
                f"lookup_min must be between 1 and lookup_max, got {min_match} and {max_match}"
            )
        self._index = Index(min_match, max_match)

    def propose(
        self, history: History, max_tokens: int, sampling: Sampling, uniforms: Floats
    ) -> Draft:
        index = self._index
        index.extend(history.last(history.length - index.length))
        start = index.find() if max_tokens else None
        return Draft([] if start is None else _copy(index.tokens, start, max_tokens))

    def truncate(self, length: int) -> None:
        self._index.truncate(length)


def agreeing(copy: Sequence[int], tokens: Sequence[int]) -> tuple[int, int]:
    """How many tokens of a copy are accepted if these follow, and how many of it were tested."""
    accepted = common_prefix_length(copy, tokens)
    return accepted, min(accepted + 1, len(copy), len(tokens))


class Index:
    """Where each run of `shortest` to `longest` tokens of a text was last followed by another.

    A token costs one entry a length when it comes, and as much when it is taken back.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(shortest, longest + 1)
        self.tokens: list[int] = []  # the text
        self._runs: list[tuple[int, ...]] = []  # those that end it, the shortest first
        self._next: dict[tuple[int, ...], int] = {}  # a run, and the place of what follows it
        self._before: list[list[int | None]] = []  # for each token, what its entries replaced

    @property
    def length(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        text, next_ = self.tokens, self._next
        for token in tokens:
            place = len(text)
            self._before.append([next_.get(run) for run in self._runs])
            for run in self._runs:
                next_[run] = place
            text.append(token)
            self._end()

    def truncate(self, length: int) -> None:
        """Forget every token past `length`, and what their entries had replaced is back."""
        while len(self.tokens) > length:
            self.tokens.pop()
            self._end()
            for run, place in zip(self._runs, self._before.pop(), strict=True):
                if place is None:
                    del self._next[run]
                else:
                    self._next[run] = place

    def find(self) -> int | None:
        """The place of what followed the longest, then latest, earlier run that ends the text."""
        found = None
        for run in self._runs:
            place = self._next.get(run)
            if place is None:  # then no longer one has occurred either
                break
            found = place
        return found

    def _end(self) -> None:
        tail = tuple(self.tokens[-self._lengths[-1] :])
        self._runs = [tail[-n:] for n in self._lengths if n <= len(tail)]


def _copy(text: list[int], start: int, max_tokens: int) -> list[int]:
    """The text from `start`, repeated if it has already repeated the same before."""
    period = len(text) - start
    if period < max_tokens and text[-period:] == text[-2 * period : start]:
        return [text[start + i % period] for i in range(max_tokens)]
    return text[start : start + max_tokens]
