"""Statistical tests of samples against a distribution, with error bounds and statistical power.

Pure functions. A distribution is over cells; `alpha` is the probability of a false alarm.
Deviations are total variation distances: half the sum of absolute differences, which is the largest
difference of the probability of any event.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

POWER = 0.99  # probability of detecting the stated deviation
CONFIDENCE = 0.99  # confidence of the bound on the deviation
LEAST_EXPECTED = 20.0  # expected samples in a cell, below which cells are pooled

Array = NDArray[Any]


@dataclass(frozen=True)
class ChiSquareTest:
    """Pearson's chi-square test of samples against a distribution over cells.

    Attributes:
        deviation: Total variation between samples and distribution, mostly due to chance.
        bound: Upper bound of the total variation of the distributions, with `CONFIDENCE`.
        would_catch: Smallest total variation that the test detects with probability `POWER`.
    """

    num_samples: int
    num_cells: int
    chi_square: float
    p_value: float
    deviation: float
    bound: float
    would_catch: float


@dataclass(frozen=True)
class FrequencyTest:
    """Test of the number of events against their probabilities, as shares of the trials."""

    num_trials: int
    measured: float
    expected: float
    p_value: float
    would_catch: float


def chi_square_test(
    counts: Sequence[float] | Array, distribution: Sequence[float] | Array, alpha: float
) -> ChiSquareTest:
    """Test counts [n] against probabilities [n] of cells; small cells are pooled."""
    groups = pool_cells(np.asarray(distribution, float) * np.sum(counts))
    observed = np.array([np.sum(np.asarray(counts)[group]) for group in groups], float)
    probs = np.array([np.sum(np.asarray(distribution)[group]) for group in groups], float)
    probs /= probs.sum()
    num_samples, num_cells = int(observed.sum()), len(groups)
    expected = num_samples * probs
    chi_square = float(((observed - expected) ** 2 / expected).sum()) if num_cells > 1 else 0.0
    deviation = 0.5 * float(np.abs(observed / max(1, num_samples) - probs).sum())
    return ChiSquareTest(
        num_samples,
        num_cells,
        chi_square,
        float(special.chdtrc(num_cells - 1, chi_square)) if num_cells > 1 else 1.0,
        deviation,
        min(1.0, deviation + deviation_bound(num_samples, num_cells)),
        detectable_deviation(num_samples, num_cells, alpha),
    )


def pool_cells(expected: Array) -> list[list[int]]:
    """Group cells so that each group expects `LEAST_EXPECTED` samples, smallest first."""
    groups: list[list[int]] = []
    group: list[int] = []
    total = 0.0
    for cell in np.argsort(expected, kind="stable"):
        group.append(int(cell))
        total += float(expected[cell])
        if total >= LEAST_EXPECTED:
            groups.append(group)
            group, total = [], 0.0
    if group and groups:
        groups[-1] += group
    elif group:
        groups.append(group)
    return groups


def detectable_deviation(num_samples: int, num_cells: int, alpha: float) -> float:
    """Return the total variation that is detected with probability `POWER`, whatever its shape.

    A distribution that is e away is at least 4 e^2 away in chi-square (Cauchy-Schwarz), so the
    statistic is noncentral by at least 4 e^2 n.
    """
    if num_cells < 2 or not num_samples:
        return 1.0
    critical = special.chdtri(num_cells - 1, alpha)
    noncentrality = special.chndtrinc(critical, num_cells - 1, 1 - POWER)
    return min(1.0, math.sqrt(float(noncentrality) / (4 * num_samples)))


def deviation_bound(num_samples: int, num_cells: int) -> float:
    """Return the bound of the total variation between samples and their distribution.

    It holds with probability `CONFIDENCE`. Bretagnolle-Huber-Carol:
    P(|| ||_1 >= e) <= 2^k exp(-n e^2 / 2).
    """
    if not num_samples:
        return 1.0
    exponent = num_cells * math.log(2) - math.log(1 - CONFIDENCE)
    return 0.5 * math.sqrt(2 * exponent / num_samples)


def frequency_test(events: Sequence[bool], probs: Sequence[float], alpha: float) -> FrequencyTest:
    """Test the number of events; each probability may depend on earlier events only."""
    num_trials = len(probs)
    clipped = np.clip(np.asarray(probs, np.float64), 0, 1)  # sums of float32 may exceed 1
    expected = float(clipped.sum())
    variance = float((clipped * (1 - clipped)).sum())
    count = float(np.sum(events))
    deviations = np.geomspace(1e-3, max(1.0, 2 * num_trials), 2000)
    caught = deviations[[_tail(t, variance) < alpha for t in deviations]]
    reach = float(caught[0] if len(caught) else num_trials)
    reach += float(special.ndtri(POWER)) * math.sqrt(variance)
    trials = max(1, num_trials)
    return FrequencyTest(
        num_trials,
        count / trials,
        expected / trials,
        _tail(abs(count - expected), variance),
        min(1.0, reach / trials) if num_trials else 1.0,
    )


def _tail(off: float, variance: float) -> float:
    """Return an upper bound of the probability of a deviation of `off` or more.

    Bennett's inequality, two-sided, for independent events or martingale steps of at most 1.
    """
    if off <= 1e-3:
        return 1.0
    if variance <= 1e-12:  # all events are certain, so any deviation is significant
        return 0.0
    u = off / variance
    return min(1.0, 2 * math.exp(-variance * ((1 + u) * math.log1p(u) - u)))


def uniform_place(distribution: Array, key: Array, token: int, uniform: float) -> float:
    """Return a token's position in [0, 1): the randomized probability integral transform.

    The position is in the cumulative distribution of the tokens in descending order of `key` [V].
    If the token follows `distribution` [V], it is uniform for any keys, and independent of the
    positions of earlier tokens.
    """
    token_key = key[token]
    is_before = key > token_key
    is_tied = key[:token] == token_key
    before = distribution[is_before].sum(dtype=np.float64) + distribution[:token][is_tied].sum(
        dtype=np.float64
    )
    total = distribution.sum(dtype=np.float64)
    return min(float((before + uniform * distribution[token]) / total), math.nextafter(1.0, 0.0))
