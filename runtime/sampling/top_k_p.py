"""Top-k, nucleus and typical selection without sorting: a sort of 50,000 tokens takes 1 ms.

A sample of a row estimates the part that must be sorted. V vocabulary entries.
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
    """Return the tokens whose logits are at least the k-th largest, ascending. [V] -> [k or more]

    The k-th largest of the maxima of 64 or more groups bounds that logit from below.
    """
    num_groups = len(logits) // _BLOCK
    if num_groups <= k:
        return _indices(logits >= _kth(logits, k))
    grouped = logits[: num_groups * _BLOCK].reshape(_BLOCK, num_groups)
    candidates = _indices(logits >= _kth(grouped.max(0), k))
    values = logits[candidates]
    return candidates[values >= _kth(values, k)]


def _kth(values: Floats, k: int) -> float:
    values = values.copy()
    values.partition(-k)
    return float(values[-k])


def _indices(mask: NDArray[np.bool_]) -> Ids:
    indices: Ids = mask.nonzero()[0]
    return indices


def nucleus(weights: Floats, share: float) -> Floats:
    """Keep the fewest largest weights with this share of the sum, the first on ties. [n] -> [n]

    Others become 0. As in the selection algorithm of Floyd and Rivest (1975), a sample gives likely
    bounds of the last kept weight, and only the weights between them are sorted.
    """
    total = float(weights.sum())
    goal = share * total
    low, kept, mass, high = _bracket(weights, total, total - goal)
    between = _indices((weights >= low) & (weights <= high))
    values = weights[between]
    mass -= float(kept[between].sum())
    if not mass < goal <= mass + float(values.sum()):  # the sample was not representative
        kept, mass, between, values = weights.copy(), 0.0, np.arange(len(weights)), weights
    last, spare = _last_weight(values, goal - mass)
    stay = values >= last
    if spare:
        stay[_indices(values == last)[-spare:]] = False
    kept[between] = values * stay
    return kept


def nearest(weights: Floats, distances: Floats, share: float) -> Floats:
    """Keep the weights with the smallest distances up to this share, with ties. [n] -> [n]"""
    return weights * (distances <= -_last(weights, -distances, share * float(weights.sum()))[0])


def _bracket(weights: Floats, total: float, rest: float) -> tuple[float, Floats, float, float]:
    """Return a lower and an upper bound of the last kept weight, and the weights above an estimate.

    The estimate is where the smaller weights of a sample add up to `rest`. A sample misses or
    overrates the few largest weights; the true sum of the weights above the estimate corrects it.

    Returns:
        Lower bound, weights above the estimate and zeros [n], their sum, and upper bound.
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
    """Return `_last` for weights that are sorted by their own values."""
    if len(values) > _FEW:
        return _last(values, values, goal)
    ordered = np.sort(values)[::-1]
    at = min(int(ordered.cumsum(dtype=np.float64).searchsorted(goal)), len(ordered) - 1)
    return ordered[at], int(np.count_nonzero(values >= ordered[at])) - at - 1


def _last(weights: Floats, keys: Floats, goal: float) -> tuple[float, int]:
    """Return the key at which the weights of the largest keys reach `goal`, and its later ties.

    Keys are sorted into buckets; the bucket with the goal is sorted into buckets again.
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
        inside = _indices(buckets == at)
        weights, keys = weights[inside], keys[inside]
    order = np.argsort(-keys, kind="stable")
    at = min(int(weights[order].cumsum(dtype=np.float64).searchsorted(goal)), len(keys) - 1)
    last = keys[order[at]]
    return last, int(np.count_nonzero(keys >= last)) - at - 1
