"""Orthogonal matrices that spread outlier channels over all channels.

`Rotation` [d, d] rotates the residual stream of models with RMS norms (QuaRot, Ashkboos et al.
2024): random signs, a Hadamard matrix of the largest power of two that divides d, and a Hartley
matrix of the remaining factor, applied as a fast transform. `hadamard` is for online transforms of
blocks of channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

HADAMARD_SIZE = 64  # maximum number of channels of an online Hadamard transform
_MAX_FACTOR_SIZE = 64  # larger Hadamard matrices are factorized


@dataclass(frozen=True)
class Rotation:
    """Orthogonal matrix R: diag(signs) times a Kronecker product of symmetric matrices."""

    size: int

    @cached_property
    def signs(self) -> torch.Tensor:
        """Random signs of the channels, [d]."""
        bits = np.random.default_rng(0).integers(0, 2, self.size)
        return torch.from_numpy(1.0 - 2.0 * bits)

    @cached_property
    def factors(self) -> tuple[torch.Tensor, ...]:
        """Symmetric orthogonal matrices whose Kronecker product mixes the channels."""
        power = self.size & -self.size
        matrices = [hartley(self.size // power)]
        while power > 1:
            matrices.append(hadamard(min(power, _MAX_FACTOR_SIZE)))
            power //= len(matrices[-1])
        return tuple(matrix for matrix in matrices if len(matrix) > 1)

    def apply(self, x: torch.Tensor, axis: int = -1) -> torch.Tensor:
        """Return x R, with the channels of x in an axis, in the type of x."""
        return self._mix(x * self._signs_of(x, axis), axis)

    def undo(self, x: torch.Tensor, axis: int = -1) -> torch.Tensor:
        """Return x R^T, with the channels of x in an axis, in the type of x."""
        return self._mix(x, axis) * self._signs_of(x, axis)

    def _signs_of(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        return self.signs.to(x.dtype).reshape(-1, *[1] * (len(x.shape[axis:]) - 1))

    def _mix(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        mixed, size = x, x.shape[axis:].numel()
        for matrix in self.factors:
            factor, size = matrix.to(x.dtype), size // len(matrix)
            if size == 1:
                mixed = mixed.reshape(-1, len(matrix)) @ factor
            else:
                mixed = factor @ mixed.reshape(-1, len(matrix), size)
        return mixed.reshape(x.shape)


def hadamard(size: int) -> torch.Tensor:
    """Return the orthogonal Sylvester-Hadamard matrix of a size that is a power of two."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / size**0.5


def hartley(size: int) -> torch.Tensor:
    """Return the discrete Hartley transform as a matrix; it is its own inverse."""
    numbers = torch.arange(size, dtype=torch.float64)
    angles = 2 * torch.pi * (torch.outer(numbers, numbers) % size) / size
    return (angles.cos() + angles.sin()) / size**0.5


def apply_hadamard(x: torch.Tensor, block: int) -> torch.Tensor:
    """Return x with each block of channels multiplied by a Hadamard matrix. [..., d]"""
    matrix = hadamard(block).to(x.dtype)
    return (x.reshape(*x.shape[:-1], -1, block) @ matrix).reshape(x.shape)
