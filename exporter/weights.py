"""One weights file a model: every tensor once, in the checkpoint's own type, for all its graphs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np
import onnx_ir as ir

FILE = "weights.bin"
SMALLEST = 1024  # bytes; what is smaller stays in the graph
ALIGNMENT = 64
STORED = {
    "float16": (np.dtype(np.float16), ir.DataType.FLOAT16),
    "bfloat16": (np.dtype(ml_dtypes.bfloat16), ir.DataType.BFLOAT16),
    "float32": (np.dtype(np.float32), ir.DataType.FLOAT),
}


class Weights:
    """The weights file of one model, which the graphs of all its op sets share."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.folder, self.dtype = folder, dtype
        self._known: dict[str, ir.ExternalTensor] = {}
        (folder / FILE).touch()

    def attach(self, model: ir.Model) -> None:
        """Move a graph's large floats to the file, cast back to float32 in the graph.

        A tensor that `dtype` cannot hold bit for bit stays in float32. ONNX Runtime does the casts
        and transpositions of constants once, when it loads the graph.
        """
        graph = model.graph
        fold_transposes(graph)
        share_tied(graph)
        values: dict[str, ir.Value] = {}
        with (self.folder / FILE).open("ab") as file:
            for value in list(_large(graph)):
                assert value.const_value is not None
                array = _narrowed(value.const_value.numpy(), STORED[self.dtype][0])
                key = hashlib.sha256(array.tobytes()).hexdigest() + f"{array.dtype}{array.shape}"
                if key in values:
                    value.replace_all_uses_with(values[key])
                    continue
                if key not in self._known:
                    self._known[key] = _append(file, array, value, self.folder)
                values[key] = _stored(graph, value, self._known[key])
        drop_unused(graph)


def fold_transposes(graph: ir.Graph) -> None:
    """A matrix that is only ever used transposed is stored transposed."""
    for node in [n for n in graph if n.op_type == "Transpose"]:
        source, output = node.inputs[0], node.outputs[0]
        if source is None or source.name not in graph.initializers or len(source.uses()) > 1:
            continue
        assert source.const_value is not None
        order = node.attributes["perm"].as_ints()
        array = source.const_value.numpy().transpose(order)
        assert output.name is not None
        folded = ir.Value(name=f"{output.name}.stored", const_value=ir.tensor(array))
        folded.shape, folded.dtype = folded.const_value.shape, ir.DataType.FLOAT
        graph.register_initializer(folded)
        output.replace_all_uses_with(folded)
        graph.remove(node, safe=True)
    drop_unused(graph)


def share_tied(graph: ir.Graph) -> None:
    """An embedding that is also the output matrix is kept once, as the embedding."""
    tables = [
        n.inputs[0]
        for n in graph
        if n.op_type == "Gather" and n.inputs[0] is not None and n.inputs[0].is_initializer()
    ]
    for table in tables:
        for other in list(_large(graph)):
            if _is_transposed(other, table):
                node = ir.node("Transpose", [table], {"perm": [1, 0]})
                node.outputs[0].name = f"{table.name}.transposed"
                node.outputs[0].shape, node.outputs[0].dtype = other.shape, other.dtype
                graph.insert_before(graph[0], node)
                other.replace_all_uses_with(node.outputs[0])
    drop_unused(graph)


def drop_unused(graph: ir.Graph) -> None:
    """Remove initializers that nothing reads."""
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]


def _large(graph: ir.Graph) -> Iterator[ir.Value]:
    for value in graph.initializers.values():
        tensor = value.const_value
        assert tensor is not None
        if tensor.dtype == ir.DataType.FLOAT and tensor.nbytes >= SMALLEST:
            yield value


def _is_transposed(other: ir.Value, table: ir.Value) -> bool:
    a, b = table.const_value, other.const_value
    assert a is not None
    assert b is not None
    if other is table or len(b.shape) != 2 or tuple(a.shape) != tuple(b.shape)[::-1]:
        return False
    return np.array_equal(a.numpy().T, b.numpy())


def _narrowed(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The array in a narrower type where that loses no bit."""
    array = np.ascontiguousarray(array)
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = array.astype(dtype)
        return narrow if np.array_equal(narrow.astype(np.float32), array) else array


def _append(file: BinaryIO, array: np.ndarray, value: ir.Value, folder: Path) -> ir.ExternalTensor:
    file.write(b"\0" * (-file.tell() % ALIGNMENT))
    offset = file.tell()
    file.write(array.tobytes())
    kind = next(t for d, t in STORED.values() if d == array.dtype)
    return ir.ExternalTensor(
        FILE, offset, array.nbytes, kind, shape=ir.Shape(array.shape), name=value.name or "",
        base_dir=folder,
    )  # fmt: skip


def _stored(graph: ir.Graph, value: ir.Value, tensor: ir.ExternalTensor) -> ir.Value:
    """Point an initializer at the file; returns the float32 value that the graph uses."""
    if tensor.dtype == ir.DataType.FLOAT:
        value.const_value = tensor
        return value
    node = ir.node("Cast", [value], {"to": ir.DataType.FLOAT})
    node.outputs[0].name = f"{value.name}.float32"
    node.outputs[0].shape, node.outputs[0].dtype = value.shape, ir.DataType.FLOAT
    value.replace_all_uses_with(node.outputs[0])
    node.replace_input_with(0, value)
    graph.insert_before(graph[0], node)
    value.const_value, value.dtype = tensor, tensor.dtype
    return node.outputs[0]
