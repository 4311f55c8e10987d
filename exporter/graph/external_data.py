"""Weights file of a model, with each tensor once, in the checkpoint's type, for all graphs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch
from onnx_ir.tensor_adapters import TorchTensor

from specedge.bundle.manifest import FileEntry
from specedge.errors import ExportError

from .. import mapped_memory
from ..checkpoint.lazy_tensors import LazyTensor, as_lazy, materialize
from ..progress import Advance
from ..tracing.named_weights import StoredMatrix
from .nodes import add_initializer, insert_node, producer

FILE = "weights.bin"
SMALLEST = 1024  # bytes; smaller tensors are stored in the graph
ALIGNMENT = 64
STORED = {
    "float16": (torch.float16, ir.DataType.FLOAT16),
    "bfloat16": (torch.bfloat16, ir.DataType.BFLOAT16),
    "float32": (torch.float32, ir.DataType.FLOAT),
}
TORCH_TYPES = {onnx_type.value: dtype for dtype, onnx_type in STORED.values()}
TORCH_TYPES |= {ir.DataType.INT8.value: torch.int8, ir.DataType.UINT8.value: torch.uint8}
_PIECE = 8 << 20  # bytes per chunk of reading, conversion and writing
_CACHE_BYTES = 1 << 30  # of computed weights that are kept: those of a layer of an 8B model


class WeightsFile:
    """Writer of `folder`/weights.bin for several graphs, with deduplicated tensors.

    A tensor that `dtype` cannot represent exactly stays in float32, and half-precision tensors are
    cast to float32 in the graph. ONNX Runtime folds casts and transpositions of constants when it
    loads a graph.

    Args:
        folder: Folder of the file.
        dtype: Type of most weights.
        lazy: Receives all tensors by offset, for readers of a file that lacks them.
    """

    def __init__(
        self, folder: Path, dtype: str, lazy: dict[int, WeightTensor] | None = None
    ) -> None:
        self.folder = folder
        self._lazy = lazy
        self._cache = ReadCache()
        self._dtype = STORED[dtype][0]
        self._locations: dict[Hashable, ir.ExternalTensor] = {}
        self.size = 0  # size of the complete file
        self._joined: dict[Any, torch.Tensor] = {}
        self._tensors: list[tuple[torch.Tensor, ir.ExternalTensor]] = []
        self._required: set[ir.ExternalTensor] = set()  # of graphs that ONNX Runtime loads
        self._file = HashedFile(folder / FILE)

    def __enter__(self) -> WeightsFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    @property
    def file(self) -> FileEntry:
        """The complete file's size and hash."""
        return FileEntry(self._file.size, self._file.digest.hexdigest())

    def finish(self, advance: Advance = lambda amount: None, is_sparse: bool = False) -> None:
        """Write all tensors, or with `is_sparse` none of the lazy ones that are not required.

        `advance` gets byte counts.
        """
        for tensor, location in self._tensors:
            self._file.align(ALIGNMENT)
            if is_sparse and self._lazy is not None and location not in self._required:
                self._file.skip(location.nbytes)
            else:
                self._write(tensor, TORCH_TYPES[location.dtype.value], location.name or "")
            advance(location.nbytes)
        self._file.close()

    def attach(self, model: ir.Model, is_required: bool = False) -> None:
        """Move a graph's large float tensors to the file, in place.

        A sparse file has those of graphs that are required.
        """
        graph = model.graph
        fold_transposes(graph)
        stored: dict[ir.ExternalTensor, ir.Value] = {}
        for value in list(_large_initializers(graph)):
            location = self._put(value)
            if is_required:
                self._required.add(location)
            shape = ir.Shape(_tensor(value).shape)
            # Equal vectors stay separate, so that layers differ in nothing but their weights.
            if location in stored and len(shape) > 1:
                value.replace_all_uses_with(stored[location])
            else:
                stored[location] = _externalize(
                    graph, value, view_tensor(location, shape, value.name)
                )
        fold_reshapes(graph)
        cast_gathered_rows(graph)
        passes.RemoveUnusedNodesPass()(model)

    def join_columns(self, matrices: Sequence[ir.Value]) -> StoredMatrix:
        """Return matrices [K, N] joined along N, which are read when they are written."""
        tensors = [_tensor(matrix) for matrix in matrices]
        key = tuple(_identity(tensor) for tensor in tensors)
        if key not in self._joined:
            lazy = [x if isinstance(x, LazyTensor) else as_lazy(x) for x in tensors]
            self._joined[key] = torch.cat(lazy, 1)
        return StoredMatrix(self._joined[key], matrices[0].name or "")

    def _put(self, value: ir.Value) -> ir.ExternalTensor:
        """Add a tensor, unless the file has it, and return its location."""
        tensor, name = _tensor(value), value.name or ""
        dtype = self._dtype if _represents(self._dtype, tensor) else torch.float32
        key: Hashable = _identity(tensor)
        if not isinstance(value.const_value, StoredMatrix):
            digest = hashlib.sha256()
            for piece in chunks(tensor, dtype):
                digest.update(as_bytes(piece))
            key = (digest.digest(), dtype, tensor.shape)
        return self.add(key, tensor, dtype, name)

    def add(
        self, key: Hashable, tensor: torch.Tensor, dtype: torch.dtype, name: str
    ) -> ir.ExternalTensor:
        """Add a tensor in a type, unless the file has `key`, and return its location."""
        if key not in self._locations:
            stored = next(k for d, k in STORED.values() if d == dtype)
            offset = -(-self.size // ALIGNMENT) * ALIGNMENT
            size, shape = tensor.numel() * dtype.itemsize, ir.Shape(tensor.shape)
            self._locations[key] = ir.ExternalTensor(
                FILE, offset, size, stored, shape=shape, name=name, base_dir=self.folder
            )
            self.size = offset + size
            self._tensors.append((tensor, self._locations[key]))
            if self._lazy is not None:
                self._lazy[offset] = WeightTensor.of(tensor, dtype, name, self._cache)
        return self._locations[key]

    def _write(self, tensor: torch.Tensor, dtype: torch.dtype, name: str) -> None:
        for piece in chunks(tensor, dtype):
            _check_nan(piece, name)
            self._file.write(as_bytes(piece))


class ReadCache:
    """Values of the lazy tensors that were read last: up to a number of bytes, or one tensor."""

    def __init__(self) -> None:
        self._values: dict[int, torch.Tensor] = {}  # by key, the last one last

    def get(self, key: int) -> torch.Tensor | None:
        """Return values, which become the last ones."""
        if (values := self._values.pop(key, None)) is not None:
            self._values[key] = values
        return values

    def put(self, key: int, values: torch.Tensor) -> None:
        """Keep values."""
        self._values[key] = values

    def make_room(self, num_bytes: int) -> None:
        """Forget the oldest values before others of a size are computed."""
        while self._values and num_bytes + self.nbytes > _CACHE_BYTES:
            del self._values[next(iter(self._values))]

    @property
    def nbytes(self) -> int:
        return sum(values.nbytes for values in self._values.values())


class WeightTensor(LazyTensor):
    """Tensor of a weights file that may lack it: contiguous, and in the file's type when read."""

    label: str
    cache: ReadCache
    is_checked: bool

    @classmethod
    def of(
        cls, tensor: torch.Tensor, dtype: torch.dtype, name: str, cache: ReadCache
    ) -> WeightTensor:
        """Return a tensor in a type; computed or converted values are kept in a cache."""
        lazy = tensor if isinstance(tensor, LazyTensor) else as_lazy(tensor)
        mapped = lazy.mapped and lazy.stored == dtype and lazy.is_contiguous()
        like = torch.empty(lazy.shape, dtype=dtype, device="meta")
        result = cls(like, lambda values: values, mapped=mapped, parts=(lazy,))
        result.label, result.cache, result.is_checked = name, cache, False
        return result

    def read(self) -> torch.Tensor:
        """Return the values. Raises ExportError if they have NaN."""
        if (values := self.cache.get(self.origin)) is None:
            if not self.mapped:
                self.cache.make_room(self.nbytes)
            values = super().read().to(self.dtype).contiguous()
            if not self.is_checked:
                _check_nan(values, self.label)
                self.is_checked = True
            if not self.mapped:
                self.cache.put(self.origin, values)
        return values


LazyWeights = Mapping[int, WeightTensor]  # by offset in a weights file, which may lack them


def _check_nan(values: torch.Tensor, name: str) -> None:
    if torch.isnan(values).any():
        raise ExportError(f"{name} has NaN values; the checkpoint is damaged: download it again")


class HashedFile:
    """File whose SHA-256 is computed in a background thread while it is written."""

    def __init__(self, path: Path) -> None:
        self.size, self.digest = 0, hashlib.sha256()
        self._file = path.open("wb")
        self._thread = ThreadPoolExecutor(1)
        self._hashing: Future[None] | None = None

    def write(self, data: memoryview) -> None:
        """Append bytes that are not modified afterwards."""
        if self._hashing is not None:
            self._hashing.result()
        self._hashing = self._thread.submit(self.digest.update, data)
        self._file.write(data)
        self.size += data.nbytes

    def skip(self, size: int) -> None:
        """Leave a hole in the file, which the hash does not include."""
        self._file.truncate(self._file.seek(size, os.SEEK_CUR))
        self.size += size

    def flush(self) -> None:
        """Make the written bytes readable from the file."""
        self._file.flush()

    def align(self, alignment: int) -> int:
        """Pad with zeros to a multiple of `alignment` and return the size."""
        if padding := -self.size % alignment:
            self.write(memoryview(bytes(padding)))
        return self.size

    def close(self) -> None:
        """Wait for the hash and close the file."""
        self._thread.shutdown()
        self._file.close()


def map_tensor(tensor: onnx.TensorProto, folder: Path, lazy: LazyWeights | None) -> torch.Tensor:
    """Memory-map a tensor in its stored type, or return the lazy one at its offset."""
    where = {entry.key: entry.value for entry in tensor.external_data}
    offset, size = int(where["offset"]), int(where["length"])
    if lazy and offset in lazy:
        return lazy[offset].reshape(tuple(tensor.dims))
    data = mapped_memory.map_file(folder / where["location"], offset, size)
    return torch.from_numpy(data).view(TORCH_TYPES[tensor.data_type]).reshape(tuple(tensor.dims))


def fold_transposes(graph: ir.Graph) -> None:
    """Store a matrix transposed if all its readers use it transposed."""
    for node in [n for n in graph if n.op_type == "Transpose"]:
        source, output = node.inputs[0], node.outputs[0]
        if source is None or source.name not in graph.initializers or len(source.uses()) > 1:
            continue
        name = f"{output.name}.stored"
        turned = _tensor(source).permute(*node.attributes["perm"].as_ints())
        is_stored = isinstance(source.const_value, StoredMatrix)
        tensor = StoredMatrix(turned, name) if is_stored else TorchTensor(turned, name)
        output.replace_all_uses_with(add_initializer(graph, tensor, name))
        graph.remove(node, safe=True)
        del graph.initializers[source.name]


def fold_reshapes(graph: ir.Graph) -> None:
    """Store a tensor in the only shape that is read: ONNX Runtime would keep both in memory."""
    for node in [n for n in graph if n.op_type in ("Reshape", "Unsqueeze")]:
        source, output = node.inputs[0], node.outputs[0]
        cast = source.producer() if source is not None else None
        stored = cast.inputs[0] if cast is not None and cast.op_type == "Cast" else source
        if source is None or stored is None or len(source.uses()) > 1 or len(stored.uses()) > 1:
            continue
        if isinstance(stored.const_value, ir.ExternalTensor) and output.shape is not None:
            name = stored.const_value.name
            stored.const_value = view_tensor(stored.const_value, output.shape, name)
            stored.shape = source.shape = output.shape
            output.replace_all_uses_with(source)
            graph.remove(node, safe=True)


def cast_gathered_rows(graph: ir.Graph) -> None:
    """Cast rows after the lookup: ONNX Runtime would keep a float32 copy of the table."""
    for node in [n for n in graph if n.op_type == "Gather"]:
        cast = producer(node.inputs[0], "Cast")
        table = cast.inputs[0] if cast is not None else None
        if cast is None or table is None or not isinstance(table.const_value, ir.ExternalTensor):
            continue
        rows = node.outputs[0]
        wide = ir.node("Cast", [rows], {"to": ir.DataType.FLOAT})
        wide.outputs[0].name = f"{rows.name}.float32"
        wide.outputs[0].shape, wide.outputs[0].type = rows.shape, rows.type
        graph.insert_after(node, wide)
        rows.replace_all_uses_with(wide.outputs[0])
        wide.replace_input_with(0, rows)
        node.replace_input_with(0, table)
        rows.type = ir.TensorType(table.const_value.dtype)
        if not cast.outputs[0].uses():
            graph.remove(cast, safe=True)


def view_tensor(
    tensor: ir.ExternalTensor,
    shape: ir.Shape,
    name: str | None,
    dtype: ir.DataType | None = None,
) -> ir.ExternalTensor:
    """Return a stored tensor with another shape, name or type."""
    return ir.ExternalTensor(
        tensor.location, tensor.offset, tensor.length, dtype or tensor.dtype, shape=shape,
        name=name or "", base_dir=tensor.base_dir,
    )  # fmt: skip


def _large_initializers(graph: ir.Graph) -> Iterator[ir.Value]:
    for value in graph.initializers.values():
        tensor = value.const_value
        assert tensor is not None
        if tensor.dtype == ir.DataType.FLOAT and tensor.nbytes >= SMALLEST:
            yield value


def _tensor(value: ir.Value) -> torch.Tensor:
    """Return the values of an initializer, those of a stored matrix in its own type."""
    tensor = value.const_value
    assert tensor is not None
    if isinstance(tensor, StoredMatrix | TorchTensor):
        return tensor.raw.detach()
    array = tensor.numpy()
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _identity(tensor: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    """Return a key that is equal for equal views of a tensor in memory."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _represents(dtype: torch.dtype, tensor: torch.Tensor) -> bool:
    if tensor.dtype == dtype or dtype == torch.float32:
        return True
    widened = chunks(tensor, torch.float32)
    return all(torch.equal(piece.to(dtype).to(torch.float32), piece) for piece in widened)


def chunks(tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield a tensor in a type, in its order, chunk by chunk. [R, ...] -> [r, ...]"""
    tensor = materialize(tensor)
    for part in tensor.split(max(1, _PIECE * len(tensor) // tensor.nbytes)):
        # Strips of transposed matrices are copied first, which is six times as fast.
        strip = part.T.contiguous().T if part.ndim == 2 and part.stride(0) == 1 else part
        yield strip.contiguous().to(dtype)


def as_bytes(piece: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor."""
    return memoryview(piece.reshape(-1).view(torch.uint8).numpy())


def _externalize(graph: ir.Graph, value: ir.Value, tensor: ir.ExternalTensor) -> ir.Value:
    """Point an initializer at the file; return the float32 value that the graph uses."""
    if tensor.dtype == ir.DataType.FLOAT:
        value.const_value = tensor
        return value
    wide = insert_node(
        graph[0], "Cast", [value], f"{value.name}.float32", value, to=ir.DataType.FLOAT
    )
    value.replace_all_uses_with(wide)
    cast = wide.producer()
    assert cast is not None
    cast.replace_input_with(0, value)  # its only reader
    value.const_value = tensor
    value.type = ir.TensorType(tensor.dtype)  # not in place: clones of a graph share types
    return wide
