"""Weights as integers: how they are rounded, and what that and rounded inputs cost a product.

x [n, K] times W [..., K, N]. All is symmetric: a scale, no zero point. int8 has one scale a row of
x and one a column of W, so a row's result depends on no other row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

LARGEST = 127
_TINY = 1e-30
_STRIP = 1 << 24  # numbers that are widened at a time


@dataclass(frozen=True)
class Integers:
    """W = values * scales: int8 [..., K, N], float32 [..., 1, N]."""

    values: np.ndarray
    scales: np.ndarray


def columns(weights: torch.Tensor, powers: np.ndarray | None = None) -> Integers:
    """Round a matrix with one scale a column, after row k was multiplied by 2 ** powers[k]."""
    values = torch.empty(weights.shape, dtype=torch.int8)
    scales = torch.empty((*weights.shape[:-2], 1, weights.shape[-1]))
    for at in _strips(weights):
        strip = weights[..., at].float()
        if powers is not None:
            strip = strip * _factors(powers)[:, None]
        scale = strip.abs().amax(-2, keepdim=True).clamp_min(_TINY) / LARGEST
        values[..., at] = (strip / scale).round().to(torch.int8)
        scales[..., at] = scale
    return Integers(values.numpy(), scales.numpy())


def rows(x: np.ndarray) -> np.ndarray:
    """x as it is after rounding with one scale a row. [n, K] -> [n, K]"""
    scale = np.maximum(np.abs(x).max(-1, keepdims=True), _TINY) / np.float32(LARGEST)
    return np.rint(x / scale) * scale


def error(
    weights: torch.Tensor, x: np.ndarray, powers: np.ndarray | None = None, num_parts: int = 1
) -> float:
    """What the rounding of both costs x W, in the size of x W: root of the mean square.

    K is cut into `num_parts` with scales of their own. [K, N], [n, K]
    """
    off = size = 0.0
    factors = np.ones(x.shape[1], np.float32) if powers is None else _factors(powers).numpy()
    cuts = np.array_split(np.arange(x.shape[1]), num_parts)
    rounded = [torch.from_numpy(rows(x[:, part] / factors[part])) for part in cuts]
    exact = torch.from_numpy(x)
    for at in _strips(weights):
        strip = weights[:, at].float()
        wanted, found = exact @ strip, torch.zeros(())
        for part, given in zip(cuts, rounded, strict=True):
            piece = columns(strip[part[0] : part[-1] + 1], None if powers is None else powers[part])
            found = found + given @ (torch.from_numpy(piece.values * piece.scales))
        off += float((found - wanted).square().sum())
        size += float(wanted.square().sum())
    return (off / max(size, _TINY)) ** 0.5


def _factors(powers: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.exp2(powers).astype(np.float32))


def _strips(weights: torch.Tensor) -> list[slice]:
    """Some columns at a time."""
    num_columns = weights.shape[-1]
    width = max(1, _STRIP * num_columns // max(1, weights.numel()))
    return [slice(at, at + width) for at in range(0, num_columns, width)]
