"""Suffix decoding, and prompt lookup (n-gram matching) as its form with fixed match lengths.

After SuffixDecoding (Oliaro et al. 2024), whose suffix trees count the continuations of each run of
tokens and draft while the counts promise enough. Here the promise is tested on the text itself.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from specedge.request import DrafterName
from specedge.sampling_options import Sampling

from ..decoding.verification import Draft
from ..sampling.distribution import Floats
from ..sampling.history import History, common_prefix_length

MIN_CHANCE = 0.1  # that all of a draft is accepted: about a row's share of a verify pass
MIN_RATE = 0.45  # of each token before a draft model: below it the model is right more often
PRIOR_RATES = (0.3, 0.6, 0.9, 0.95)  # acceptance rate after a long match, by the follower's share
PRIOR_TESTS = 4.0  # tests that a prior rate counts as
DECAY = 0.95  # weight that a test leaves to those of its class before it: half after 14
MAX_REMEMBERED = 2**15  # tokens of earlier outputs, in some 20 MB

HALVES = (1, 2, 4, 8)  # halves of the matches of more than one token
NUM_LENGTHS = 1 + len(HALVES)  # matches of 1, 2, 4, 8 and 16 tokens; others added nothing
NUM_SHARES = 4  # classes of followers by their share of all that followed
NUM_CLASSES = NUM_LENGTHS * NUM_SHARES  # of guesses from the text; as many from earlier outputs

Names = list[int]  # names of the runs that end at a position, the shortest first


@dataclass(frozen=True)
class Guess:
    """Tokens that may follow a text, and the measured acceptance rate of each one's class.

    `num_alone` of them are drafted by suffix decoding alone, `num_before_model` before a model.
    """

    tokens: list[int]
    rates: list[float]
    num_alone: int
    num_before_model: int


class Suffix:
    """Drafter of the tokens that most often followed the longest match of the text's end.

    Each token of the text tests the guess at its position, drafted or not. So each class of guesses
    has an acceptance rate; a draft goes on while the product of its tokens' rates is at least
    MIN_CHANCE, or `before_model` while each rate is at least MIN_RATE. `earlier` outputs are
    searched, too; the guess with the best rate is drafted, the text's own on ties. Tokens are
    chosen without randomness.

    Args:
        earlier: Outputs of earlier requests to draft from.
        before_model: True if a draft model continues the draft.
        min_match: Shortest match, rounded down to 1, 2, 4, 8 or 16 tokens.
        max_match: Longest match, rounded down likewise.
    """

    name = DrafterName.SUFFIX

    def __init__(
        self,
        earlier: EarlierOutputs | None = None,
        before_model: bool = False,
        min_match: int = 1,
        max_match: int = 2 ** len(HALVES),
    ) -> None:
        if not 1 <= min_match <= max_match:
            raise ValueError(
                f"lookup_min must be between 1 and lookup_max, got {min_match} and {max_match}"
            )
        levels = range(_level(min_match), _level(max_match) + 1)
        self._state = _SuffixState(earlier, levels)
        self._before_model = before_model

    def for_chain(self) -> Suffix:
        """Return a drafter over the same state, for use before a draft model."""
        twin = copy.copy(self)
        twin._before_model = True
        return twin

    def guess(self, history: History, max_tokens: int) -> Guess:
        """Return the continuation for use alone and before a model."""
        return self._state.guess(history, max_tokens)

    def propose(
        self, history: History, max_tokens: int, sampling: Sampling, uniforms: Floats
    ) -> Draft:
        """Draft up to `max_tokens` tokens, as `Drafter.propose`."""
        guess = self._state.guess(history, max_tokens)
        count = guess.num_before_model if self._before_model else guess.num_alone
        return Draft(guess.tokens[: min(count, max_tokens)])

    def truncate(self, length: int) -> None:
        """Roll back; a text that was shortened or is another one is read from its start."""
        self._state.truncate(length)


def count_accepted(draft: Sequence[int], tokens: Sequence[int]) -> tuple[int, int]:
    """Return how many tokens of a copied draft the text accepts, and how many it tests."""
    num_accepted = common_prefix_length(draft, tokens)
    return num_accepted, min(num_accepted + 1, len(draft), len(tokens))


def _level(length: int) -> int:
    """Return the index of the longest indexed match length up to `length`."""
    return min(length.bit_length(), NUM_LENGTHS) - 1


class _SuffixState:
    """Index of a text as far as it was read, and the acceptance rates of guesses in it."""

    def __init__(self, earlier: EarlierOutputs | None, levels: range) -> None:
        self._earlier, self._levels = earlier, levels
        self._length = 0
        self._max_guessed = -1  # limit of the last guess; -1 if there is none
        self._last = Guess([], [], 0, 0)
        self._rates = ClassRates()
        self._readers: list[_Reader] = []
        self._begin()

    def guess(self, history: History, max_tokens: int) -> Guess:
        """Return a guess, the last one if the text is the same and it was long enough."""
        drafted = history.last(history.length - history.num_kept)
        if (
            (missing := history.num_kept - self._length)
            or drafted
            or max_tokens > self._max_guessed
        ):
            new = history.last(missing + len(drafted))
            self._read(new[:missing])
            if drafted:
                return self._guess([reader.ahead(drafted) for reader in self._readers], max_tokens)
            self._last, self._max_guessed = self._guess(self._readers, max_tokens), max_tokens
        return self._last

    def _guess(self, readers: Sequence[_Reader], max_tokens: int) -> Guess:
        tokens: list[int] = []
        rates: list[float] = []
        alone = before = True
        num_alone = num_before_model = 0
        chance = 1.0
        while len(tokens) < max_tokens and (guesses := _guesses(readers)):
            token, guess_class = max(guesses, key=lambda guess: self._rates.of(guess[1]))
            rate = self._rates.of(guess_class)
            chance *= rate
            alone = alone and chance >= MIN_CHANCE
            before = before and rate >= MIN_RATE
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
        self._length, self._max_guessed = 0, -1
        self._rates = ClassRates()
        self._readers = [_Reader(SuffixIndex(), self._levels, adds=True)]
        if self._earlier is not None:
            self._readers += [
                _Reader(index, self._levels, NUM_CLASSES)
                for index in self._earlier.indexes
                if index.num_tokens
            ]

    def _read(self, tokens: Sequence[int]) -> None:
        readers, record = self._readers, self._rates.record
        for token in tokens:
            for reader in readers:
                if guess := reader.guess():
                    record(guess[1], guess[0] == token)
            for reader in readers:
                reader.read(token)
        self._length += len(tokens)


class _Reader:
    """Position of a text in an index, which holds the text itself or others."""

    def __init__(
        self,
        index: SuffixIndex,
        levels: range,
        first_class: int = 0,
        adds: bool = False,
        recent: Sequence[Names] = (),
    ) -> None:
        self._index, self._levels, self._first_class, self._adds = index, levels, first_class, adds
        self._recent = list(recent)

    def read(self, token: int) -> None:
        index, recent = self._index, self._recent
        recent.append((index.add if self._adds else index.names)(recent, token))
        if len(recent) > 4 * HALVES[-1]:
            del recent[: -HALVES[-1]]

    def guess(self) -> tuple[int, int] | None:
        """Return the likeliest next token and the class of the guess, if there is a match."""
        if not self._recent:
            return None
        follower = self._index.follower(self._recent[-1], self._levels)
        return follower and (follower[0], self._first_class + follower[1])

    def ahead(self, tokens: Sequence[int]) -> _Reader:
        """Return a reader that has read these tokens, too, and adds nothing to the index."""
        recent = self._recent[-HALVES[-1] :]
        reader = _Reader(self._index, self._levels, self._first_class, recent=recent)
        for token in tokens:
            reader.read(token)
        return reader


def _guesses(readers: Sequence[_Reader]) -> list[tuple[int, int]]:
    return [guess for reader in readers if (guess := reader.guess())]


class ClassRates:
    """Acceptance rates of guesses by class, as exponential averages."""

    def __init__(self) -> None:
        factors = [1 - 0.5 ** (2**level) for level in range(NUM_LENGTHS)]
        priors = [factor * rate for factor in factors for rate in PRIOR_RATES]
        self._accepted: list[float] = [PRIOR_TESTS * rate for rate in 2 * priors]
        self._tested = [PRIOR_TESTS] * len(self._accepted)

    def of(self, guess_class: int) -> float:
        """Return the rate of a class."""
        return self._accepted[guess_class] / self._tested[guess_class]

    def record(self, guess_class: int, is_accepted: bool) -> None:
        """Count a test."""
        self._accepted[guess_class] = DECAY * self._accepted[guess_class] + is_accepted
        self._tested[guess_class] = DECAY * self._tested[guess_class] + 1


class EarlierOutputs:
    """Latest outputs of a pipeline's requests, at most MAX_REMEMBERED tokens.

    They are in two indexes. When the newer one holds half of that, it replaces the older one.
    """

    def __init__(self) -> None:
        self.indexes = (SuffixIndex(), SuffixIndex())

    def add(self, tokens: Sequence[int]) -> None:
        """Add an output, of a very long one its end."""
        half = MAX_REMEMBERED // 2
        newer, older = self.indexes
        if newer.num_tokens + len(tokens) > half:
            newer, older = SuffixIndex(), newer
        self.indexes = newer, older
        reader = _Reader(newer, range(NUM_LENGTHS), adds=True)
        for token in tokens[-half:]:
            reader.read(token)


class SuffixIndex:
    """Counts of the tokens that followed each run of 1, 2, 4, 8 and 16 tokens.

    Of each run the most frequent follower is kept, the latest on ties. A run is named by the names
    of its halves (Karp, Miller, Rosenberg 1972): so a token costs five steps, and no hash stands
    for the tokens of a run. A token adds at most five names and as many counts, some 700 bytes.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._names: dict[int, int] = {}  # a token, or a pair of names, to the name of the run
        self._best = array("q", [0])  # by name, from 1: the most frequent follower,
        self._count = array("q", [0])  # its count,
        self._total = array("q", [0])  # and the count of all followers
        self._others: dict[int, int] = {}  # a name and another follower, to its count

    def names(self, recent: Sequence[Names], token: int) -> Names:
        """Return the names of the runs that end with a token, as far as they have occurred.

        `recent` are the names at the positions before it, at least at the last 8.
        """
        names: Names = []
        key = token
        while (name := self._names.get(key)) is not None:
            names.append(name)
            level = len(names) - 1
            if level == len(HALVES) or not (first := _first_half(recent, level)):
                break
            key = first << 32 | name
        return names

    def add(self, recent: Sequence[Names], token: int) -> Names:
        """Add a token to a text of the index; return the names of the runs that end with it."""
        if recent:
            self._follow(recent[-1], token)
        self.num_tokens += 1
        names, size, count = self._names, len(self._total), len(recent)
        new_names: Names = []
        key, level = token, 0
        while True:
            name = names.setdefault(key, size)
            size += name == size
            new_names.append(name)
            if level == len(HALVES) or (half := HALVES[level]) > count:
                break
            if level >= len(first := recent[-half]):
                break
            key = first[level] << 32 | name
            level += 1
        zeros = bytes(8 * (size - len(self._total)))
        for values in (self._best, self._count, self._total):
            values.frombytes(zeros)
        return new_names

    def follower(self, names: Names, levels: range) -> tuple[int, int] | None:
        """Return the most frequent follower of the longest run with followers, and its class.

        The class is NUM_SHARES times the level of the run's length, plus the share's class. Only
        runs of these levels count.
        """
        total = self._total
        for level in range(min(len(names), levels.stop) - 1, levels.start - 1, -1):
            name = names[level]
            if count := total[name]:
                share = NUM_SHARES * self._count[name] // (count + 1)
                return self._best[name], NUM_SHARES * level + share
        return None

    def _follow(self, names: Names, token: int) -> None:
        best, counts, total, others = self._best, self._count, self._total, self._others
        for name in names:
            if not total[name]:
                total[name], best[name], counts[name] = 1, token, 1
                continue
            total[name] += 1
            if best[name] == token:
                counts[name] += 1
                continue
            key = name << 32 | token
            count = others.pop(key, 0) + 1
            if count < counts[name]:
                others[key] = count
                continue
            if counts[name]:
                others[name << 32 | best[name]] = counts[name]
            best[name], counts[name] = token, count


def _first_half(recent: Sequence[Names], level: int) -> int:
    """Return the name of the first half of the run at `level` + 1; 0 if there is none."""
    half = HALVES[level]
    return recent[-half][level] if half <= len(recent) and level < len(recent[-half]) else 0
