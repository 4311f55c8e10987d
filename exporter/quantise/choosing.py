"""How each group of matrices is rounded: by the error that this is measured to have on a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from . import rounding
from .matrices import Group
from .smoothing import powers

STRENGTHS = (0.5, 0.75)  # of smoothing; 0.5 shares a channel's size between input and weights
PARTS = (2, 4, 8)  # of K, with scales of their own
BUDGET = 0.02  # the error, in the size of the product, from which on K is cut into parts
WORST = 0.2  # and from which on, however it is cut, a group stays in its own type
NUM_ROWS = 48  # of the text, that errors are measured with


@dataclass(frozen=True)
class Choice:
    """How a group is rounded, and what that costs: the error of its worst product.

    `powers` [K] are moved from its input into its weights. With 0 parts it is not rounded.
    """

    powers: np.ndarray | None
    num_parts: int
    error: float
    plain_error: float  # without smoothing or parts


def choose(group: Group, x: np.ndarray, can_smooth: bool, can_cut: bool) -> Choice:
    """The choice for a group whose inputs are, among others, these. [n, K]"""
    weights = [matrix.stored.numbers() for matrix in group.matrices]
    if any(w.ndim != 2 for w in weights):
        return Choice(None, 1, 0.0, 0.0)
    some = np.ascontiguousarray(x[:: max(1, len(x) // NUM_ROWS)])
    plain = best = Choice(None, 1, error := _worst(weights, some), error)
    for strength in STRENGTHS if can_smooth else ():
        by = powers(x, _sizes(weights), strength)
        if (error := _worst(weights, some, by)) < best.error:
            best = Choice(by, 1, error, plain.error)
    for num_parts in PARTS if can_cut else ():
        if best.error <= BUDGET or x.shape[1] % num_parts:
            break
        error = _worst(weights, some, best.powers, num_parts)
        best = Choice(best.powers, num_parts, error, plain.error)
    return best if best.error <= WORST else Choice(None, 0, 0.0, plain.error)


def _worst(
    weights: Sequence[torch.Tensor],
    x: np.ndarray,
    powers: np.ndarray | None = None,
    num_parts: int = 1,
) -> float:
    return max(rounding.error(w, x, powers, num_parts) for w in weights)


def _sizes(weights: Sequence[torch.Tensor]) -> np.ndarray:
    """The largest of each row of several matrices. [K]"""
    found = [w.abs().amax(1).float() for w in weights]
    return torch.stack(found).amax(0).numpy()
