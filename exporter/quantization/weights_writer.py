"""Writer of a quantized model's weights file."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx_ir as ir
import torch

from specedge.bundle.manifest import FileEntry

from ..checkpoint.quantized_rows import QuantizedRows
from ..graph.external_data import ALIGNMENT, FILE, TORCH_TYPES, HashedFile, as_bytes
from . import rounding
from .matrices import tensor_data
from .rounding import BlockMatrix, IntegerMatrix


class WeightsWriter:
    """Writer of `folder`/weights.bin, in which each key is stored once for all graphs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._hashed = HashedFile(folder / FILE)
        self._tensors: dict[Hashable, tuple[ir.ExternalTensor, ...]] = {}

    def __enter__(self) -> WeightsWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._hashed.close()

    @property
    def file(self) -> FileEntry:
        """Size and hash of the closed file."""
        return FileEntry(self._hashed.size, self._hashed.digest.hexdigest())

    def integers(
        self, key: Hashable, make: Callable[[], IntegerMatrix]
    ) -> tuple[ir.ExternalTensor, ir.ExternalTensor]:
        """Store per-channel integers and scales."""
        return self._store_pair(key, make, ir.DataType.INT8)

    def blocks(
        self, key: Hashable, make: Callable[[], BlockMatrix]
    ) -> tuple[ir.ExternalTensor, ir.ExternalTensor]:
        """Store block-wise integers and scales."""
        return self._store_pair(key, make, ir.DataType.UINT8)

    def signed_blocks(
        self,
        blocks: tuple[ir.ExternalTensor, ir.ExternalTensor],
        bits: int,
        shape: tuple[int, int],
        arrange: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    ) -> tuple[ir.ExternalTensor, ir.ExternalTensor]:
        """Store blocks a second time, as signed integers [K, N] with their scales.

        `arrange` first brings integers and scales to [N, blocks, ...].
        """

        def make() -> IntegerMatrix:
            self._hashed.flush()
            values, scales = (arrange(tensor_data(tensor)).numpy() for tensor in blocks)
            return rounding.to_signed(BlockMatrix(values, scales), bits, shape[0])

        integer_type = ir.DataType.INT4 if bits == 4 else ir.DataType.INT8
        return self._store_pair(("signed", blocks[0].offset), make, integer_type, ir.Shape(shape))

    def zeros(self, shape: tuple[int, ...]) -> ir.ExternalTensor:
        """Store int8 zeros, as zero points."""
        key = ("zeros", shape)
        if key not in self._tensors:
            name = f"zeros{len(self._tensors)}"
            self._tensors[key] = (self._append(np.zeros(shape, np.int8), ir.DataType.INT8, name),)
        return self._tensors[key][0]

    def zero_points(self, shape: tuple[int, ...], bits: int) -> ir.ExternalTensor:
        """Store the packed zero points of unsigned blocks."""
        key = ("middles", shape, bits)
        if key not in self._tensors:
            name, size = f"middles{len(self._tensors)}", int(np.prod(shape)) * bits // 8
            values = np.full(size, 0x80 if bits == 8 else 0x88, np.uint8)
            self._tensors[key] = (self._append(values, ir.DataType.UINT8, name),)
        return self._tensors[key][0]

    def _store_pair(
        self,
        key: Hashable,
        make: Callable[[], IntegerMatrix | BlockMatrix],
        dtype: ir.DataType,
        shape: ir.Shape | None = None,
    ) -> tuple[ir.ExternalTensor, ir.ExternalTensor]:
        if key not in self._tensors:
            matrix = make()
            name = f"matrix{len(self._tensors)}"
            self._tensors[key] = (
                self._append(matrix.values, dtype, name, shape),
                self._append(matrix.scales, ir.DataType.FLOAT, f"{name}.scales"),
            )
        values, scales = self._tensors[key]
        return values, scales

    def copy(
        self, tensor: ir.ExternalTensor, quantized: Mapping[int, QuantizedRows]
    ) -> ir.ExternalTensor:
        """Copy a tensor of the float model's file, which may lack quantized ones."""
        key = ("as it is", tensor.offset, tuple(tensor.shape))
        if key not in self._tensors:
            if (rows := quantized.get(tensor.offset or 0)) is not None:
                values = rows.lazy().read().to(TORCH_TYPES[tensor.dtype.value])
                data = np.frombuffer(as_bytes(values), np.uint8)
            else:
                data = np.memmap(
                    tensor.path, np.uint8, "r", tensor.offset or 0, (tensor.length or 0,)
                )
            self._tensors[key] = (self._append(data, tensor.dtype, tensor.name, tensor.shape),)
        return self._tensors[key][0]

    def array(
        self,
        key: Hashable,
        make: Callable[[], np.ndarray],
        name: str,
        dtype: ir.DataType = ir.DataType.FLOAT,
    ) -> ir.ExternalTensor:
        """Store an array."""
        if key not in self._tensors:
            self._tensors[key] = (self._append(make(), dtype, name),)
        return self._tensors[key][0]

    def adopt(
        self, graph: ir.Graph, quantized: Mapping[int, QuantizedRows] = MappingProxyType({})
    ) -> None:
        """Copy all tensors that a graph reads from another weights file.

        That file may lack `quantized` ones, which are dequantized.
        """
        for value in graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor) and Path(tensor.base_dir) != self.folder:
                value.const_value = self.copy(tensor, quantized)

    def _append(
        self,
        array: np.ndarray,
        dtype: ir.DataType,
        name: str,
        shape: ir.ShapeProtocol | None = None,
    ) -> ir.ExternalTensor:
        offset = self._hashed.align(ALIGNMENT)
        data = np.ascontiguousarray(array)
        self._hashed.write(data.reshape(-1).view(np.uint8).data)
        return ir.ExternalTensor(
            FILE, offset, data.nbytes, dtype, shape=ir.Shape(shape or data.shape), name=name,
            base_dir=self.folder,
        )  # fmt: skip
