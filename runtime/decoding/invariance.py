"""Pass-length invariance (batch invariance), and the noise of logits where it does not hold.

A pass length T is invariant if the logits of a token are bitwise identical in passes of T tokens
and of one. T tokens per pass, V vocabulary entries, n tokens of text.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from ..sampling.distribution import Floats
from .protocols import LanguageModel, TargetModel

MIN_ROWS = 16  # minimum number of compared rows
BLOCK = 64  # kernels change block sizes near its multiples, where noise often begins
UNBOUNDED = float(np.finfo(np.float32).max)  # noise if the routing to experts can change
SAFETY_FACTOR = 4  # over windows of a noisy model, the largest difference varied 2 to 7 times


@dataclass(frozen=True)
class NoiseMeasurement:
    """Largest absolute difference of a logit for each T, and the largest logit."""

    by_length: dict[int, float]
    largest: float


def measure_noise(
    model: LanguageModel, tokens: Sequence[int], lengths: Collection[int], num_rows: int
) -> NoiseMeasurement:
    """Compare the logits of passes of T tokens with those of single tokens; 0.0 is bitwise equal.

    As in a request, each pass of T reads cache rows written by passes of T. Earlier tokens are
    prefilled in the same way for every T. The cache is empty afterwards.

    Args:
        model: Model to measure.
        tokens: Text. [n]
        lengths: Pass lengths T.
        num_rows: Number of rows at the end of the text to compare.
    """
    plain = _read(model, tokens, num_rows, 1)
    differences = {t: _max_difference(_read(model, tokens, num_rows, t), plain) for t in lengths}
    model.truncate(0)
    return NoiseMeasurement(differences, float(np.abs(plain[np.isfinite(plain)]).max(initial=0)))


def _read(model: LanguageModel, tokens: Sequence[int], num_rows: int, length: int) -> Floats:
    model.truncate(0)
    start = max(0, len(tokens) - num_rows)
    model.prefill(tokens[:start])
    starts = range(start, len(tokens), length)
    return np.concatenate([model.forward(tokens[at : at + length]).array().copy() for at in starts])


def _max_difference(logits: Floats, plain: Floats) -> float:
    differs = logits != plain
    return float(np.abs(logits[differs] - plain[differs]).max(initial=0))


class LogitNoise:
    """Bound of the difference between the logits of plain decoding and of longer passes."""

    def __init__(self, target: TargetModel, context_length: int) -> None:
        self._target = target
        self._context_length = context_length
        self._measurements: list[NoiseMeasurement] = []

    def for_model(self, target: TargetModel) -> LogitNoise:
        """Return a bound for a model with the same weights, which shares the measurements."""
        noise = copy.copy(self)
        noise._target = target
        return noise

    def bound(self, prompt: Sequence[int], num_draft_tokens: int, trusts_export: bool) -> float:
        """Return the bound for passes of up to K + 1 tokens.

        It is 0.0 if these lengths were invariant at export and `trusts_export`, although another
        CPU may differ. Otherwise it is measured, once for each K, which empties the target's cache.
        It is UNBOUNDED for a mixture of experts that is not invariant, since a change of the
        routing can change logits by any amount.
        """
        lengths = range(2, num_draft_tokens + 2)
        tested = self._target.invariant_lengths
        if trusts_export and all(is_invariant(t, tested) for t in lengths):
            return 0.0
        ends = {*lengths[:1], *lengths[-1:]}
        if missing := ends - self._by_length.keys():
            num_rows = max(MIN_ROWS, 2 * max(missing))
            end = min(BLOCK + num_rows // 2, self._context_length)
            tokens = (list(prompt) * -(-end // len(prompt)))[:end]
            self._measurements.append(measure_noise(self._target, tokens, missing, num_rows))
        by_length = self._by_length
        measured = max((by_length[t] for t in ends), default=0.0)
        if measured and self._target.num_experts:
            return UNBOUNDED
        # The measured text may show no noise. Two correct passes can differ by twice the float32
        # error that the export measured.
        largest = max((m.largest for m in self._measurements), default=0.0)
        lower = 2 * self._target.float32_error * largest
        return max(SAFETY_FACTOR * measured, lower) if ends else 0.0

    @property
    def _by_length(self) -> dict[int, float]:
        return {t: noise for m in self._measurements for t, noise in m.by_length.items()}


def is_invariant(length: int, tested: Collection[int]) -> bool:
    """Return True if a pass length is invariant, given the invariant lengths that were tested.

    An untested length counts as invariant if a shorter length and a length of at most twice the
    shorter one are: kernels process rows in groups, so changes occur at the group sizes.
    """
    below = max((t for t in tested if t <= length), default=0)
    return 1 in tested and any(length <= t <= 2 * below for t in tested)


def longest_invariant(tested: Collection[int], limit: int) -> int:
    """Return the T up to which all pass lengths are invariant, at most `limit`; 0 if none is."""
    return sum(1 for _ in takewhile(lambda t: is_invariant(t, tested), range(1, limit + 1)))
