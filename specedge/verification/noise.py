"""How far a row's logits depend on how many rows share its pass: on a CPU not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .budget import Budget
from .cached import Array, Cached


@dataclass(frozen=True)
class Difference:
    """Passes of one length against one over all rows; `largest` is of the logits, in their unit.

    `relative` is that of logits and cache rows, each as a share of its largest value.
    """

    num_passes: int
    largest: float
    relative: float


def row_differences(
    model: Cached, tokens: Sequence[int], lengths: Sequence[int], budget: Budget
) -> dict[int, Difference]:
    """Compare passes of each length T with one pass over all the tokens, while there is time.

    A pass begins after the rows that the one over all tokens left, and all are compared: logits
    and cache rows.
    """
    model.truncate(0)
    wide = model.forward(tokens).array().copy()
    wide_rows = model.cache_rows(0, len(tokens))
    found: dict[int, Difference] = {}
    for i, length in enumerate(lengths):
        share = budget.share(1 / (len(lengths) - i))
        model.truncate(0)
        model.forward(tokens)
        num_passes, largest, relative = 0, 0.0, 0.0
        for start in range(len(tokens) - length, -1, -length):
            if num_passes and share.over:
                break
            model.truncate(start)
            logits = model.forward(tokens[start : start + length]).array()
            rows = model.cache_rows(start, start + length)
            wanted = [part[:, start : start + length] for part in wide_rows]
            largest = max(largest, distance(logits, wide[start : start + length]))
            triples = zip(rows, wanted, wide_rows, strict=True)
            shares = [distance(a, b) / size(c) for a, b, c in triples]
            relative = max(relative, largest / size(wide), *shares)
            num_passes += 1
        if num_passes:
            found[length] = Difference(num_passes, largest, relative)
        if budget.over:
            break
    return found


def distance(one: Array, other: Array) -> float:
    """The largest difference, infinite where either is no number."""
    with np.errstate(invalid="ignore"):
        found = float(np.abs(one - other).max(initial=0.0))
    return found if np.isfinite(found) else np.inf


def size(values: Array) -> float:
    """The largest value, to divide by."""
    largest = float(np.abs(values).max(initial=0.0))
    return largest if 0 < largest < np.inf else 1.0
