"""Suffix decoding, and prompt lookup as suffix decoding with fixed match lengths.

The method follows SuffixDecoding (Oliaro et al. 2024), which counts the continuations of each token
sequence in a suffix tree. Here, acceptance rates are measured on the text itself instead of being
derived from the counts. A run is a sequence of 1, 2, 4, 8 or 16 tokens.
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

MIN_PROBABILITY = 0.1  # minimum probability that a whole draft is accepted
MIN_RATE = 0.45  # minimum rate of a token before a draft model, which is more accurate below it
PRIOR_RATES = (0.3, 0.6, 0.9, 0.95)  # prior acceptance rates after a long match, by frequency class
PRIOR_TESTS = 4.0  # weight of a prior rate, in tests
DECAY = 0.95  # decay of earlier tests of a class: a weight of one half after 14 tests
MAX_REMEMBERED = 2**15  # maximum tokens of earlier outputs, about 20 MB

HALVES = (1, 2, 4, 8)  # half lengths of the matches of more than one token
NUM_LENGTHS = 1 + len(HALVES)  # matches of 1, 2, 4, 8 and 16 tokens; others gave no gain
NUM_FREQUENCIES = 4  # classes of the most frequent follower's relative frequency
NUM_CLASSES = NUM_LENGTHS * NUM_FREQUENCIES  # for the text, and as many for earlier outputs

Names = list[int]  # names of the runs that end at a position, shortest first


@dataclass(frozen=True)
class Prediction:
    """Predicted continuation of a text, with the measured acceptance rate of each token's class.

    The first `num_standalone` tokens are drafted if suffix decoding is used alone, the first
    `num_before_model` if a draft model continues the draft.
    """

    tokens: list[int]
    rates: list[float]
    num_standalone: int
    num_before_model: int


class Suffix:
    """Drafter of the most frequent continuation of the longest matching suffix of the text.

    Each token of the text tests the prediction at its position, drafted or not, so each class of
    predictions has a measured acceptance rate. A draft ends when the product of its tokens' rates
    falls below MIN_PROBABILITY or, with `before_model`, when a rate falls below MIN_RATE. Earlier
    outputs are searched, too; the prediction with the best rate is used, the text's on ties. Drafts
    are deterministic.

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
        drafter = copy.copy(self)
        drafter._before_model = True
        return drafter

    def predict(self, history: History, max_tokens: int) -> Prediction:
        """Return the predicted continuation of up to `max_tokens` tokens."""
        return self._state.predict(history, max_tokens)

    def propose(
        self, history: History, max_tokens: int, sampling: Sampling, uniforms: Floats
    ) -> Draft:
        prediction = self._state.predict(history, max_tokens)
        count = prediction.num_before_model if self._before_model else prediction.num_standalone
        return Draft(prediction.tokens[: min(count, max_tokens)])

    def truncate(self, length: int) -> None:
        """Roll back; the index is rebuilt if the text was shortened or replaced."""
        self._state.truncate(length)


def count_accepted(draft: Sequence[int], tokens: Sequence[int]) -> tuple[int, int]:
    """Return the numbers of accepted and of tested tokens of a deterministic draft."""
    num_accepted = common_prefix_length(draft, tokens)
    return num_accepted, min(num_accepted + 1, len(draft), len(tokens))


def _level(length: int) -> int:
    """Return the index of the longest indexed match length up to `length`."""
    return min(length.bit_length(), NUM_LENGTHS) - 1


class _SuffixState:
    """Index of the text so far, and acceptance rates of predictions from it."""

    def __init__(self, earlier: EarlierOutputs | None, levels: range) -> None:
        self._earlier, self._levels = earlier, levels
        self._length = 0
        self._max_predicted = -1  # limit of the last prediction; -1 if there is none
        self._last = Prediction([], [], 0, 0)
        self._rates = ClassRates()
        self._readers: list[_Reader] = []
        self._begin()

    def predict(self, history: History, max_tokens: int) -> Prediction:
        """Return a prediction; the last one is reused for the same text and length."""
        drafted = history.last(history.length - history.num_kept)
        if (
            (missing := history.num_kept - self._length)
            or drafted
            or max_tokens > self._max_predicted
        ):
            new = history.last(missing + len(drafted))
            self._read(new[:missing])
            if drafted:
                ahead = [reader.ahead(drafted) for reader in self._readers]
                return self._extend(ahead, max_tokens)
            self._last, self._max_predicted = self._extend(self._readers, max_tokens), max_tokens
        return self._last

    def _extend(self, readers: Sequence[_Reader], max_tokens: int) -> Prediction:
        tokens: list[int] = []
        rates: list[float] = []
        is_standalone = is_before_model = True
        num_standalone = num_before_model = 0
        probability = 1.0
        while len(tokens) < max_tokens and (followers := _followers(readers)):
            token, follower_class = max(followers, key=lambda item: self._rates.rate(item[1]))
            rate = self._rates.rate(follower_class)
            probability *= rate
            is_standalone = is_standalone and probability >= MIN_PROBABILITY
            is_before_model = is_before_model and rate >= MIN_RATE
            if not (is_standalone or is_before_model):
                break
            tokens.append(token)
            rates.append(rate)
            num_standalone += is_standalone
            num_before_model += is_before_model
            if readers is self._readers:  # copied late: most predictions end earlier
                readers = [reader.ahead(()) for reader in readers]
            for reader in readers:
                reader.read(token)
        return Prediction(tokens, rates, num_standalone, num_before_model)

    def truncate(self, length: int) -> None:
        if length < self._length or not length:
            self._begin()

    def _begin(self) -> None:
        self._length, self._max_predicted = 0, -1
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
                if follower := reader.follower():
                    record(follower[1], follower[0] == token)
            for reader in readers:
                reader.read(token)
        self._length += len(tokens)


