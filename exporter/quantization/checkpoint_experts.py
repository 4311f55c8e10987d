"""Quantized experts of a checkpoint that are kept, in the layout of ONNX Runtime's QMoE node.

QMoE reads integers of one width, in blocks of one size, with integer zero points. Narrower integers
are shifted and larger blocks are split, both exactly. QMoE has no offsets: those of a block become
a zero point of 8-bit integers in steps of d / n,

    d (q - z) + o = d / n (n q - n z + n o / d)    n (z - o / d) is rounded to an integer

with the n whose zero point is most accurate. Differences within a block stay exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from ..checkpoint.quantized_rows import QuantizedRows
from ..checkpoint.quantized_tensors import BlockLayout, IntegerBlocks
from . import rounding
from .block_sources import CheckpointMatrix, find_matrix
from .experts import NUM_SAMPLED_EXPERTS, ExpertWeights
from .rounding import IntegerMatrix

_SMALLEST_BLOCK = 16  # of QMoE
_LARGEST_INTEGER, _MIDDLE = 255, 128
_HUGE = 1e9
_MOST_STEPS = 32  # largest n; a block with all integers of 4 or 5 bits fits n up to 17 or 8


@dataclass(frozen=True)
class ExpertStack:
    """Matrices of experts, [E, N, K]: row i of an expert is row i // P of part i % P."""

    experts: tuple[tuple[CheckpointMatrix, ...], ...]

    @property
    def matrices(self) -> Iterator[CheckpointMatrix]:
        return (matrix for parts in self.experts for matrix in parts)

    @property
    def has_zero_points(self) -> bool:
        """True if blocks have zero points in the bundle."""
        layouts = (matrix.layout for matrix in self.matrices)
        return any(layout.has_zero_points or layout.has_offsets for layout in layouts)

    @property
    def size(self) -> int:
        """Number of inputs, K."""
        return self.experts[0][0].tensor.shape[1]

    def blocks(self, layout: BlockLayout) -> tuple[IntegerMatrix, np.ndarray]:
        """Return integers, [E, N, G, bytes], scales, [E, N, G], and packed zero points, if any."""
        num_rows = sum(len(part.rows) for part in self.experts[0])
        shape = len(self.experts), num_rows, self.size // layout.block_size
        values = np.empty((*shape, layout.block_size * layout.bits // 8), np.uint8)
        scales, points = np.empty(shape, np.float32), np.empty(shape, np.uint8)
        for e, parts in enumerate(self.experts):
            for i, part in enumerate(parts):
                rows = (e, slice(i, None, len(parts)))
                for at in part.strips():
                    blocks = convert(part.unpack(at), part.layout, layout)
                    assert blocks.zero_points is not None
                    integers = torch.from_numpy(blocks.integers)
                    values[rows][at] = rounding.pack(integers, layout.bits).numpy()
                    scales[rows][at] = blocks.scales
                    points[rows][at] = blocks.zero_points
        points = points if self.has_zero_points else points[..., :0]
        packed = rounding.pack(torch.from_numpy(points), layout.bits).numpy()
        return IntegerMatrix(values, scales), packed

    def offset_error(self, layout: BlockLayout) -> float:
        """Return the relative RMS error of weights by rounded offsets, on a sample of experts."""
        error = size = 0.0
        for parts in self.experts[:: -(-len(self.experts) // NUM_SAMPLED_EXPERTS)]:
            for part in (part for part in parts if part.layout.has_offsets):
                blocks = part.unpack(next(part.strips()))
                exact = blocks.dequantize(part.layout.bits, np.float64)
                converted = convert(blocks, part.layout, layout)
                rounded = converted.dequantize(layout.bits, np.float64)
                error += float(np.square(rounded.reshape(exact.shape) - exact).sum())
                size += float(np.square(exact).sum())
        return (error / size) ** 0.5 if size else 0.0


@dataclass(frozen=True)
class CheckpointExperts:
    """Experts of a layer, [E, 2 * I, H] and [E, H, I], and the layout of their integers."""

    stacks: tuple[ExpertStack, ...]
    layout: BlockLayout

    @cached_property
    def offset_error(self) -> float:
        """Relative RMS error of weights by rounded offsets; 0 without offsets."""
        return max(stack.offset_error(self.layout) for stack in self.stacks)


def find_experts(
    quantized: Mapping[int, QuantizedRows], experts: ExpertWeights
) -> CheckpointExperts | None:
    """Return the checkpoint's matrices of experts; None if QMoE does not support one."""
    stacks = []
    for stored, num_parts in ((experts.first, 2), (experts.last, 1)):
        matrices = []
        rows = quantized.get(stored.offset)
        if rows is None or stored.order != (0, 1, 2):
            return None
        rows = rows.reshape(stored.tensor.shape.numpy()[:2])
        for expert in range(len(rows.rows)):
            slices = (slice(i, None, num_parts) for i in range(num_parts))
            parts = [find_matrix(rows, (expert, at)) for at in slices]
            kept = tuple(part for part in parts if part is not None and part.tensor.order is None)
            if len(kept) < num_parts:
                return None
            matrices.append(kept)
        stacks.append(ExpertStack(tuple(matrices)))
    layout = _common_layout(stacks)
    return None if layout is None else CheckpointExperts(tuple(stacks), layout)


def _common_layout(stacks: Sequence[ExpertStack]) -> BlockLayout | None:
    """Return a layout that QMoE supports for all matrices, or None."""
    layouts = {matrix.layout for stack in stacks for matrix in stack.matrices}
    bits = 8 if any(layout.bits == 8 or layout.has_offsets for layout in layouts) else 4
    block_size = min(layout.block_size for layout in layouts)
    for stack in (stack for stack in stacks if stack.has_zero_points):
        # QMoE has another layout of zero points for a single block, and pads an odd number of
        # 4-bit ones, whose rows could not be joined.
        num_blocks = stack.size // block_size
        if num_blocks == 1 or (bits == 4 and num_blocks % 2):
            block_size //= 2
    return BlockLayout(bits, block_size) if block_size >= _SMALLEST_BLOCK else None


def convert(blocks: IntegerBlocks, source: BlockLayout, target: BlockLayout) -> IntegerBlocks:
    """Convert blocks to a layout with zero points, and with as many bits or more.

    The target has blocks of the same size or smaller ones.
    """
    if source.has_offsets:
        blocks = _round_offsets(blocks, source.bits)
    else:
        middle = 2 ** (source.bits - 1)
        shift = np.uint8(2 ** (target.bits - 1) - middle)
        points = blocks.zero_points
        points = np.full_like(blocks.scales, middle, np.uint8) if points is None else points
        blocks = IntegerBlocks(blocks.integers + shift, blocks.scales, None, points + shift)
    assert blocks.zero_points is not None
    count = source.block_size // target.block_size
    return IntegerBlocks(
        blocks.integers.reshape(len(blocks.integers), -1, target.block_size),
        blocks.scales.repeat(count, 1),
        None,
        blocks.zero_points.repeat(count, 1),
    )


def _round_offsets(blocks: IntegerBlocks, bits: int) -> IntegerBlocks:
    """Return 8-bit blocks with zero points instead of offsets."""
    lowest = blocks.integers.min(-1)
    integers = blocks.integers - lowest[..., None]
    span = integers.max(-1).astype(np.int64)
    zeros = _zero_points(blocks, bits) - lowest
    factor, point = np.zeros(zeros.shape, np.uint8), np.zeros(zeros.shape)
    best = np.full(zeros.shape, np.inf)
    for n in range(1, _MOST_STEPS + 1):
        candidate = np.rint(n * zeros)
        error = np.abs(candidate - n * zeros) / n
        fits = n * span + np.maximum(-candidate, 0) <= _LARGEST_INTEGER
        better = fits & (candidate <= _LARGEST_INTEGER) & (error < best)
        best, factor = np.where(better, error, best), np.where(better, np.uint8(n), factor)
        point = np.where(better, candidate, point)
    shift = np.maximum(-point, 0).astype(np.uint8)
    rounded = IntegerBlocks(
        integers * factor[..., None] + shift[..., None],
        blocks.scales / np.maximum(factor, 1).astype(np.float32),
        None,
        (point + shift).astype(np.uint8),
    )
    if not factor.all():  # steps of 0, or far smaller than the offset
        _round_values(rounded, factor == 0, blocks.dequantize(bits, np.float64))
    return rounded


def _zero_points(blocks: IntegerBlocks, bits: int) -> np.ndarray:
    """Return the real numbers at which blocks with offsets are 0; huge for steps of 0."""
    points = 2 ** (bits - 1) if blocks.zero_points is None else blocks.zero_points
    scales = blocks.scales.astype(np.float64)
    assert blocks.offsets is not None
    return points + np.divide(
        -blocks.offsets, scales, out=np.full_like(scales, _HUGE), where=scales != 0
    )


def _round_values(blocks: IntegerBlocks, mask: np.ndarray, values: np.ndarray) -> None:
    """Replace the masked blocks by values that are rounded to nearest. [N, G, block_size]"""
    some = values[mask]
    scales = np.abs(some).max(-1, keepdims=True) / (_MIDDLE - 1)
    steps = np.divide(some, scales, out=np.zeros_like(some), where=scales != 0)
    assert blocks.zero_points is not None
    blocks.integers[mask] = np.rint(steps) + _MIDDLE
    blocks.scales[mask] = scales[:, 0]
    blocks.zero_points[mask] = _MIDDLE
