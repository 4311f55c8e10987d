"""Block-wise integers of matrices: rounded ones, and those of a checkpoint's quantized tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from ..checkpoint.quantized_rows import QuantizedRows
from ..checkpoint.quantized_tensors import BlockLayout, IntegerBlocks, QuantizedTensor, strips
from . import rounding
from .matrices import StoredTensor
from .rounding import IntegerMatrix


@dataclass(frozen=True)
class RoundedMatrix:
    """Matrix [K, N] that is rounded, or was rounded by GPTQ.

    Attributes:
        stored: Matrix.
        bits: Bits of an integer.
        importance: Mean square of the input by channel, [K].
        integers: Result of GPTQ, if it was used.
    """

    stored: StoredTensor
    bits: int
    importance: np.ndarray | None
    integers: IntegerMatrix | None = None
    order = None

    @property
    def layout(self) -> BlockLayout:
        return BlockLayout(self.bits, rounding.BLOCK_SIZE)

    def blocks(self) -> IntegerMatrix:
        """Return integers and scales in the layout of MatMulNBits."""
        if self.integers is not None:
            return self.integers
        return rounding.quantize_blocks(self.stored.data(), self.bits, self.importance)


@dataclass(frozen=True)
class CheckpointMatrix:
    """Matrix [K, N] whose columns are these rows of a quantized tensor."""

    tensor: QuantizedTensor
    rows: np.ndarray

    @property
    def layout(self) -> BlockLayout:
        assert self.tensor.layout is not None
        return self.tensor.layout

    @property
    def order(self) -> np.ndarray | None:
        return self.tensor.order

    def blocks(self) -> IntegerMatrix:
        """Return integers and scales in the layout of MatMulNBits."""
        num_blocks, bits = self.tensor.shape[1] // self.layout.block_size, self.layout.bits
        shape = len(self.rows), num_blocks, self.layout.block_size * bits // 8
        values, scales = np.empty(shape, np.uint8), np.empty(shape[:2], np.float32)
        for at in self.strips():
            unpacked = self.unpack(at)
            values[at] = rounding.pack(torch.from_numpy(unpacked.integers), bits).numpy()
            scales[at] = unpacked.scales
        return IntegerMatrix(values, scales)

    def offsets(self) -> np.ndarray:
        """Return the offsets of blocks, [N, K / block_size]."""
        parts = (self.unpack(at).offsets for at in self.strips())
        return np.concatenate([part for part in parts if part is not None])

    def zero_points(self) -> np.ndarray:
        """Return the packed zero points of blocks, [N, bytes]."""
        parts = (self.unpack(at).zero_points for at in self.strips())
        points = np.concatenate([part for part in parts if part is not None])
        even = (
            np.pad(points, ((0, 0), (0, points.shape[1] % 2))) if self.layout.bits == 4 else points
        )
        return rounding.pack(torch.from_numpy(even), self.layout.bits).numpy()

    def unpack(self, at: slice) -> IntegerBlocks:
        """Return some of the rows as integers."""
        return self.tensor.unpack(self.rows[at])

    def strips(self) -> Iterator[slice]:
        """Yield slices of rows of bounded size."""
        return strips(len(self.rows), self.tensor.shape[1])


BlockSource: TypeAlias = RoundedMatrix | CheckpointMatrix


def find_matrix(rows: QuantizedRows, at: Any = slice(None)) -> CheckpointMatrix | None:
    """Return some rows as a matrix's columns; None if they are of several tensors."""
    sources = rows.sources[at]
    if (sources != sources[0]).any():
        return None
    return CheckpointMatrix(rows.tensors[sources[0]], rows.rows[at])
