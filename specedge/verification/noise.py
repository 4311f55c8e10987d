"""Noise of logits: differences between pass lengths that are not batch-invariant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specedge.runtime.decoding.protocols import SourceModel

from .budget import Budget

Array = NDArray[Any]


class CachedModel(SourceModel, Protocol):
    """Language model whose cache can be read."""

    def cache_rows(self, start: int, end: int) -> Sequence[Array]:
        """Copy a range of cache rows from every buffer."""

    def with_new_cache(self) -> CachedModel:
        """Return a model with the same weights and a new cache."""


@dataclass(frozen=True)
class RowDifference:
    """Differences of passes of one length from one pass over all rows.

    `largest` is of the logits, in their unit; `relative` is of logits and cache rows, each
    relative to its largest value.
    """

    num_passes: int
    largest: float
    relative: float


def row_differences(
    model: CachedModel, tokens: Sequence[int], lengths: Sequence[int], budget: Budget
) -> dict[int, RowDifference]:
    """Compare passes of each length T with one pass over all tokens, until the time is up.

    Each pass reads cache rows that the long pass wrote; its logits and cache rows are compared.
    Passes of one length are an odd number of rows apart, so that their totals are of all residues
    modulo 8, on which a kernel's rounding may depend.
    """
    model.truncate(0)
    wide = model.forward(tokens).array().copy()
    wide_rows = model.cache_rows(0, len(tokens))
    differences: dict[int, RowDifference] = {}
    for i, length in enumerate(lengths):
        share = budget.share(1 / (len(lengths) - i))
        model.truncate(0)
        model.forward(tokens)
        num_passes, largest, relative = 0, 0.0, 0.0
        for start in range(len(tokens) - length, -1, -(length - 1 + length % 2)):
            if num_passes and share.over:
                break
            model.truncate(start)
            logits = model.forward(tokens[start : start + length]).array()
            rows = model.cache_rows(start, start + length)
            expected = [part[:, start : start + length] for part in wide_rows]
            largest = max(largest, distance(logits, wide[start : start + length]))
            triples = zip(rows, expected, wide_rows, strict=True)
            shares = [distance(a, b) / size(c) for a, b, c in triples]
            relative = max(relative, largest / size(wide), *shares)
            num_passes += 1
        if num_passes:
            differences[length] = RowDifference(num_passes, largest, relative)
        if budget.over:
            break
    return differences


def distance(first: Array, second: Array) -> float:
    """Return the largest difference; infinite if a value is not finite."""
    with np.errstate(invalid="ignore"):
        largest = float(np.abs(_widen(first) - _widen(second)).max(initial=0.0))
    return largest if np.isfinite(largest) else np.inf


def size(values: Array) -> float:
    """Return the largest absolute value as a divisor; 1 if it is 0 or infinite."""
    largest = float(np.abs(_widen(values)).max(initial=0.0))
    return largest if 0 < largest < np.inf else 1.0


def _widen(values: Array) -> Array:
    """Return int8 caches in a type that has their differences, and other values unchanged."""
    return values.astype(np.int16) if values.dtype == np.int8 else values
