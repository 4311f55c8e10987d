"""GPTQ rounding (Frantar et al. 2023).

Rows are rounded in order along K, and later rows compensate the error of each. W [K, N] is
multiplied by x [n, K]; the Hessian of the squared error of x W is x^T x, [K, K].
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import rounding
from .rounding import BLOCK_SIZE, MAX_INT8, IntegerMatrix

DAMPING = 0.01  # added to the diagonal, relative to its mean
_BATCH_ROWS = 64  # rows whose errors are propagated to later rows together
_MAX_SOLVED_ROWS = 512  # maximum size of a triangular matrix that is inverted directly
_TINY = 1e-30
_RoundRow = Callable[[int, torch.Tensor], torch.Tensor]


def inverse_factor(hessian: torch.Tensor) -> torch.Tensor:
    """Return the upper triangular U with U^T U = H^-1 of a damped Hessian. [K, K] -> [K, K]

    With reversed rows and columns H is L L^T, and U is the inverse of L: one factorization instead
    of three, in float32 unless that fails. Only the upper triangle of H is read.
    """
    for dtype in (torch.float32, torch.float64):
        mean = float(hessian.diagonal().to(dtype).mean())
        damped = hessian.to(dtype).flip(0, 1)
        damped.diagonal().add_(max(mean * DAMPING, _TINY))
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            break
    del damped  # each matrix of a down projection of 8B takes 0.8 GB
    inverse = _invert_triangular(lower)
    del lower
    return inverse.flip(0, 1).float()


def _invert_triangular(lower: torch.Tensor) -> torch.Tensor:
    """Return the inverse of a lower triangular matrix, recursively by blocks. [K, K]"""
    size = len(lower)
    if size <= _MAX_SOLVED_ROWS:
        eye = torch.eye(size, dtype=lower.dtype)
        return torch.linalg.solve_triangular(lower, eye, upper=False)
    half = size // 2
    first, last = _invert_triangular(lower[:half, :half]), _invert_triangular(lower[half:, half:])
    inverse = torch.zeros_like(lower)
    inverse[:half, :half], inverse[half:, half:] = first, last
    torch.mm(last @ lower[half:, :half], -first, out=inverse[half:, :half])
    return inverse


def quantize_columns(weights: torch.Tensor, upper: torch.Tensor) -> IntegerMatrix:
    """Round a matrix with one scale per column.

    Args:
        weights: [K, N] in float32, overwritten.
        upper: Inverse factor of the input's Hessian, [K, K].
    """
    scale = weights.abs().amax(0).clamp_min(_TINY) / MAX_INT8
    values = torch.empty(weights.shape, dtype=torch.int8)

    def quantized(row: int, weight: torch.Tensor) -> torch.Tensor:
        integers = (weight / scale).round_().clamp_(-MAX_INT8, MAX_INT8)
        values[row] = integers
        return integers * scale

    _compensate_errors(weights, upper, quantized, _BATCH_ROWS)
    return IntegerMatrix(values.numpy(), scale[None].numpy())


def quantize_blocks(weights: torch.Tensor, upper: torch.Tensor, bits: int) -> IntegerMatrix:
    """Round a matrix block-wise along K; scales are selected from the compensated weights.

    Args:
        weights: [K, N].
        upper: Inverse factor of the input's Hessian, [K, K].
        bits: Bits of an integer.
    """
    size, width = weights.shape
    padding = -size % BLOCK_SIZE
    left = torch.nn.functional.pad(weights.float(), (0, 0, 0, padding))
    rest = torch.eye(padding)
    upper = torch.block_diag(upper, rest) if padding else upper
    importance = upper.diagonal().square().reciprocal()
    values = torch.empty(left.shape, dtype=torch.int16)
    scales = torch.empty(width, len(left) // BLOCK_SIZE)
    smallest, largest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1

    def quantized(row: int, weight: torch.Tensor) -> torch.Tensor:
        number = row // BLOCK_SIZE
        if row % BLOCK_SIZE == 0:
            block = left[row : row + BLOCK_SIZE].T.reshape(width, 1, BLOCK_SIZE)
            weight_of = importance[row : row + BLOCK_SIZE].reshape(1, BLOCK_SIZE)
            scales[:, number] = rounding.round_blocks(block, bits, weight_of)[1][:, 0, 0]
        scale = scales[:, number]
        integers = (weight / scale).round_().clamp_(smallest, largest)
        values[row] = integers
        return integers * scale

    _compensate_errors(left, upper, quantized, BLOCK_SIZE)
    packed = (values.T + 2 ** (bits - 1)).reshape(width, -1, BLOCK_SIZE)
    return IntegerMatrix(rounding.pack(packed, bits).numpy(), scales.numpy())


def _compensate_errors(
    left: torch.Tensor, upper: torch.Tensor, quantized: _RoundRow, num_rows: int
) -> None:
    """Round the rows of `left` [K, N] in order with `quantized`, and propagate their errors."""
    errors = torch.empty(num_rows, left.shape[1])
    for start in range(0, len(left), num_rows):
        end = min(start + num_rows, len(left))
        for row in range(start, end):
            weight = left[row]
            error = (weight - quantized(row, weight)) / upper[row, row]
            errors[row - start] = error
            left[row + 1 : end].addr_(upper[row, row + 1 : end], error, alpha=-1)
        left[end:].addmm_(upper[start:end, end:].T, errors[: end - start], alpha=-1)
