"""Batch invariance of passes: whether logits depend on the pass length.

T tokens per pass, V vocabulary entries, n tokens of text.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from ..sampling.distribution import Floats
from .protocols import LanguageModel, TargetModel

ROWS = 16  # at least so many are compared
PLACE = 64  # kernels change their blocks near multiples of it, so noise often begins there
ANY = float(np.finfo(np.float32).max)  # the noise of a choice of experts that turns
SAFETY = 4  # over a few windows of a noisy model the largest difference varied by 2 to 7 times


@dataclass(frozen=True)
class Measured:
    """The largest absolute difference of a logit for each T, and the largest logit."""

    by_length: dict[int, float]
    largest: float


def measure(
    model: LanguageModel, tokens: Sequence[int], lengths: Collection[int], num_rows: int
) -> Measured:
    """Read the last rows of a text T a pass and one by one, and compare; 0.0 is bit for bit. [n]

    The passes of T build on rows that passes of T wrote, as in a request. The tokens before them
    are prefilled, alike for every T. Ends with an empty cache.
    """
    plain = _read(model, tokens, num_rows, 1)
    differences = {t: _largest(_read(model, tokens, num_rows, t), plain) for t in lengths}
    model.truncate(0)
    return Measured(differences, float(np.abs(plain[np.isfinite(plain)]).max(initial=0)))


def _read(model: LanguageModel, tokens: Sequence[int], num_rows: int, length: int) -> Floats:
    model.truncate(0)
    start = max(0, len(tokens) - num_rows)
    model.prefill(tokens[:start])
    starts = range(start, len(tokens), length)
    return np.concatenate([model.forward(tokens[at : at + length]).array().copy() for at in starts])


def _largest(found: Floats, wanted: Floats) -> float:
    differing = found != wanted
    return float(np.abs(found[differing] - wanted[differing]).max(initial=0))


class Noise:
    """Bounds on the difference of logits between pass lengths of a model on this device."""

    def __init__(self, target: TargetModel, context_length: int) -> None:
        self._target = target
        self._context_length = context_length
        self._measured: list[Measured] = []

    def over(self, target: TargetModel) -> Noise:
        """The same, measured in another cache of the same weights; what is measured is shared."""
        twin = copy.copy(self)
        twin._target = target
        return twin

    def bound(self, prompt: Sequence[int], num_draft_tokens: int, trusting: bool) -> float:
        """By how much a logit of a pass of up to K + 1 rows may differ from plain decoding's.

        0.0 where the export found the same bits and that is trusted, though another CPU may
        differ. Else it is measured, once for each K, and the target's cache is then empty. ANY
        where rows lose their bits and choose experts: a choice that turns, turns all that follows.
        """
        lengths = range(2, num_draft_tokens + 2)
        held = self._target.invariant_lengths
        if trusting and all(holds(t, held) for t in lengths):
            return 0.0
        ends = {*lengths[:1], *lengths[-1:]}
        if missing := ends - self._by_length.keys():
            num_rows = max(ROWS, 2 * max(missing))
            end = min(PLACE + num_rows // 2, self._context_length)
            tokens = (list(prompt) * -(-end // len(prompt)))[:end]
            self._measured.append(measure(self._target, tokens, missing, num_rows))
        by_length = self._by_length
        measured = max((by_length[t] for t in ends), default=0.0)
        if measured and self._target.num_experts:
            return ANY
        # Two right passes are each as far from exact as the export saw, so twice that from each
        # other; noise may begin where nothing was measured.
        largest = max((found.largest for found in self._measured), default=0.0)
        least = 2 * self._target.float32_error * largest
        return max(SAFETY * measured, least) if ends else 0.0

    @property
    def _by_length(self) -> dict[int, float]:
        return {t: noise for found in self._measured for t, noise in found.by_length.items()}


def holds(length: int, held: Collection[int]) -> bool:
    """Return True if passes of T tokens are batch-invariant, given the tested lengths.

    An untested T counts if tested lengths below it and at most twice that are invariant: kernels
    process rows in groups, so the result changes only at the sizes of groups.
    """
    below = max((t for t in held if t <= length), default=0)
    return 1 in held and any(length <= t <= 2 * below for t in held)


def longest_held(held: Collection[int], most: int) -> int:
    """Return the largest T, at most `most`, up to which all pass lengths are batch-invariant."""
    return sum(1 for _ in takewhile(lambda t: holds(t, held), range(1, most + 1)))
