"""Block-wise quantized matrices of a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specedge.cpu_count import cpu_count

_STRIP_SIZE = 1 << 18  # elements that are dequantized at a time, to stay in the CPU's cache
TensorsByName = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class BlockLayout:
    """Layout of block-wise weights: integers of `bits`, with a scale for each `block_size` along K.

    Without zero points the zero point is 2 ** (bits - 1). Offsets are added to dequantized values.
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

    def dequantize(self, bits: int, dtype: type[np.floating] = np.float32) -> np.ndarray:
        """Return the values of integers of `bits`, [N, blocks, block_size]."""
        points = 2 ** (bits - 1) if self.zero_points is None else self.zero_points[..., None]
        values = self.integers.astype(dtype) - dtype(points)  # type: ignore[arg-type]
        values *= self.scales[..., None]
        return values if self.offsets is None else values + self.offsets[..., None]


@dataclass(frozen=True)
class QuantizedTensor:
    """Quantized matrix of a checkpoint, [N, K], memory-mapped.

    Attributes:
        name: Name in the checkpoint.
        type_name: Name of its quantization type.
        shape: N and K.
        num_bytes: Size in the checkpoint.
        layout: Layout of its blocks; None for types without one, which are dequantized.
        dequantize: Return rows by slice or index in float32, [n, K].
        unpack: Return rows by index as integers, with the inputs in `order`.
        order: Permutation of the inputs that sorts them by block, [K]; None for the identity.
    """

    name: str
    type_name: str
    shape: tuple[int, int]
    num_bytes: int
    layout: BlockLayout | None
    dequantize: Callable[[slice | np.ndarray], np.ndarray]
    unpack: Callable[[np.ndarray], IntegerBlocks]
    order: np.ndarray | None = None

    def values(self) -> np.ndarray:
        """Return all values in float32, [N, K]."""
        values = np.empty(self.shape, np.float32)

        def write(at: slice) -> None:
            values[at] = self.dequantize(at)

        map_strips(write, *self.shape)
        return values


@dataclass(frozen=True)
class QuantizationFormat(ABC):
    """Quantization format of a safetensors checkpoint.

    Attributes:
        config: Quantization config of the checkpoint.
        name: Name of the format.
        growth: Maximum size of the dequantized weights relative to the files.
        can_be_kept: True if the weights are integers times scales, which a bundle can keep.
    """

    config: Mapping[str, Any]
    name = ""
    growth = 1.0
    can_be_kept = False

    def unsupported_variant(self) -> str | None:
        """Return the name of a variant that cannot be read; None if this one can."""
        return None

    def quantized_tensors(self, where: str, state: TensorsByName) -> list[QuantizedTensor]:
        """Return the quantized matrices that a bundle can keep. Raises CheckpointError."""
        return []

    @abstractmethod
    def dequantize(
        self, where: str, state: TensorsByName, transposed: Collection[str]
    ) -> dict[str, torch.Tensor]:
        """Replace quantized matrices by lazy dequantized ones. Raises CheckpointError.

        Args:
            where: Role and name, as in error messages.
            state: Tensors of the checkpoint.
            transposed: Last parts of the names of modules whose matrices are [K, N] in the model.
        """


def strips(num_rows: int, size: int) -> Iterator[slice]:
    """Yield slices of rows of bounded size. `size` is that of a row."""
    step = max(1, _STRIP_SIZE // size)
    return (slice(at, at + step) for at in range(0, num_rows, step))


def map_strips(function: Callable[[slice], None], num_rows: int, size: int) -> None:
    """Call a function for all strips of rows, in as many threads as there are CPUs."""
    pieces = list(strips(num_rows, size))
    if len(pieces) == 1:
        function(pieces[0])
    else:
        with ThreadPoolExecutor(cpu_count()) as pool:
            list(pool.map(function, pieces))
