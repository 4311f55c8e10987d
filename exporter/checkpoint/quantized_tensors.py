"""Matrices of a checkpoint that are stored in blocks of integers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

_STRIP_SIZE = 1 << 18  # numbers that are dequantized at a time, so that they stay in caches


@dataclass(frozen=True)
class BlockLayout:
    """Layout of block-wise weights: integers of `bits`, with a scale for each `block_size` along K.

    With zero points each block has an integer that represents 0, otherwise 2 ** (bits - 1) does.
    With offsets each block has a number that is added to its dequantized values.
    """

    bits: int
    block_size: int
    has_offsets: bool = False
    has_zero_points: bool = False


@dataclass(frozen=True)
class IntegerBlocks:
    """Block-wise weights, (integers - zero point) * scale + offset.

    Attributes:
        integers: Unsigned integers, [N, blocks, block_size].
        scales: float32 [N, blocks].
        offsets: float32 [N, blocks], or None.
        zero_points: Unsigned integers [N, blocks]; None for 2 ** (bits - 1).
    """

    integers: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray | None = None
    zero_points: np.ndarray | None = None


@dataclass(frozen=True)
class QuantizedTensor:
    """Quantized matrix of a checkpoint, [N, K], memory-mapped.

    Attributes:
        name: Name in the checkpoint.
        type_name: Name of its quantization type.
        shape: N and K.
        num_bytes: Size in the checkpoint.
        layout: Layout of its blocks; None for types without one, which are dequantized.
        dequantize: Return rows in float32, as the format defines them.
        unpack: Return rows as integers, by their indices, with the inputs in `order`.
        order: Inputs in the order of the blocks, [K]; None if that is their own order.
    """

    name: str
    type_name: str
    shape: tuple[int, int]
    num_bytes: int
    layout: BlockLayout | None
    dequantize: Callable[[slice], np.ndarray]
    unpack: Callable[[np.ndarray], IntegerBlocks]
    order: np.ndarray | None = None


def strips(num_rows: int, size: int) -> Iterator[slice]:
    """Yield slices of rows of bounded size."""
    step = max(1, _STRIP_SIZE // size)
    return (slice(at, at + step) for at in range(0, num_rows, step))
