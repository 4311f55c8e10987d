"""Rounding of weights to integers, and the error of a product of quantized inputs and weights.

x [n, K] times W [..., K, N]. Quantization is symmetric. Per-channel: one scale per row of x and per
column of W; block-wise: one scale for every `BLOCK_SIZE` values of both along K. Rows of x are
quantized independently.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

MAX_INT8 = 127
_TINY = 1e-30
_STRIP_SIZE = 1 << 24  # elements that are cast to float32 at a time
BLOCK_SIZE = 32
_NUM_SAMPLED_COLUMNS = 512  # columns sampled to measure an error
# Candidates of a 4-bit block's scale, relative to the scale without clipping.
_SCALE_FACTORS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)


@dataclass(frozen=True)
class IntegerMatrix:
    """Integers and float32 scales of a matrix W.

    Per-channel, W = values * scales: int8 [..., K, N] and [..., 1, N]. Block-wise, in the layout of
    MatMulNBits: bytes [N, blocks, BLOCK_SIZE * bits / 8] and [N, blocks], where integers have the
    zero point `2 ** (bits - 1)`, and the first of two is in a byte's low half.
    """

    values: np.ndarray
    scales: np.ndarray


def join(matrices: Iterable[IntegerMatrix], axis: int) -> IntegerMatrix:
    """Join matrices along N, the last axis per-channel and the first one block-wise."""
    pieces = list(matrices)
    if len(pieces) == 1:
        return pieces[0]
    return IntegerMatrix(
        np.concatenate([piece.values for piece in pieces], axis),
        np.concatenate([piece.scales for piece in pieces], axis),
    )


def quantize_columns(weights: torch.Tensor) -> IntegerMatrix:
    """Quantize a matrix per column."""
    values = torch.empty(weights.shape, dtype=torch.int8)
    scales = torch.empty((*weights.shape[:-2], 1, weights.shape[-1]))
    for at in _column_strips(weights):
        strip = weights[..., at].float()
        scale = strip.abs().amax(-2, keepdim=True).clamp_min(_TINY) / MAX_INT8
        values[..., at] = (strip / scale).round().to(torch.int8)
        scales[..., at] = scale
    return IntegerMatrix(values.numpy(), scales.numpy())


def quantize_blocks(
    weights: torch.Tensor, bits: int, weight: np.ndarray | None = None
) -> IntegerMatrix:
    """Quantize a matrix block-wise. [K, N]

    8-bit integers are rounded to nearest. The scale of a 4-bit block minimizes the squared error of
    its product, with `weight` [K] the mean square of the input: the largest value may be clipped,
    and the scale may be negative, as there is one more negative integer than positive ones.
    """
    values, scales = [], []
    for at in _column_strips(weights):
        strip = _to_blocks(weights[:, at].float())
        integers, scale = round_blocks(strip, bits, _importance(weight, strip))
        values.append(pack(integers.to(torch.int16) + 2 ** (bits - 1), bits))
        scales.append(scale.squeeze(-1))
    return IntegerMatrix(torch.cat(values).numpy(), torch.cat(scales).numpy())


def _to_blocks(weights: torch.Tensor) -> torch.Tensor:
    """Return a matrix in blocks, padded with zeros. [K, N] -> [N, blocks, BLOCK_SIZE]"""
    missing = -weights.shape[0] % BLOCK_SIZE
    padded = torch.nn.functional.pad(weights.T, (0, missing))
    return padded.reshape(weights.shape[1], -1, BLOCK_SIZE)


def _importance(weight: np.ndarray | None, strip: torch.Tensor) -> torch.Tensor:
    """Return the weight of each element's error, [blocks, BLOCK_SIZE]."""
    if weight is None:
        return torch.ones(strip.shape[1:])
    missing = strip.shape[1] * BLOCK_SIZE - len(weight)
    wide = torch.from_numpy(np.pad(weight.astype(np.float32), (0, missing)))
    return wide.reshape(-1, BLOCK_SIZE) + _TINY


