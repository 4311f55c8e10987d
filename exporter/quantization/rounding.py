"""Weights as integers: how they are rounded, and what that and rounded inputs cost a product.

x [n, K] times W [..., K, N]. All is symmetric: a scale, no zero point. Columns have one scale a row
of x and one a column of W; blocks have one for every `BLOCK` numbers along K of both. So a row's
result depends on no other row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

LARGEST = 127
_TINY = 1e-30
_STRIP = 1 << 24  # numbers that are widened at a time
BLOCK = 32
_COLUMNS = 512  # that an error is measured of
# Of the scale at which a block's largest number is the largest integer of 4 bits: those tried.
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)


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


@dataclass(frozen=True)
class Blocks:
    """W as MatMulNBits reads it: bytes [N, blocks, BLOCK * bits / 8], scales float32 [N, blocks].

    Integers lie `2 ** (bits - 1)` higher than they are, the first of two in a byte's low half.
    """

    values: np.ndarray
    scales: np.ndarray


def blocks(weights: torch.Tensor, bits: int, weight: np.ndarray | None = None) -> Blocks:
    """Round a matrix with a scale a block. [K, N]

    Of 8 bits the nearest. Of 4 bits each block's scale is searched for the least square error of
    its part of the product, with `weight` [K] the mean square of what a row is multiplied with:
    the largest number may be beyond what 4 bits hold, and the scale may be negative, as there is
    one more integer below 0 than above.
    """
    values, scales = [], []
    for at in _strips(weights):
        strip = _cut(weights[:, at].float())
        found, scale = _in_blocks(strip, bits, _importance(weight, strip))
        values.append(packed(found.to(torch.int16) + 2 ** (bits - 1), bits))
        scales.append(scale.squeeze(-1))
    return Blocks(torch.cat(values).numpy(), torch.cat(scales).numpy())


def _cut(weights: torch.Tensor) -> torch.Tensor:
    """[K, N] -> [N, blocks, BLOCK], with zeros at the end."""
    missing = -weights.shape[0] % BLOCK
    padded = torch.nn.functional.pad(weights.T, (0, missing))
    return padded.reshape(weights.shape[1], -1, BLOCK)


def _importance(weight: np.ndarray | None, strip: torch.Tensor) -> torch.Tensor:
    """The weight of each number's error, [blocks, BLOCK]."""
    if weight is None:
        return torch.ones(strip.shape[1:])
    missing = strip.shape[1] * BLOCK - len(weight)
    wide = torch.from_numpy(np.pad(weight.astype(np.float32), (0, missing)))
    return wide.reshape(-1, BLOCK) + _TINY


def block_scales(strip: torch.Tensor, bits: int, importance: torch.Tensor) -> torch.Tensor:
    """Return the scale of each block, [N, blocks, 1], with the weight of each number's error.

    [N, blocks, BLOCK], [blocks, BLOCK]
    """
    return _in_blocks(strip, bits, importance)[1]


