"""The weights file of a quantised model: integers, their scales, and what stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch

from specedge.bundle.manifest import FileEntry

from ..graph.weights import ALIGNMENT, FILE, HashedFile
from . import rounding
from .matrices import contents
from .rounding import Blocks, Integers


class Store:
    """Writes `folder`/weights.bin; what has one key, in whichever graph, is written once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._hashed = HashedFile(folder / FILE)
        self._known: dict[Hashable, tuple[ir.ExternalTensor, ...]] = {}

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self._hashed.close()

    @property
    def file(self) -> FileEntry:
        """The file's size and hash, once it is closed."""
        return FileEntry(self._hashed.size, self._hashed.digest.hexdigest())

    def integers(
        self, key: Hashable, make: Callable[[], Integers]
    ) -> tuple[ir.ExternalTensor, ir.ExternalTensor]:
        """Where a matrix's integers lie, and its scales."""
        return self._pair(key, make, ir.DataType.INT8)

    def blocks(
        self, key: Hashable, make: Callable[[], Blocks]
    ) -> tuple[ir.ExternalTensor, ir.ExternalTensor]:
        """Where a matrix's blocks lie, and their scales."""
        return self._pair(key, make, ir.DataType.UINT8)

    def signed_blocks(
        self,
        blocks: tuple[ir.ExternalTensor, ir.ExternalTensor],
        bits: int,
        shape: tuple[int, int],
        seen: Callable[[torch.Tensor], torch.Tensor] = lambda one: one,
    ) -> tuple[ir.ExternalTensor, ir.ExternalTensor]:
        """Where stored blocks lie once more as signed integers, [K, N], and their scales.

        `seen` makes [N, blocks, ...] of them.
        """

        def make() -> Integers:
            self._hashed.flush()
            values, scales = (seen(contents(one)).numpy() for one in blocks)
            return rounding.signed(Blocks(values, scales), bits, shape[0])

        kind = ir.DataType.INT4 if bits == 4 else ir.DataType.INT8
        return self._pair(("signed", blocks[0].offset), make, kind, ir.Shape(shape))

    def zeros(self, shape: tuple[int, ...]) -> ir.ExternalTensor:
        """Where as many integers lie that are 0."""
        key = ("zeros", shape)
        if key not in self._known:
            name = f"zeros{len(self._known)}"
            self._known[key] = (self._put(np.zeros(shape, np.int8), ir.DataType.INT8, name),)
        return self._known[key][0]

    def middles(self, shape: tuple[int, ...], bits: int) -> ir.ExternalTensor:
        """Where as many integers of so many bits lie that blocks take for 0, packed."""
        key = ("middles", shape, bits)
        if key not in self._known:
            name, size = f"middles{len(self._known)}", int(np.prod(shape)) * bits // 8
            found = np.full(size, 0x80 if bits == 8 else 0x88, np.uint8)
            self._known[key] = (self._put(found, ir.DataType.UINT8, name),)
        return self._known[key][0]

    def _pair(
        self,
        key: Hashable,
        make: Callable[[], Integers | Blocks],
        kind: ir.DataType,
        shape: ir.Shape | None = None,
    ) -> tuple[ir.ExternalTensor, ir.ExternalTensor]:
        if key not in self._known:
            made = make()
            name = f"matrix{len(self._known)}"
            self._known[key] = (
                self._put(made.values, kind, name, shape),
                self._put(made.scales, ir.DataType.FLOAT, f"{name}.scales"),
            )
        values, scales = self._known[key]
        return values, scales

    def as_it_is(self, tensor: ir.ExternalTensor) -> ir.ExternalTensor:
        """Where a tensor of the float model's file lies in this one."""
        key = ("as it is", tensor.offset, tuple(tensor.shape))
        if key not in self._known:
            data = np.memmap(tensor.path, np.uint8, "r", tensor.offset or 0, (tensor.length or 0,))
            self._known[key] = (self._put(data, tensor.dtype, tensor.name, tensor.shape),)
        return self._known[key][0]

    def floats(self, key: Hashable, make: Callable[[], np.ndarray], name: str) -> ir.ExternalTensor:
        """Return where a float32 array lies."""
        if key not in self._known:
            self._known[key] = (self._put(make(), ir.DataType.FLOAT, name),)
        return self._known[key][0]

    def adopt(self, graph: ir.Graph) -> None:
        """Copy what a graph reads of another model's file, and let it read the copies."""
        for value in graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor) and Path(tensor.base_dir) != self.folder:
                value.const_value = self.as_it_is(tensor)

    def _put(
        self, array: np.ndarray, kind: ir.DataType, name: str, shape: ir.ShapeProtocol | None = None
    ) -> ir.ExternalTensor:
        offset = self._hashed.align(ALIGNMENT)
        data = np.ascontiguousarray(array)
        self._hashed.write(data.reshape(-1).view(np.uint8).data)
        return ir.ExternalTensor(
            FILE, offset, data.nbytes, kind, shape=ir.Shape(shape or data.shape), name=name,
            base_dir=self.folder,
        )  # fmt: skip
