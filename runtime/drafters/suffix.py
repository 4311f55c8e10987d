"""Suffix decoding: what most often followed the longest run of tokens that ends the text.

After SuffixDecoding (Oliaro et al. 2024), whose suffix trees count what followed each run, and
which drafts on while the counts promise enough. Here what they promise is tested on the text.
"""

from __future__ import annotations

from collections.abc import Sequence

from specedge.options import Sampling
from specedge.request import DrafterName

from ..loop.verify import Draft
from ..sampling.distribution import Floats
from ..sampling.history import History
from .suffix_index import HALVES, NUM_LENGTHS, Index, Names

LEAST_CHANCE = 0.1  # that all of a draft is accepted: about what a row costs, in verify passes
EXPECTED = (0.3, 0.6, 0.9, 0.95)  # the rate of what followed a long run, by its share
PRIOR_TESTS = 4.0  # what is expected counts as so many tests
FADING = 0.95  # what a test leaves of those of its kind before it: half after 14


class Suffix:
    """Drafts what most often followed the longest run that ends the text, token by token.

    Each token of the text tests what would have been guessed there, drafted or not. So a kind of
    guess has a rate, and a draft goes on while the product of its tokens' rates is at least
    LEAST_CHANCE. Tokens are certain.
    """

    name = DrafterName.SUFFIX

    def __init__(self) -> None:
        self._begin()

    def propose(
        self, history: History, max_tokens: int, sampling: Sampling, uniforms: Floats
    ) -> Draft:
        drafted = history.last(history.length - history.num_kept)
        new = history.last(history.length - self._length)
        self._read(new[: len(new) - len(drafted)])
        reader = self._reader.ahead(drafted)
        tokens: list[int] = []
        chance = 1.0
        while len(tokens) < max_tokens and (guess := reader.guess()):
            token, kind = guess
            chance *= self._rates.of(kind)
            if chance < LEAST_CHANCE:
                break
            tokens.append(token)
            reader.read(token)
        return Draft(tokens)

    def truncate(self, length: int) -> None:
        """Another text, or one that goes on otherwise, is read from its start."""
        if length < self._length or not length:
            self._begin()

    def _begin(self) -> None:
        self._length = 0
        self._rates = Rates()
        self._reader = Reader(Index(), adds=True)

    def _read(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if guess := self._reader.guess():
                self._rates.record(guess[1], guess[0] == token)
            self._reader.read(token)
        self._length += len(tokens)


class Reader:
    """A text as an index names it."""

    def __init__(self, index: Index, adds: bool = False, recent: Sequence[Names] = ()) -> None:
        self._index, self._adds = index, adds
        self._recent = list(recent)

    def read(self, token: int) -> None:
        index, recent = self._index, self._recent
        recent.append((index.add if self._adds else index.names)(recent, token))
        if len(recent) > 4 * HALVES[-1]:
            del recent[: -HALVES[-1]]

    def guess(self) -> tuple[int, int] | None:
        """What may follow, and the kind of the guess."""
        return self._index.follower(self._recent[-1]) if self._recent else None

    def ahead(self, tokens: Sequence[int]) -> Reader:
        """One that has read these too, and adds nothing to the index."""
        reader = Reader(self._index, recent=self._recent[-HALVES[-1] :])
        for token in tokens:
            reader.read(token)
        return reader


class Rates:
    """How often guesses of each kind were right; earlier ones fade."""

    def __init__(self) -> None:
        long = [1 - 0.5 ** (2**place) for place in range(NUM_LENGTHS)]
        expected = [factor * rate for factor in long for rate in EXPECTED]
        self._right: list[float] = [PRIOR_TESTS * rate for rate in expected]
        self._tested = [PRIOR_TESTS] * len(self._right)

    def of(self, kind: int) -> float:
        return self._right[kind] / self._tested[kind]

    def record(self, kind: int, right: bool) -> None:
        self._right[kind] = FADING * self._right[kind] + right
        self._tested[kind] = FADING * self._tested[kind] + 1