def round_blocks(
    strip: torch.Tensor, bits: int, importance: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return integers, [N, blocks, BLOCK_SIZE], and the scale of each block, [N, blocks, 1].

    Args:
        strip: Values, [N, blocks, BLOCK_SIZE].
        bits: Bits of an integer.
        importance: Weight of each value's error, [blocks, BLOCK_SIZE].
    """
    if bits == 4:
        return _search_scales(strip, importance)
    scale = strip.abs().amax(-1, keepdim=True).clamp_min(_TINY) / MAX_INT8
    return (strip / scale).round(), scale


def _search_scales(strip: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Search the best 4-bit scale of each block; return integers and scales."""
    largest = strip.gather(-1, strip.abs().argmax(-1, keepdim=True))
    full = torch.where(largest.abs() < _TINY, torch.full_like(largest, _TINY), largest) / -8
    best = torch.full(strip.shape[:-1], torch.inf)
    values, scales = torch.zeros_like(strip), full.clone()
    weighted = strip * weight
    for share in _SCALE_FACTORS:
        integers = (strip / (full * share)).round_().clamp_(-8, 7)
        size = (integers.square() * weight).sum(-1)
        scale = (weighted * integers).sum(-1) / size.clamp_min(_TINY)
        error = ((strip - integers * scale[..., None]).square_() * weight).sum(-1)
        better = (error < best) & (size > _TINY)
        best = torch.where(better, error, best)
        values = torch.where(better[..., None], integers, values)
        scales[..., 0] = torch.where(better, scale, scales[..., 0])
    return values, scales


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack unsigned integers to bytes, two 4-bit integers in one."""
    unsigned = values.to(torch.uint8)
    if bits == 8:
        return unsigned
    pairs = unsigned.contiguous().numpy().view(np.uint16)  # little-endian
    return torch.from_numpy((pairs | pairs >> 4).astype(np.uint8))


def to_signed(blocks_: IntegerMatrix, bits: int, size: int) -> IntegerMatrix:
    """Return blocks in the layout of DequantizeLinear: integers [K, N], scales [blocks, N].

    4-bit integers are packed in pairs. K is `size`.
    """
    values = (_unpack_bytes(blocks_, bits).to(torch.int16) - 2 ** (bits - 1)).flatten(1)[:, :size].T
    whole = values.to(torch.int8).contiguous().numpy()
    if bits == 4:
        pairs = np.pad(whole.reshape(-1) & 15, (0, whole.size % 2)).astype(np.uint8)
        whole = pairs[0::2] | (pairs[1::2] << 4)
    return IntegerMatrix(whole, np.ascontiguousarray(blocks_.scales.T))


def _unpack_bytes(blocks_: IntegerMatrix, bits: int) -> torch.Tensor:
    """Return one byte per integer. -> [N, blocks, BLOCK_SIZE]"""
    values = torch.from_numpy(blocks_.values)
    return values if bits == 8 else torch.stack((values & 15, values >> 4), -1).flatten(-2)


def dequantize(blocks_: IntegerMatrix, bits: int) -> torch.Tensor:
    """Dequantize block-wise weights. -> [padded K, N]"""
    values, scales = _unpack_bytes(blocks_, bits), torch.from_numpy(blocks_.scales)
    return ((values.float() - 2 ** (bits - 1)) * scales[..., None]).flatten(1).T


def block_error(weights: torch.Tensor, x: np.ndarray, bits: int) -> float:
    """Return `product_error` of a block-wise product on sampled columns. [K, N], [n, K]"""
    off = size = 0.0
    sample = weights[:, :: -(-weights.shape[1] // _NUM_SAMPLED_COLUMNS)]
    for exact, approximate in _block_products(sample, x, bits):
        off += float((approximate - exact).square().sum())
        size += float(exact.square().sum())
    return (off / max(size, _TINY)) ** 0.5


def block_divergence(weights: torch.Tensor, x: np.ndarray, bits: int) -> float:
    """Return the KL divergence of block-wise logits x W in nats per row. [K, V], [n, K]"""
    pairs = zip(*_block_products(weights, x, bits), strict=True)
    expected, actual = (torch.log_softmax(torch.cat(strips, 1).double(), 1) for strips in pairs)
    return float((expected.exp() * (expected - actual)).sum(1).mean())


def _block_products(
    weights: torch.Tensor, x: np.ndarray, bits: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield strips of x W along N, exact and block-wise quantized."""
    wide = np.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK_SIZE))).reshape(len(x), -1, BLOCK_SIZE)
    rounded = torch.from_numpy(round_rows(wide).reshape(len(x), -1))
    exact, weight = torch.from_numpy(x), np.square(x).mean(0)
    for at in _column_strips(weights):
        strip = weights[:, at]
        yield (
            exact @ strip.float(),
            rounded @ dequantize(quantize_blocks(strip, bits, weight), bits),
        )


def round_rows(x: np.ndarray) -> np.ndarray:
    """Return x quantized with one scale per row, and dequantized. [..., K] -> [..., K]"""
    scale = np.maximum(np.abs(x).max(-1, keepdims=True), _TINY) / np.float32(MAX_INT8)
    return np.rint(x / scale) * scale


def product_error(weights: torch.Tensor, x: np.ndarray, num_parts: int = 1) -> float:
    """Return the relative RMS error of x W with both quantized.

    K is split into `num_parts` with separate scales. [K, N], [n, K]
    """
    off = size = 0.0
    cuts = np.array_split(np.arange(x.shape[1]), num_parts)
    rounded = [torch.from_numpy(round_rows(x[:, part])) for part in cuts]
    exact = torch.from_numpy(x)
    for at in _column_strips(weights):
        strip = weights[:, at].float()
        expected, actual = exact @ strip, torch.zeros(())
        for part, part_rows in zip(cuts, rounded, strict=True):
            piece = quantize_columns(strip[part[0] : part[-1] + 1])
            actual = actual + part_rows @ (torch.from_numpy(piece.values * piece.scales))
        off += float((actual - expected).square().sum())
        size += float(expected.square().sum())
    return (off / max(size, _TINY)) ** 0.5


def _column_strips(weights: torch.Tensor) -> list[slice]:
    """Return slices of columns of bounded size."""
    num_columns = weights.shape[-1]
    width = max(1, _STRIP_SIZE * num_columns // max(1, weights.numel()))
    return [slice(at, at + width) for at in range(0, num_columns, width)]
