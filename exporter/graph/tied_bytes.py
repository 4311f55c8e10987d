"""A table of bytes that rows are taken of and that is multiplied with, once on a GPU.

A product takes a matrix as MatMulNBits has it, [V, blocks, 32] of unsigned bytes: those of the
stored table in its order. So rows are taken of that, and nothing reads the table as it is stored.
"""

from __future__ import annotations

from itertools import count

import numpy as np
import onnx_ir as ir

from ..hosts.nodes import Nodes
from .blocks import BLOCK, Blocks
from .nodes import producer


class _Added(Nodes):
    """Nodes behind those of a graph that is there, which are to be sorted then."""

    def __init__(self, graph: ir.Graph, name: str) -> None:
        self.graph, self._name = graph, name
        self._constants = {}
        self._numbers = count()

    def put(self, node: ir.Node, prefix: str) -> None:
        node.name = f"{self._name}.{next(self._numbers)}"
        for i, output in enumerate(node.outputs):
            output.name = output.name or f"{node.name}.{i}"
        self.graph.append(node)

    def stored(self, tensor: ir.TensorProtocol, name: str) -> ir.Value:
        tensor.name = f"{self._name}.{name}"
        return super().stored(tensor, tensor.name)


def share_bytes(graph: ir.Graph) -> None:
    """Let lookups read what products read, in place, where both are of one table of bytes."""
    nodes = _Added(graph, "shared")
    blocks = Blocks(nodes)
    lookups = [node for node in graph if node.op_type == "Gather" and _is_bytes(node.inputs[0])]
    for table in dict.fromkeys(node.inputs[0] for node in lookups):
        assert table is not None
        for node in list(graph):
            if _multiplies(node, table):
                _replace(node, blocks)
        rows = _as_multiplied(table)
        if rows is None:
            continue
        for node in lookups:
            if node.inputs[0] is table:
                _look_up(node, rows, nodes)
    graph.sort()


def _is_bytes(value: ir.Value | None) -> bool:
    return (
        value is not None
        and value.dtype == ir.DataType.INT8
        and isinstance(value.const_value, ir.ExternalTensor)
    )


def _multiplies(node: ir.Node, table: ir.Value) -> bool:
    """Whether a node is a product with the table turned round."""
    widened = producer(node.inputs[1], "DequantizeLinear") if node.op_type == "MatMul" else None
    turned = producer(widened.inputs[0], "Transpose") if widened is not None else None
    return turned is not None and turned.inputs[0] is table


def _replace(node: ir.Node, blocks: Blocks) -> None:
    output, name = node.outputs[0], node.outputs[0].name
    widened = node.inputs[1]
    made = blocks.rewrite(node)
    assert made is not None
    output.name = f"{name}.plain"
    made.name = name
    output.replace_all_uses_with(made, replace_graph_outputs=True)
    graph = node.graph
    assert graph is not None
    graph.remove(node, safe=True)
    _drop(widened)


def _drop(value: ir.Value | None) -> None:
    """Remove what makes a value that nobody reads."""
    node = value.producer() if value is not None else None
    if node is None or any(output.uses() for output in node.outputs):
        return
    inputs = list(node.inputs)
    assert node.graph is not None
    node.graph.remove(node, safe=True)
    for given in inputs:
        _drop(given)


def _as_multiplied(table: ir.Value) -> ir.Value | None:
    """What products read of a table, [V, blocks, 32]; None where nothing multiplies with it."""
    for user, _ in table.uses():
        value = user.outputs[0] if user.op_type == "Cast" else None
        while value is not None and value.uses():
            user, index = next(iter(value.uses()))
            if user.op_type == "MatMulNBits":
                return value if index == 1 else None
            value = user.outputs[0] if user.op_type in ("BitwiseXor", "Pad", "Reshape") else None
    return None


def _look_up(node: ir.Node, rows: ir.Value, nodes: Nodes) -> None:
    """Take rows of unsigned bytes where signed ones were, which one cast reads."""
    table, ids = node.inputs
    assert table is not None
    assert table.shape is not None
    ((cast, _),) = node.outputs[0].uses()
    assert cast.op_type == "Cast"
    output, kind = cast.outputs[0], ir.DataType(cast.attributes["to"].as_int())
    assert output.shape is not None
    kept, size = [0] * (len(output.shape) - 1), table.shape[1]
    assert isinstance(size, int)
    width = -(-size // BLOCK) * BLOCK
    taken = nodes("Cast", nodes("Gather", rows, ids), to=kind)
    centred = nodes("Sub", taken, np.array(128, kind.numpy()))
    found = nodes("Reshape", centred, [*kept, width])
    if width > size:
        found = nodes("Slice", found, [0], [size], [-1])
    found.shape, found.dtype = output.shape, output.dtype
    output.replace_all_uses_with(found)
    assert node.graph is not None
    node.graph.remove([cast, node], safe=True)
