"""How each group of matrices is rounded: by the error that this is measured to have on a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from . import rounding
from .matrices import Group
from .smoothing import powers

STRENGTHS = (0.5, 0.75)  # of smoothing; 0.5 shares a channel's size between input and weights
PARTS = (2, 4, 8)  # of K, with scales of their own
BUDGET = 0.02  # the error, in the size of the product, from which on K is cut into parts
SLOW = 0.05  # from which on 8 bits in blocks are tried, whose passes over several tokens are slower
WORST = 0.2  # and from which on, however it is cut, a group stays in its own type
NUM_ROWS = 48  # of the text, that errors are measured with


@dataclass(frozen=True)
class Choice:
    """How a group is rounded, and what that costs: the error of its worst product.

    `powers` [K] are moved from its input into its weights. With `bits` it is in blocks of numbers
    of so many, for which `weight` [K] is the mean square of its input. With 0 parts it is not
    rounded. `why` says what a reader would not expect of the precision, if anything.
    """

    powers: np.ndarray | None
    num_parts: int
    error: float
    plain_error: float  # without smoothing or parts
    bits: int = 0
    weight: np.ndarray | None = None
    why: str = ""


def in_columns(group: Group, x: np.ndarray, can_smooth: bool, can_cut: bool) -> Choice:
    """One scale a column, or a few, for a group whose inputs are, among others, these. [n, K]

    Blocks of 8 bits where that is not enough, if the weights are the group's own.
    """
    weights = [matrix.stored.numbers() for matrix in group.matrices]
    if any(w.ndim != 2 for w in weights):
        return Choice(None, 1, 0.0, 0.0)
    some = _some(x)
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
    if best.error > SLOW and can_cut:
        blocks = in_blocks(group, x, 8)
        if blocks.num_parts and blocks.error < best.error:
            best = replace(blocks, plain_error=plain.error)
    if best.error > WORST:
        return as_it_is(f"rounding would cost it {best.error:.1%}", plain.error)
    way = f"{best.num_parts} parts of K" if best.num_parts > 1 else f"blocks of {rounding.BLOCK}"
    if best.num_parts == 1 and not best.bits:
        return best
    return replace(best, why=f"in {way}, off by {best.error:.1%}, in one by {plain.error:.1%}")


def as_it_is(reason: str, plain_error: float = 0.0) -> Choice:
    """No rounding."""
    return Choice(None, 0, 0.0, plain_error, why=f"not rounded, as {reason}")


def in_blocks(group: Group, x: np.ndarray, bits: int) -> Choice:
    """One scale a block of so many bits, for a group whose inputs are, among others, these."""
    weights, some = [matrix.stored.numbers() for matrix in group.matrices], _some(x)
    error = max(rounding.error_in_blocks(w, some, bits) for w in weights)
    if error > WORST:
        return as_it_is(f"rounding would cost it {error:.1%}", error)
    return Choice(None, 1, error, error, bits, np.square(x).mean(0))


def _some(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x[:: max(1, len(x) // NUM_ROWS)])


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
