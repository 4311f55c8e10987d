"""Suffix decoding: what most often followed the longest run of tokens that ends the text.

After SuffixDecoding (Oliaro et al. 2024), whose suffix trees count what followed each run, and
which drafts on while the counts promise enough. Here what they promise is tested on the text.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from specedge.request import DrafterName
from specedge.sampling_options import Sampling

from ..decoding.verification import Draft
from ..sampling.distribution import Floats
from ..sampling.history import History
from .suffix_index import HALVES, NUM_LENGTHS, NUM_SHARES, Index, Names

LEAST_CHANCE = 0.1  # that all of a draft is accepted: about what a row costs, in verify passes
LEAST_RATE = 0.45  # of each token where a model goes on: below it the model is right more often
EXPECTED = (0.3, 0.6, 0.9, 0.95)  # the rate of what followed a long run, by its share
PRIOR_TESTS = 4.0  # what is expected counts as so many tests
FADING = 0.95  # what a test leaves of those of its kind before it: half after 14
MAX_REMEMBERED = 2**15  # tokens of earlier outputs, in some 20 MB


@dataclass(frozen=True)
class Guess:
    """Tokens that may follow a text, and the rate at which guesses of each one's kind were right.

    `num_alone` of them are drafted where nothing else is, `num_before_model` where a model goes on.
    """

    tokens: list[int]
    rates: list[float]
    num_alone: int
    num_before_model: int


class Suffix:
    """Drafts what most often followed the longest run that ends the text, token by token.

    Each token of the text tests what would have been guessed there, drafted or not. So a kind of
    guess has a rate, and a draft goes on while the product of its tokens' rates is at least
    LEAST_CHANCE, or `before_model` while each rate is at least LEAST_RATE. `earlier` outputs are
    asked, too; the guess with the best rate is drafted, the text's own among equals. Tokens are
    certain.
    """

    name = DrafterName.SUFFIX

    def __init__(self, earlier: Remembered | None = None, before_model: bool = False) -> None:
        self._text = _Text(earlier)
        self._before_model = before_model

    def for_chain(self) -> Suffix:
        """Return one that reads the same text, for use before a model."""
        twin = copy.copy(self)
        twin._before_model = True
        return twin

    def guess(self, history: History, max_tokens: int) -> Guess:
        """Return what may follow as far as any draft goes."""
        return self._text.guess(history, max_tokens)

    def propose(
        self, history: History, max_tokens: int, sampling: Sampling, uniforms: Floats
    ) -> Draft:
        guess = self._text.guess(history, max_tokens)
        count = guess.num_before_model if self._before_model else guess.num_alone
        return Draft(guess.tokens[: min(count, max_tokens)])

    def truncate(self, length: int) -> None:
        """Another text, or one that goes on otherwise, is read from its start."""
        self._text.truncate(length)


class _Text:
    """A text as far as it was read: its index, and the rates of guesses in it."""

    def __init__(self, earlier: Remembered | None) -> None:
        self._earlier = earlier
        self._length = 0
        self._guessed = -1  # tokens that the last guess was to have at most; -1: there is none
        self._last = Guess([], [], 0, 0)
        self._rates = Rates()
        self._readers: list[Reader] = []
        self._begin()

    def guess(self, history: History, max_tokens: int) -> Guess:
        """Return the last guess again where the text is as it was and that was long enough."""
        drafted = history.last(history.length - history.num_kept)
        if (missing := history.num_kept - self._length) or drafted or max_tokens > self._guessed:
            new = history.last(missing + len(drafted))
            self._read(new[:missing])
            if drafted:
                return self._guess([reader.ahead(drafted) for reader in self._readers], max_tokens)
            self._last, self._guessed = self._guess(self._readers, max_tokens), max_tokens
        return self._last

    def _guess(self, readers: Sequence[Reader], max_tokens: int) -> Guess:
        tokens: list[int] = []
        rates: list[float] = []
        alone = before = True
        num_alone = num_before_model = 0
        chance = 1.0
        while len(tokens) < max_tokens and (guesses := _guesses(readers)):
            token, kind = max(guesses, key=lambda guess: self._rates.of(guess[1]))
            rate = self._rates.of(kind)
            chance *= rate
            alone = alone and chance >= LEAST_CHANCE
            before = before and rate >= LEAST_RATE
            if not (alone or before):
                break
            tokens.append(token)
            rates.append(rate)
            num_alone += alone
            num_before_model += before
            if readers is self._readers:  # few guesses come so far that copies of these pay
                readers = [reader.ahead(()) for reader in readers]
            for reader in readers:
                reader.read(token)
        return Guess(tokens, rates, num_alone, num_before_model)

    def truncate(self, length: int) -> None:
        if length < self._length or not length:
            self._begin()

    def _begin(self) -> None:
        self._length, self._guessed = 0, -1
        self._rates = Rates()
        self._readers = [Reader(Index(), adds=True)]
        if self._earlier is not None:
            self._readers += [Reader(index, NUM_KINDS) for index in self._earlier.indexes]

    def _read(self, tokens: Sequence[int]) -> None:
        readers, record = self._readers, self._rates.record
        for token in tokens:
            for reader in readers:
                if guess := reader.guess():
                    record(guess[1], guess[0] == token)
            for reader in readers:
                reader.read(token)
        self._length += len(tokens)


class Reader:
    """A text as an index names it, which holds the text itself or others."""

    def __init__(
        self, index: Index, first_kind: int = 0, adds: bool = False, recent: Sequence[Names] = ()
    ) -> None:
        self._index, self._first_kind, self._adds = index, first_kind, adds
        self._recent = list(recent)

    def read(self, token: int) -> None:
        index, recent = self._index, self._recent
        recent.append((index.add if self._adds else index.names)(recent, token))
        if len(recent) > 4 * HALVES[-1]:
            del recent[: -HALVES[-1]]

    def guess(self) -> tuple[int, int] | None:
        """What may follow, and the kind of the guess."""
        found = self._index.follower(self._recent[-1]) if self._recent else None
        return found and (found[0], self._first_kind + found[1])

    def ahead(self, tokens: Sequence[int]) -> Reader:
        """One that has read these too, and adds nothing to the index."""
        reader = Reader(self._index, self._first_kind, recent=self._recent[-HALVES[-1] :])
        for token in tokens:
            reader.read(token)
        return reader


def _guesses(readers: Sequence[Reader]) -> list[tuple[int, int]]:
    """What each that knows anything guesses, and the guess's kind."""
    return [guess for reader in readers if (guess := reader.guess())]


