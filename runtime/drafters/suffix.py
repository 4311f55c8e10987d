"""Suffix decoding, and prompt lookup as suffix decoding with fixed match lengths.

The method follows SuffixDecoding (Oliaro et al. 2024), which counts the continuations of each token
sequence in a suffix tree. Here, acceptance rates are measured on the text itself instead of being
derived from the counts. A run is a sequence of 1, 2, 4, 8 or 16 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from specedge.request import DrafterName
from specedge.sampling_options import Sampling

from ..decoding.protocols import Drafter
from ..decoding.verification import Draft
from ..sampling.distribution import Floats
from ..sampling.history import History, common_prefix_length
from ..sampling.source import Source

MIN_PROBABILITY = 0.1  # minimum probability that a whole draft is accepted
MIN_RATE = 0.45  # minimum rate of a token before a draft model, which is more accurate below it
PRIOR_RATES = (0.3, 0.6, 0.9, 0.95)  # prior acceptance rates after a long match, by frequency class
PRIOR_TESTS = 4.0  # weight of a prior rate, in tests
DECAY = 0.95  # decay of earlier tests of a class: a weight of one half after 14 tests
MAX_REMEMBERED = 2**15  # maximum tokens of earlier outputs, about 20 MB

NUM_LENGTHS = 5  # matches of 1, 2, 4, 8 and 16 tokens; others gave no gain
MAX_LENGTH = 2 ** (NUM_LENGTHS - 1)
NUM_FREQUENCIES = 4  # classes of the most frequent follower's relative frequency
NUM_CLASSES = NUM_LENGTHS * NUM_FREQUENCIES  # for the text, and as many for earlier outputs

SEPARATOR = -1  # before each text of an index

Runs = list[int]  # numbers of the runs that end at a position, shortest first


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


class Suffix(Drafter):
    """Drafter of the most frequent continuation of the longest matching suffix of the text.

    Each token of the text tests the prediction at its position, drafted or not, so each class of
    predictions has a measured acceptance rate. A draft ends when the product of its tokens' rates
    falls below MIN_PROBABILITY. Earlier outputs are searched, too; the prediction with the best
    rate is used, the text's on ties. Drafts are deterministic.

    Args:
        earlier: Outputs of earlier requests to draft from.
        min_match: Shortest match, rounded down to 1, 2, 4, 8 or 16 tokens.
        max_match: Longest match, rounded down likewise.
    """

    name = DrafterName.SUFFIX

    def __init__(
        self,
        earlier: EarlierOutputs | None = None,
        min_match: int = 1,
        max_match: int = MAX_LENGTH,
    ) -> None:
        if not 1 <= min_match <= max_match:
            raise ValueError(
                f"lookup_min must be between 1 and lookup_max, got {min_match} and {max_match}"
            )
        self._earlier = earlier
        self._levels = range(_level(min_match), _level(max_match) + 1)
        self._begin()

    def _begin(self) -> None:
        self._length = 0
        self._max_predicted = -1  # limit of the last prediction; -1 if there is none
        self._last = Prediction([], [], 0, 0)
        self._rates = ClassRates()
        self._readers = [_Reader(SuffixIndex(), self._levels, adds=True)]
        if self._earlier is not None:
            self._readers += [
                _Reader(index, self._levels, NUM_CLASSES)
                for index in self._earlier.indexes
                if index.num_tokens
            ]

    def propose(
        self, history: History, max_tokens: int, sampling: Sampling, uniforms: Floats
    ) -> Draft:
        prediction = self.predict(history, max_tokens)
        return Draft(prediction.tokens[: min(prediction.num_standalone, max_tokens)])

    def truncate(self, length: int) -> None:
        """Roll back; the index is rebuilt if the text was shortened or replaced."""
        if length < self._length or not length:
            self._begin()

    def predict(self, history: History, max_tokens: int) -> Prediction:
        """Return the predicted continuation of up to `max_tokens` tokens.

        The last prediction is reused for the same text and length.
        """
        if not self._length and history.source is not None:
            self._read_source(history.source)
        drafted = history.last(history.length - history.num_committed)
        if (
            (missing := history.num_committed - self._length)
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

    def _read_source(self, source: Source) -> None:
        """Read the source as an earlier text: summaries copy from it."""
        if tokens := source.tokens:
            self._read(tokens)
            self._length = 0
            for reader in self._readers:
                reader.begin_text()

    def _read(self, tokens: Sequence[int]) -> None:
        readers, record = self._readers, self._rates.record
        for token in tokens:
            for reader in readers:
                if follower := reader.follower():
                    record(follower[1], follower[0] == token)
                reader.read(token)
        self._length += len(tokens)


class SuffixBeforeModel(Drafter):
    """Suffix decoding of `suffix` whose draft a draft model continues.

    A draft ends when a token's rate falls below MIN_RATE.
    """

    name = DrafterName.SUFFIX

    def __init__(self, suffix: Suffix) -> None:
        self._suffix = suffix

    def propose(
        self, history: History, max_tokens: int, sampling: Sampling, uniforms: Floats
    ) -> Draft:
        prediction = self._suffix.predict(history, max_tokens)
        return Draft(prediction.tokens[: min(prediction.num_before_model, max_tokens)])

    def truncate(self, length: int) -> None:
        self._suffix.truncate(length)


def count_accepted(draft: Sequence[int], tokens: Sequence[int]) -> tuple[int, int]:
    """Return the numbers of accepted and of tested tokens of a deterministic draft."""
    num_accepted = common_prefix_length(draft, tokens)
    return num_accepted, min(num_accepted + 1, len(draft), len(tokens))


def _level(length: int) -> int:
    """Return the index of the longest indexed match length up to `length`."""
    return min(length.bit_length(), NUM_LENGTHS) - 1


class _Reader:
    """Position of a text in an index of the text itself or of earlier outputs."""

    def __init__(
        self,
        index: SuffixIndex,
        levels: range,
        first_class: int = 0,
        adds: bool = False,
        tail: Sequence[int] = (),
    ) -> None:
        self._index, self._levels, self._first_class, self._adds = index, levels, first_class, adds
        self._tail = list(tail)  # last tokens, if they are not added
        self._runs: Runs = []

    def read(self, token: int) -> None:
        if self._adds:
            self._runs = self._index.add(self._runs, token)
        else:
            self._tail = [*self._tail[1 - MAX_LENGTH :], token]
            self._runs = self._index.find(self._tail)

    def begin_text(self) -> None:
        """Begin another text."""
        self._tail, self._runs = [], []
        if self._adds:
            self._index.begin_text()

    def follower(self) -> tuple[int, int] | None:
        """Return the most frequent next token and its class, or None without a match."""
        follower = self._index.follower(self._runs, self._levels)
        return follower and (follower[0], self._first_class + follower[1])

    def ahead(self, tokens: Sequence[int]) -> _Reader:
        """Return a reader after these further tokens, which are not added to the index."""
        tail = self._index.last_text() if self._adds else self._tail
        reader = _Reader(self._index, self._levels, self._first_class, tail=tail)
        reader._runs = self._runs
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
        newer.begin_text()
        reader = _Reader(newer, range(NUM_LENGTHS), adds=True)
        for token in tokens[-half:]:
            reader.read(token)


class SuffixIndex:
    """Counts of the tokens that followed each run of 1, 2, 4, 8 and 16 tokens.

    The most frequent follower of each run is kept, the latest on ties. Most runs occur once: such a
    run stands for the longer runs that end with it, which are indexed when it occurs again. So a
    token of new text adds one run, and one of a repeated text at most five, about 500 bytes. Runs
    are numbered, since objects would have to be garbage-collected.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._tokens = [SEPARATOR] * MAX_LENGTH
        self._runs: dict[int | tuple[int, ...], int] = {}  # number of a run
        self._first: list[int] = []  # end of the only occurrence by number; 0 if there are more
        self._best: list[int] = []  # most frequent follower by number
        self._count: list[int] = []  # its count by number
        self._total: list[int] = []  # count of all followers by number
        self._others: dict[int, int] = {}  # count of each other follower by number and token

    def begin_text(self) -> None:
        """Begin another text, whose runs do not include tokens of the last one."""
        self._tokens.append(SEPARATOR)

    def last_text(self) -> list[int]:
        """Return the last tokens of the text, at most MAX_LENGTH."""
        tokens = self._tokens[-MAX_LENGTH:]
        return [*takewhile(lambda token: token != SEPARATOR, reversed(tokens))][::-1]

    def find(self, tail: list[int]) -> Runs:
        """Return the runs that end with these last tokens of a text."""
        tokens, runs, length = self._tokens, [], 1
        key: int | tuple[int, ...] = tail[-1]
        while (run := self._runs.get(key)) is not None:
            runs.append(run)
            length *= 2
            if end := self._first[run]:
                while length <= len(tail) and tokens[end - length : end] == tail[-length:]:
                    runs.append(run)
                    length *= 2
                break
            if length > len(tail):
                break
            key = tuple(tail[-length:])
        return runs

    def add(self, previous: Runs, token: int) -> Runs:
        """Append a token to the text, after the runs `previous`; return the runs it ends."""
        best, counts, totals = self._best, self._count, self._total
        for run in previous:
            total = totals[run]
            totals[run] = total + 1
            if not total or best[run] == token:
                best[run] = token
                counts[run] += 1
            else:
                self._count_other(run, token)
        self.num_tokens += 1
        tokens = self._tokens
        tokens.append(token)
        end, length = len(tokens), 1
        runs: Runs = []
        key: int | tuple[int, ...] = token
        while (number := self._runs.get(key)) is not None:
            runs.append(number)
            length *= 2
            if length > MAX_LENGTH:
                return runs
            if first := self._first[number]:
                self._first[number] = 0
                longer = self._new_run(tuple(tokens[first - length : first]), first)
                best[longer], counts[longer] = best[number], counts[number]
                totals[longer] = totals[number]
            key = tuple(tokens[end - length :])
        runs.append(self._new_run(key, end))
        return runs

    def follower(self, runs: Runs, levels: range) -> tuple[int, int] | None:
        """Return the most frequent follower of the longest run with followers, and its class.

        The class is NUM_FREQUENCIES times the level of the run's length, plus the class of the
        follower's relative frequency. Only runs of the given levels count.
        """
        totals = self._total
        for level in range(min(len(runs), levels.stop) - 1, levels.start - 1, -1):
            run = runs[level]
            if total := totals[run]:
                frequency = NUM_FREQUENCIES * self._count[run] // (total + 1)
                return self._best[run], NUM_FREQUENCIES * level + frequency
        return None

    def _new_run(self, key: int | tuple[int, ...], end: int) -> int:
        """Number a run that occurred once, up to `end`."""
        run = self._runs[key] = len(self._first)
        self._first.append(end)
        for values in (self._best, self._count, self._total):
            values.append(0)
        return run

    def _count_other(self, run: int, token: int) -> None:
        """Count a follower that was not the most frequent one so far."""
        best, counts, others = self._best, self._count, self._others
        key = run << 32 | token
        count = others.pop(key, 0) + 1
        if count < counts[run]:
            others[key] = count
        else:
            others[run << 32 | best[run]] = counts[run]
            best[run], counts[run] = token, count
