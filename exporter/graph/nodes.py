"""Nodes and constants that are put into a traced graph."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir


def constant(graph: ir.Graph, array: np.ndarray, name: str) -> ir.Value:
    """A new initializer."""
    tensor = ir.tensor(array, name=name)
    kind = ir.TensorType(tensor.dtype)
    value = ir.Value(name=name, shape=tensor.shape, type=kind, const_value=tensor)
    graph.register_initializer(value)
    return value


def insert(
    before: ir.Node,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    name: str,
    like: ir.Value | None = None,
    domain: str = "",
    **attributes: ir.DataType | int | list[int],
) -> ir.Value:
    """The output of a new node before another, in the shape and type of `like` if that is known."""
    node = ir.node(op_type, inputs, attributes, domain=domain)
    output = node.outputs[0]
    output.name = name
    if like is not None:
        output.shape, output.dtype = like.shape, like.dtype
    assert before.graph is not None
    before.graph.insert_before(before, node)
    return output


def producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node that makes a value, if it is of this type."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type else None