def _in_blocks(
    strip: torch.Tensor, bits: int, importance: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _nearest(strip) if bits == 8 else _searched(strip, importance)


def _nearest(strip: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = strip.abs().amax(-1, keepdim=True).clamp_min(_TINY) / LARGEST
    return (strip / scale).round(), scale


def _searched(strip: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The best of some scales at 4 bits, each then the best one for its integers."""
    largest = strip.gather(-1, strip.abs().argmax(-1, keepdim=True))
    full = torch.where(largest.abs() < _TINY, torch.full_like(largest, _TINY), largest) / -8
    best = torch.full(strip.shape[:-1], torch.inf)
    values, scales = torch.zeros_like(strip), full.clone()
    weighted = strip * weight
    for share in _SHARES:
        given = (strip / (full * share)).round_().clamp_(-8, 7)
        size = (given.square() * weight).sum(-1)
        scale = (weighted * given).sum(-1) / size.clamp_min(_TINY)
        error = ((strip - given * scale[..., None]).square_() * weight).sum(-1)
        better = (error < best) & (size > _TINY)
        best = torch.where(better, error, best)
        values = torch.where(better[..., None], given, values)
        scales[..., 0] = torch.where(better, scale, scales[..., 0])
    return values, scales


def packed(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return unsigned integers as bytes, two of 4 bits in one."""
    found = values.to(torch.uint8)
    return found if bits == 8 else found[..., 0::2] | (found[..., 1::2] << 4)


def signed(blocks_: Blocks, bits: int, size: int) -> Integers:
    """Blocks as DequantizeLinear reads them: integers [K, N], scales [blocks, N].

    Of 4 bits two are in a byte, in their order. K is `size`.
    """
    values = (_bytes(blocks_, bits).to(torch.int16) - 2 ** (bits - 1)).flatten(1)[:, :size].T
    whole = values.to(torch.int8).contiguous().numpy()
    if bits == 4:
        pairs = np.pad(whole.reshape(-1) & 15, (0, whole.size % 2)).astype(np.uint8)
        whole = pairs[0::2] | (pairs[1::2] << 4)
    return Integers(whole, np.ascontiguousarray(blocks_.scales.T))


def _bytes(blocks_: Blocks, bits: int) -> torch.Tensor:
    """A byte a number. -> [N, blocks, BLOCK]"""
    values = torch.from_numpy(blocks_.values)
    return values if bits == 8 else torch.stack((values & 15, values >> 4), -1).flatten(-2)


def unpacked(blocks_: Blocks, bits: int) -> torch.Tensor:
    """Return what rounded weights are. -> [K and zeros, N]"""
    values, scales = _bytes(blocks_, bits), torch.from_numpy(blocks_.scales)
    return ((values.float() - 2 ** (bits - 1)) * scales[..., None]).flatten(1).T


def error_in_blocks(weights: torch.Tensor, x: np.ndarray, bits: int) -> float:
    """As `error`, in blocks, of `_COLUMNS` columns: scales of all are only searched to be stored.

    [K, N], [n, K]
    """
    off = size = 0.0
    some = weights[:, :: -(-weights.shape[1] // _COLUMNS)]
    for wanted, found in _products_in_blocks(some, x, bits):
        off += float((found - wanted).square().sum())
        size += float(wanted.square().sum())
    return (off / max(size, _TINY)) ** 0.5


def divergence_in_blocks(weights: torch.Tensor, x: np.ndarray, bits: int) -> float:
    """What rounding in blocks costs logits x W: Kullback-Leibler, nats a row. [K, V], [n, K]"""
    pairs = zip(*_products_in_blocks(weights, x, bits), strict=True)
    wanted, found = (torch.log_softmax(torch.cat(strips, 1).double(), 1) for strips in pairs)
    return float((wanted.exp() * (wanted - found)).sum(1).mean())


def _products_in_blocks(
    weights: torch.Tensor, x: np.ndarray, bits: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """x W of some columns at a time, and what rounding both in blocks makes of it."""
    wide = np.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK))).reshape(len(x), -1, BLOCK)
    given = torch.from_numpy(rows(wide).reshape(len(x), -1))
    exact, weight = torch.from_numpy(x), np.square(x).mean(0)
    for at in _strips(weights):
        strip = weights[:, at]
        yield exact @ strip.float(), given @ unpacked(blocks(strip, bits, weight), bits)


def rows(x: np.ndarray) -> np.ndarray:
    """x as it is after rounding with one scale a row. [..., K] -> the same"""
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


def error_of_columns(weights: torch.Tensor, powers: np.ndarray) -> float:
    """What rounding costs the worst of some columns of W itself, in the size of the column. [K, N]

    Each is rounded after row k was multiplied by 2 ** powers[k], and divided again.
    """
    found, wanted = columns(weights, powers), weights.float()
    whole = torch.from_numpy(found.values * found.scales) / _factors(powers)[:, None]
    off = (whole - wanted).norm(dim=0) / wanted.norm(dim=0).clamp_min(_TINY)
    return float(off.max())


def _factors(powers: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.exp2(powers).astype(np.float32))


def _strips(weights: torch.Tensor) -> list[slice]:
    """Some columns at a time."""
    num_columns = weights.shape[-1]
    width = max(1, _STRIP * num_columns // max(1, weights.numel()))
    return [slice(at, at + width) for at in range(0, num_columns, width)]
