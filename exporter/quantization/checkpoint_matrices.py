"""Matrices of a graph that are rows of a checkpoint's quantized tensors.

Matrices are matched with the checkpoint by fingerprints of their dequantized rows. The rows may be
in another order or tensor than in the checkpoint, and a matrix that was modified, for example by an
adapter, does not match.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from specedge.cpu_count import cpu_count

from ..checkpoint.quantized_tensors import BlockLayout, IntegerBlocks, QuantizedTensor, strips
from . import rounding
from .rounding import BlockMatrix


@dataclass(frozen=True)
class CheckpointMatrix:
    """Matrix [K, N] whose columns are these rows of a quantized tensor."""

    tensor: QuantizedTensor
    rows: np.ndarray

    @property
    def layout(self) -> BlockLayout:
        assert self.tensor.layout is not None
        return self.tensor.layout

    def blocks(self) -> BlockMatrix:
        """Return integers and scales in the layout of MatMulNBits."""
        num_blocks, bits = self.tensor.shape[1] // self.layout.block_size, self.layout.bits
        shape = len(self.rows), num_blocks, self.layout.block_size * bits // 8
        values, scales = np.empty(shape, np.uint8), np.empty(shape[:2], np.float32)
        for at in self.strips():
            unpacked = self.unpack(at)
            values[at] = rounding.pack(torch.from_numpy(unpacked.integers), bits).numpy()
            scales[at] = unpacked.scales
        return BlockMatrix(values, scales)

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


class CheckpointTensors:
    """Quantized tensors of a checkpoint, with fingerprints of their rows."""

    def __init__(self, tensors: Sequence[QuantizedTensor]) -> None:
        self._prints = [(t, _sorted_prints(t)) for t in tensors if t.layout is not None]
        self._last = 0  # index of the last match, near which the next one is

    def find(self, weights: torch.Tensor) -> CheckpointMatrix | None:
        """Return the rows of a tensor that are a matrix's columns, [K, N]; None without a match."""
        size, width = weights.shape
        pieces = (weights[:, at].T.float().contiguous().numpy() for at in strips(width, size))
        prints = np.concatenate([_row_prints(piece) for piece in pieces])
        for i in range(len(self._prints)):
            index = (self._last + i) % len(self._prints)
            tensor, (ordered, order) = self._prints[index]
            if tensor.shape[1] != size:
                continue
            indices = np.minimum(np.searchsorted(ordered, prints[:1]), len(ordered) - 1)
            if ordered[indices[0]] != prints[0]:
                continue
            indices = np.minimum(np.searchsorted(ordered, prints), len(ordered) - 1)
            if np.array_equal(ordered[indices], prints):
                self._last = index
                return CheckpointMatrix(tensor, order[indices])
        return None


def join_matrices(blocks: Iterable[BlockMatrix]) -> BlockMatrix:
    """Join block-wise matrices along N."""
    pieces = list(blocks)
    if len(pieces) == 1:
        return pieces[0]
    return BlockMatrix(
        np.concatenate([piece.values for piece in pieces]),
        np.concatenate([piece.scales for piece in pieces]),
    )


def _sorted_prints(tensor: QuantizedTensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the sorted fingerprints of a tensor's rows, and the rows in that order."""
    with ThreadPoolExecutor(cpu_count()) as pool:
        pieces = pool.map(lambda at: _row_prints(tensor.dequantize(at)), strips(*tensor.shape))
        prints = np.concatenate(list(pieces))
    order = np.argsort(prints, kind="stable")
    return prints[order], order


def _row_prints(rows: np.ndarray) -> np.ndarray:
    """Return a fingerprint of each row: a multilinear hash modulo 2 ** 64. [n, K] -> [n]"""
    factors = np.random.default_rng(0).integers(1 << 62, size=rows.shape[1], dtype=np.uint64)
    words = np.ascontiguousarray(rows, np.float32).view(np.uint32)
    return (words * (factors * np.uint64(2) + np.uint64(1))).sum(1, dtype=np.uint64)