NUM_KINDS = NUM_LENGTHS * NUM_SHARES  # of guesses from the text; those from others are as many more


class Rates:
    """How often guesses of each kind were right; earlier ones fade."""

    def __init__(self) -> None:
        long = [1 - 0.5 ** (2**place) for place in range(NUM_LENGTHS)]
        expected = [factor * rate for factor in long for rate in EXPECTED]
        self._right: list[float] = [PRIOR_TESTS * rate for rate in 2 * expected]
        self._tested = [PRIOR_TESTS] * len(self._right)

    def of(self, kind: int) -> float:
        return self._right[kind] / self._tested[kind]

    def record(self, kind: int, right: bool) -> None:
        self._right[kind] = FADING * self._right[kind] + right
        self._tested[kind] = FADING * self._tested[kind] + 1


class Remembered:
    """The latest outputs of a pipeline's requests, MAX_REMEMBERED tokens at most.

    They lie in two indexes. When the newer has half of that, it takes the place of the older.
    """

    def __init__(self) -> None:
        self.indexes = (Index(), Index())

    def add(self, tokens: Sequence[int]) -> None:
        """Remember an output; of a very long one its end."""
        half = MAX_REMEMBERED // 2
        newer, older = self.indexes
        if newer.num_tokens + len(tokens) > half:
            newer, older = Index(), newer
        self.indexes = newer, older
        reader = Reader(newer, adds=True)
        for token in tokens[-half:]:
            reader.read(token)
