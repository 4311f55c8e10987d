"""GPTQ (Frantar et al. 2023): weights are rounded one row after another along K, and what each
rounding costs the product is made up for by the rows that are not rounded yet.

W [K, N] is multiplied with x [n, K]; the Hessian of the squared error of x W is x^T x, [K, K].
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from . import rounding
from .rounding import BLOCK, LARGEST, Blocks, Integers

DAMPING = 0.01  # of the Hessian's mean diagonal, added to it
_ROWS = 64  # rows whose errors are passed on to those behind them together
_SOLVED = 512  # rows of a triangular matrix that is inverted at once
_TINY = 1e-30
_Round = Callable[[int, torch.Tensor], torch.Tensor]


def factor(hessian: torch.Tensor, powers: np.ndarray | None = None) -> torch.Tensor:
    """Return upper triangular U with U^T U = H^-1, of a damped Hessian. [K, K] -> [K, K]

    H reversed is L L^T, and U is the inverse of L reversed: one factorization instead of three, in
    float32 unless that fails. Channel k of x was divided by 2 ** powers[k].
    """
    for dtype in (torch.float32, torch.float64):
        damped = hessian.to(dtype, copy=True)
        if powers is not None:
            factors = torch.from_numpy(np.exp2(powers)).to(dtype)
            damped /= torch.outer(factors, factors)
        damped.diagonal().add_(max(float(damped.diagonal().mean()) * DAMPING, _TINY))
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        if not failed:
            break
    return _inverse(lower).flip(0, 1).float()


def _inverse(lower: torch.Tensor) -> torch.Tensor:
    """Return the inverse of a lower triangular matrix, by products of its quarters. [K, K]"""
    size = len(lower)
    if size <= _SOLVED:
        eye = torch.eye(size, dtype=lower.dtype)
        return torch.linalg.solve_triangular(lower, eye, upper=False)
    half = size // 2
    first, last = _inverse(lower[:half, :half]), _inverse(lower[half:, half:])
    inverse = torch.zeros_like(lower)
    inverse[:half, :half], inverse[half:, half:] = first, last
    torch.mm(last @ lower[half:, :half], -first, out=inverse[half:, :half])
    return inverse


def columns(
    weights: torch.Tensor, upper: torch.Tensor, powers: np.ndarray | None = None
) -> Integers:
    """Round a matrix with one scale a column, after row k was multiplied by 2 ** powers[k].

    [K, N], and the factor of its input's Hessian, [K, K].
    """
    left = weights.float().clone()
    if powers is not None:
        left *= torch.from_numpy(np.exp2(powers).astype(np.float32))[:, None]
    scale = left.abs().amax(0).clamp_min(_TINY) / LARGEST
    values = torch.empty(left.shape, dtype=torch.int8)

    def quantized(row: int, weight: torch.Tensor) -> torch.Tensor:
        integers = (weight / scale).round_().clamp_(-LARGEST, LARGEST)
        values[row] = integers
        return integers * scale

    _run(left, upper, quantized, _ROWS)
    return Integers(values.numpy(), scale[None].numpy())


def blocks(weights: torch.Tensor, upper: torch.Tensor, bits: int) -> Blocks:
    """Round a matrix with a scale for every block along K, found when its rows are reached.

    [K, N], and the factor of its input's Hessian, [K, K].
    """
    size, width = weights.shape
    padding = -size % BLOCK
    left = torch.nn.functional.pad(weights.float(), (0, 0, 0, padding))
    rest = torch.eye(padding)
    upper = torch.block_diag(upper, rest) if padding else upper
    importance = upper.diagonal().square().reciprocal()
    values = torch.empty(left.shape, dtype=torch.int16)
    scales = torch.empty(width, len(left) // BLOCK)
    smallest, largest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1

    def quantized(row: int, weight: torch.Tensor) -> torch.Tensor:
        number = row // BLOCK
        if row % BLOCK == 0:
            block = left[row : row + BLOCK].T.reshape(width, 1, BLOCK)
            weight_of = importance[row : row + BLOCK].reshape(1, BLOCK)
            scales[:, number] = rounding.block_scales(block, bits, weight_of)[:, 0, 0]
        scale = scales[:, number]
        integers = (weight / scale).round_().clamp_(smallest, largest)
        values[row] = integers
        return integers * scale

    _run(left, upper, quantized, BLOCK)
    packed = (values.T + 2 ** (bits - 1)).reshape(width, -1, BLOCK)
    return Blocks(rounding.packed(packed, bits).numpy(), scales.numpy())


def _run(left: torch.Tensor, upper: torch.Tensor, quantized: _Round, num_rows: int) -> None:
    """Round the rows of `left` in order; `quantized` gives what a row is then. [K, N], [K, K]"""
    errors = torch.empty(num_rows, left.shape[1])
    for start in range(0, len(left), num_rows):
        end = min(start + num_rows, len(left))
        for row in range(start, end):
            weight = left[row]
            error = (weight - quantized(row, weight)) / upper[row, row]
            errors[row - start] = error
            left[row + 1 : end].addr_(upper[row, row + 1 : end], error, alpha=-1)
        left[end:].addmm_(upper[start:end, end:].T, errors[: end - start], alpha=-1)
