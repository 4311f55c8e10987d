"""Restriction of the LM head, and of preceding row-wise nodes, to the rows whose logits are needed.

Of the T rows of a pass the last R = T - `logits_from` have logits; prefill graphs have none.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .nodes import add_constant, insert_node, operand

INPUT = "logits_from"
# Operators that compute each row [1, T, N] from that row, as far as `_is_row_wise` permits.
_ROW_WISE = {
    "Abs", "Add", "Cast", "Clip", "Div", "Erf", "Exp", "Gelu", "LayerNormalization", "MatMul",
    "Max", "Min", "Mul", "Neg", "Pow", "RMSNormalization", "Reciprocal", "Relu", "Reshape",
    "Softplus", "Split", "Sqrt", "Sub", "Sum", "Tanh",
}  # fmt: skip


def add_logits_from(graph: ir.Graph) -> None:
    """Add an input with the first row whose logits are computed.

    Earlier rows are dropped where a single value determines all logits: usually after the last
    layer's attention.
    """
    value, users = _narrowest_value(graph)
    first = ir.val(INPUT, ir.DataType.INT64, [1])
    graph.inputs.insert(2, first)
    end = add_constant(graph, np.array([np.iinfo(np.int64).max]), f"{INPUT}.end")
    axis = add_constant(graph, np.array([1], np.int64), f"{INPUT}.axis")
    before = next(node for node in graph if node in users and value in node.inputs)
    rows = insert_node(before, "Slice", [value, first, end, axis], f"{INPUT}.rows", value)
    for user, index in list(value.uses()):
        if user in users:
            user.replace_input_with(index, rows)
    for output in (rows, *(output for user in users for output in user.outputs)):
        if output.shape is not None:
            output.shape = ir.Shape([output.shape[0], "R", output.shape[2]])


def remove_logits_from(graph: ir.Graph) -> None:
    """Remove the input again, so that every row has logits."""
    (first,) = (value for value in graph.inputs if value.name == INPUT)
    for user, _ in first.uses():
        user.outputs[0].replace_all_uses_with(operand(user, 0))
        graph.remove(user, safe=True)
    graph.inputs.remove(first)


def _narrowest_value(graph: ir.Graph) -> tuple[ir.Value, set[ir.Node]]:
    """Return the first value that determines the logits by itself, and the nodes between."""
    row_values, users = {graph.outputs[0]}, set[ir.Node]()
    narrowest: tuple[ir.Value, set[ir.Node]] | None = None
    for node in reversed(graph):
        if row_values.isdisjoint(node.outputs):
            continue
        read = {x for x in node.inputs if x is not None and not _is_constant(x)}
        elsewhere = {user for x in node.outputs for user, _ in x.uses()} - users
        if elsewhere or not _is_row_wise(node) or not all(map(_has_rows, read)):
            break
        users.add(node)
        row_values = row_values - {*node.outputs} | read
        (value, *more_values) = row_values
        if not more_values and value.shape is not None:
            narrowest = value, {*users}
    assert narrowest is not None
    return narrowest


def _is_row_wise(node: ir.Node) -> bool:
    if node.op_type not in _ROW_WISE or not all(map(_has_rows, node.outputs)):
        return False
    first, *more_values = (value for value in node.inputs if value is not None)
    if node.op_type == "Reshape":
        return first.shape is not None and first.shape == node.outputs[0].shape
    if node.op_type == "MatMul":
        return all(map(_is_constant, more_values))
    axis = node.attributes.get("axis")
    return axis is None or axis.as_int() in (-1, 2)


def _has_rows(value: ir.Value) -> bool:
    """Return True if a value has shape [1, T, N], or an unknown one."""
    shape = value.shape
    return shape is None or (len(shape) == 3 and str(shape[1]) == "T")


def _is_constant(value: ir.Value) -> bool:
    """Return True if a value has a static shape, so that it depends on no row."""
    return value.shape is not None and value.shape.is_static()