class _Reader:
    """Position of a text in an index of the text itself or of earlier outputs."""

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

    def follower(self) -> tuple[int, int] | None:
        """Return the most frequent next token and its class, or None without a match."""
        if not self._recent:
            return None
        follower = self._index.follower(self._recent[-1], self._levels)
        return follower and (follower[0], self._first_class + follower[1])

    def ahead(self, tokens: Sequence[int]) -> _Reader:
        """Return a reader after these further tokens, which are not added to the index."""
        recent = self._recent[-HALVES[-1] :]
        reader = _Reader(self._index, self._levels, self._first_class, recent=recent)
        for token in tokens:
            reader.read(token)
        return reader


def _followers(readers: Sequence[_Reader]) -> list[tuple[int, int]]:
    return [follower for reader in readers if (follower := reader.follower())]


class ClassRates:
    """Acceptance rates of predictions by class, as exponential averages."""

    def __init__(self) -> None:
        factors = [1 - 0.5 ** (2**level) for level in range(NUM_LENGTHS)]
        priors = [factor * rate for factor in factors for rate in PRIOR_RATES]
        self._accepted: list[float] = [PRIOR_TESTS * rate for rate in 2 * priors]
        self._tested = [PRIOR_TESTS] * len(self._accepted)

    def rate(self, follower_class: int) -> float:
        """Return the acceptance rate of a class."""
        return self._accepted[follower_class] / self._tested[follower_class]

    def record(self, follower_class: int, is_accepted: bool) -> None:
        """Count a test."""
        self._accepted[follower_class] = DECAY * self._accepted[follower_class] + is_accepted
        self._tested[follower_class] = DECAY * self._tested[follower_class] + 1


class EarlierOutputs:
    """Latest outputs of a pipeline's requests, at most MAX_REMEMBERED tokens.

    They are kept in two indexes; when the newer one is half full, it replaces the older one.
    """

    def __init__(self) -> None:
        self.indexes = (SuffixIndex(), SuffixIndex())

    def add(self, tokens: Sequence[int]) -> None:
        """Add an output; only the end of a very long one is kept."""
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

    The most frequent follower of each run is kept, the latest on ties. Runs are named by the names
    of their halves (Karp, Miller and Rosenberg 1972), so a token takes five steps and hash
    collisions cannot occur. A token adds at most five names and counts, about 700 bytes.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._names: dict[int, int] = {}  # name of a run by token or pair of names
        self._best = array("q", [0])  # most frequent follower by name, from 1
        self._count = array("q", [0])  # its count by name
        self._total = array("q", [0])  # count of all followers by name
        self._others: dict[int, int] = {}  # count of each other follower by name and token

    def names(self, recent: Sequence[Names], token: int) -> Names:
        """Return the names of the indexed runs that end with a token.

        `recent` holds the names at the previous positions, at least the last 8.
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
        """Append a token to an indexed text; return the names of the runs that end with it."""
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

        The class is NUM_FREQUENCIES times the level of the run's length, plus the class of the
        follower's relative frequency. Only runs of the given levels count.
        """
        total = self._total
        for level in range(min(len(names), levels.stop) - 1, levels.start - 1, -1):
            name = names[level]
            if count := total[name]:
                frequency = NUM_FREQUENCIES * self._count[name] // (count + 1)
                return self._best[name], NUM_FREQUENCIES * level + frequency
        return None

    def _follow(self, names: Names, token: int) -> None:
        best, counts, total, other_counts = self._best, self._count, self._total, self._others
        for name in names:
            if not total[name]:
                total[name], best[name], counts[name] = 1, token, 1
                continue
            total[name] += 1
            if best[name] == token:
                counts[name] += 1
                continue
            key = name << 32 | token
            count = other_counts.pop(key, 0) + 1
            if count < counts[name]:
                other_counts[key] = count
                continue
            if counts[name]:
                other_counts[name << 32 | best[name]] = counts[name]
            best[name], counts[name] = token, count


def _first_half(recent: Sequence[Names], level: int) -> int:
    """Return the name of the first half of the run at `level` + 1; 0 if there is none."""
    half = HALVES[level]
    return recent[-half][level] if half <= len(recent) and level < len(recent[-half]) else 0
