"""Writer of a quantized model's weights file."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch

from specedge.bundle.manifest import FileEntry

from ..graph.external_data import ALIGNMENT, FILE, HashedFile, as_bytes
from . import rounding
from .matrices import tensor_data
from .rounding import IntegerMatrix


class WeightsWriter:
    """Writer of `folder`/weights.bin, in which each key is stored once for all graphs.

    Keys have offsets in the weights file of the float graphs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._original: Path | None = None  # folder of the float graphs
        self._hashed = HashedFile(folder / FILE)
        self._tensors: dict[Hashable, tuple[ir.ExternalTensor, ...]] = {}

    def __enter__(self) -> WeightsWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._hashed.close()

    def reading(self, folder: Path) -> WeightsWriter:
        """Return a writer to the same file, for float graphs in a folder."""
        writer = copy.copy(self)
        writer._original = folder
        return writer

    @property
    def file(self) -> FileEntry:
        """Size and hash of the closed file."""
        return FileEntry(self._hashed.size, self._hashed.digest.hexdigest())

    def matrix(
        self,
        key: Hashable,
        make: Callable[[], IntegerMatrix],
        dtype: ir.DataType | None = None,
        shape: ir.Shape | None = None,
    ) -> tuple[ir.ExternalTensor, ir.ExternalTensor]:
        """Store integers, by default in the array's type and shape, and their scales."""
        key = self._original, key
        if key not in self._tensors:
            matrix = make()
            name = f"matrix{len(self._tensors)}"
            self._tensors[key] = (
                self._append(matrix.values, name, dtype, shape),
                self._append(matrix.scales, f"{name}.scales"),
            )
        values, scales = self._tensors[key]
        return values, scales

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
            return rounding.to_signed(IntegerMatrix(values, scales), bits, shape[0])

        integer_type = ir.DataType.INT4 if bits == 4 else ir.DataType.INT8
        return self.matrix(("signed", blocks[0].offset), make, integer_type, ir.Shape(shape))

    def array(
        self,
        key: Hashable,
        make: Callable[[], np.ndarray],
        name: str,
        dtype: ir.DataType | None = None,
        shape: ir.ShapeProtocol | None = None,
    ) -> ir.ExternalTensor:
        """Store an array, by default in its own type and shape."""
        key = self._original, key
        if key not in self._tensors:
            self._tensors[key] = (self._append(make(), name, dtype, shape),)
        return self._tensors[key][0]

    def adopt(self, graph: ir.Graph) -> None:
        """Copy all tensors that a graph reads from another weights file."""
        for value in graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor) and Path(tensor.base_dir) != self.folder:
                key = ("as it is", tensor.offset, tuple(tensor.shape))
                data = partial(_stored_bytes, tensor)
                value.const_value = self.array(key, data, tensor.name, tensor.dtype, tensor.shape)

    def _append(
        self,
        array: np.ndarray,
        name: str,
        dtype: ir.DataType | None = None,
        shape: ir.ShapeProtocol | None = None,
    ) -> ir.ExternalTensor:
        offset = self._hashed.align(ALIGNMENT)
        data = np.ascontiguousarray(array)
        dtype = dtype or ir.DataType.from_numpy(data.dtype)
        self._hashed.write(data.reshape(-1).view(np.uint8).data)
        return ir.ExternalTensor(
            FILE, offset, data.nbytes, dtype, shape=ir.Shape(shape or data.shape), name=name,
            base_dir=self.folder,
        )  # fmt: skip


def _stored_bytes(tensor: ir.ExternalTensor) -> np.ndarray:
    return np.frombuffer(as_bytes(tensor_data(tensor)), np.uint8)
