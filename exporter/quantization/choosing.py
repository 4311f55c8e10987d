"""How each group of matrices is rounded: by the error that this is measured to have on a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from . import rounding
from .calibration import Seen
from .experts import Experts
from .matrices import Group
from .rounding import Blocks, Integers
from .smoothing import powers

STRENGTHS = (0.5, 0.75)  # of smoothing; 0.5 shares a channel's size between input and weights
PARTS = (2, 4, 8)  # of K, with scales of their own
# The error, in the size of the product, from which on channels are smoothed and K is cut in parts.
# Smoothing below it does not pay: SmolLM2's KL is 0.0041 without and 0.0043 with it.
BUDGET = 0.04
SLOW = 0.05  # from which on 8 bits in blocks are tried, whose passes over several tokens are slower
WORST = 0.2  # and from which on, however it is cut, a group stays in its own type
HEAD = 0.01  # nats a token that a head in 4 bits may cost; beyond, it is in columns of 8
NUM_COLUMNS = 512  # of a matrix, that errors are measured with
NUM_EXPERTS = 4  # and of a block of experts, each


@dataclass(frozen=True)
class Choice:
    """How a group is rounded, and what that costs: the error of its worst product.

    `powers` [K] are moved from its input into its weights. With `bits` it is in blocks of numbers
    of so many, for which `weight` [K] is the mean square of its input. With 0 parts it is not
    rounded. `why` says what a reader would not expect of the precision, if anything. `rounded` has
    the integers of matrices that are not rounded to the nearest, by their places.
    """

    powers: np.ndarray | None
    num_parts: int
    error: float
    plain_error: float  # without smoothing or parts
    bits: int = 0
    weight: np.ndarray | None = None
    why: str = ""
    rounded: Mapping[int, Integers | Blocks] = field(default_factory=dict)


def in_columns(group: Group, x: Seen, channels: np.ndarray | None, tied: bool = False) -> Choice:
    """One scale a column, or a few, for a group that reads x.

    Sizes of channels may be moved if `channels` say which have one power, [K]. Blocks of 8 bits
    where that is not enough. A stored block of experts has neither. A head that is `tied` is not
    cut, as rows of its bytes are taken, and what the powers cost those rows counts, too.
    """
    weights, can_cut = _some(group), not tied
    if any(len(matrix.stored.order) != 2 for matrix in group.matrices):
        channels, can_cut = None, False
    plain = best = Choice(None, 1, error := _worst(weights, x.rows), error)
    for by in _powers(group, x, channels) if plain.error > BUDGET else ():
        error = _worst(weights, x.rows, by)
        if tied:
            error = max(error, *(rounding.error_of_columns(w, by) for w in weights))
        if error < best.error:
            best = Choice(by, 1, error, plain.error)
    for num_parts in PARTS if can_cut else ():
        if best.error <= BUDGET or len(x.largest) % num_parts:
            break
        error = _worst(weights, x.rows, best.powers, num_parts)
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


def _powers(group: Group, x: Seen, channels: np.ndarray | None) -> list[np.ndarray]:
    """What could be moved from a group's input."""
    if channels is None:
        return []
    return [powers(x.largest, _sizes(group), strength, channels) for strength in STRENGTHS]


def as_it_is(reason: str, plain_error: float = 0.0) -> Choice:
    """No rounding."""
    return Choice(None, 0, 0.0, plain_error, why=f"not rounded, as {reason}")


def in_blocks(group: Group, x: Seen, bits: int) -> Choice:
    """One scale a block of so many bits, for a group that reads x."""
    error = max(rounding.error_in_blocks(w, x.rows, bits) for w in _some(group))
    if error > WORST and not (bits == 4 and x.hessian is not None):  # GPTQ costs less than that
        return as_it_is(f"rounding would cost it {error:.1%}", error)
    return Choice(None, 1, error, error, bits, x.square)


def of_experts(experts: Experts, x: Seen, bits: int) -> Choice:
    """One scale a block of so many bits, for experts whose rows are x; some are measured."""
    first, last = experts.first.numbers(), experts.last.numbers()
    if first.shape[-1] % rounding.BLOCK or last.shape[-1] % rounding.BLOCK:
        return as_it_is(f"their sizes are no multiples of {rounding.BLOCK}")
    rows, found = torch.from_numpy(x.rows), []
    for expert in range(0, len(first), -(-len(first) // NUM_EXPERTS)):
        inner = experts.inner(expert, rows).numpy()
        found.append(rounding.error_in_blocks(first[expert].T, x.rows, bits))
        found.append(rounding.error_in_blocks(last[expert].T, inner, bits))
    if (error := max(found)) > WORST:
        return as_it_is(f"rounding would cost them {error:.1%}", error)
    return Choice(None, 1, error, error, bits, x.square)


def of_head(group: Group, x: Seen, channels: np.ndarray | None) -> Choice:
    """Blocks of 4 bits for a head that reads x, or 8 bits as in int8 where that costs too much."""
    (matrix,) = group.matrices
    lost = rounding.divergence_in_blocks(matrix.stored.numbers(), x.rows, 4)
    if lost <= HEAD:
        return in_blocks(group, x, 4)
    found = in_columns(group, x, channels)
    way = found.why or "in columns of 8 bits"
    return replace(found, why=f"{way}; 4 bits would cost {lost:.3f} nats a token")


def _some(group: Group) -> list[torch.Tensor]:
    """As many columns of each matrix as errors are measured with, by chance: heads are regular."""
    found = []
    for whole in (matrix.stored.numbers() for matrix in group.matrices):
        chosen = np.random.default_rng(0).permutation(whole.shape[-1])[:NUM_COLUMNS]
        stack = whole if whole.ndim > 2 else whole[None]
        step = -(-len(stack) // NUM_EXPERTS)
        found += [one[:, np.sort(chosen)].contiguous() for one in stack[::step]]
    return found


def _worst(
    weights: Sequence[torch.Tensor],
    x: np.ndarray,
    powers: np.ndarray | None = None,
    num_parts: int = 1,
) -> float:
    return max(rounding.error(w, x, powers, num_parts) for w in weights)


def _sizes(group: Group) -> np.ndarray:
    """The largest of each row of a group's matrices, in its column's largest. [K]

    A column has a scale of its own: what is large in a large column costs nothing.
    """
    found = []
    for matrix in group.matrices:
        sizes = matrix.stored.numbers().abs()
        largest = sizes.amax(0)
        found.append((sizes / largest.where(largest > 0, 1)).amax(1).float())
    return torch.stack(found).amax(0).numpy()
