"""Selecting from rows of many tokens without sorting them: a whole row of 50,000 takes 1 ms.

Where a part of the row is enough, a look at some of it says which. V vocabulary entries.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .distribution import Floats, Ids

_BLOCK = 64
_SAMPLE = 1024
_FEW = 4 * _SAMPLE
_BUCKETS = 512


def top(logits: Floats, k: int) -> Ids:
    """The tokens whose logits are the k-th largest or above, ascending. [V] -> [k or more]

    The k-th largest of the largest in each of 64 rows or more bounds it from below.
    """
    num_groups = len(logits) // _BLOCK
    if num_groups <= k:
        return _places(logits >= _kth(logits, k))
    grouped = logits[: num_groups * _BLOCK].reshape(_BLOCK, num_groups)
    candidates = _places(logits >= _kth(grouped.max(0), k))
    values = logits[candidates]
    return candidates[values >= _kth(values, k)]


def _kth(values: Floats, k: int) -> float:
    values = values.copy()
    values.partition(-k)
    return float(values[-k])


def _places(true: NDArray[np.bool_]) -> Ids:
    places: Ids = true.nonzero()[0]
    return places


def nucleus(weights: Floats, share: float) -> Floats:
    """The fewest largest weights that have this share of all, the first on ties, and zeros. [n]

    After Floyd and Rivest 1975: a sample tells two values that the last weight is most likely
    between, so only those between are sorted.
    """
    total = float(weights.sum())
    goal = share * total
    low, kept, mass, high = _bracket(weights, total, total - goal)
    between = _places((weights >= low) & (weights <= high))
    values = weights[between]
    mass -= float(kept[between].sum())
    if not mass < goal <= mass + float(values.sum()):  # the sample misled
        kept, mass, between, values = weights.copy(), 0.0, np.arange(len(weights)), weights
    last, spare = _last_weight(values, goal - mass)
    stay = values >= last
    if spare:
        stay[_places(values == last)[-spare:]] = False
    kept[between] = values * stay
    return kept


def nearest(weights: Floats, distances: Floats, share: float) -> Floats:
    """The weights at the least distances that have this share of all, with every tie, and zeros."""
    return weights * (distances <= -_last(weights, -distances, share * float(weights.sum()))[0])


def _bracket(weights: Floats, total: float, rest: float) -> tuple[float, Floats, float, float]:
    """A low value, the weights above one between, their sum, and a high value.

    Where the smaller weights add up to `rest` is estimated: a sample misses or overrates the few
    largest. What the weights above the estimate really add up to corrects it.
    """
    step = max(1, len(weights) // _SAMPLE)
    sample = np.sort(weights[::step])
    sums = sample.cumsum(dtype=np.float64) * step
    end = len(sample) - 1
    first = min(int(sums.searchsorted(rest)), end)
    kept = weights * (weights > sample[first])
    mass = float(kept.sum())
    second = int(sums.searchsorted(rest + float(sums[first]) - (total - mass)))
    margin = 4 + abs(second - first) // 4
    low, high = min(first, second - margin), max(first, second + margin)
    return sample[low] if low > 0 else 0.0, kept, mass, sample[high] if high < end else np.inf


def _last_weight(values: Floats, goal: float) -> tuple[float, int]:
    """As `_last`, of values that are their own keys."""
    if len(values) > _FEW:
        return _last(values, values, goal)
    ordered = np.sort(values)[::-1]
    at = min(int(ordered.cumsum(dtype=np.float64).searchsorted(goal)), len(ordered) - 1)
    return ordered[at], int(np.count_nonzero(values >= ordered[at])) - at - 1


def _last(weights: Floats, keys: Floats, goal: float) -> tuple[float, int]:
    """The key at which the weights of the largest keys reach `goal`, and how many more have it.

    Keys are sorted into buckets, of which the one with the goal is looked at again.
    """
    while len(keys) > _BUCKETS:
        high = keys.max()
        width = float(high) - float(keys.min())
        if not width:
            break
        depths = (high - keys).astype(np.float64) * ((_BUCKETS - 1) / width)
        buckets = depths.astype(np.intp)
        sums = np.bincount(buckets, weights, _BUCKETS).cumsum()
        at = int(sums.searchsorted(min(goal, sums[-1])))
        goal -= float(sums[at - 1]) if at else 0.0
        inside = _places(buckets == at)
        weights, keys = weights[inside], keys[inside]
    order = np.argsort(-keys, kind="stable")
    at = min(int(weights[order].cumsum(dtype=np.float64).searchsorted(goal)), len(keys) - 1)
    last = keys[order[at]]
    return last, int(np.count_nonzero(keys >= last)) - at - 1
