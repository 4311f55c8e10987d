"""Fewer nodes for the same numbers: small rewrites of a traced graph, each on its own.

Attention in the op set `gqa` takes [B, T, heads * D] rows, which models reshape to heads and
transpose for nothing. A node costs some microseconds, which is what a small draft is made of.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .nodes import constant, insert, producer

SWAP = [0, 2, 1, 3]  # [B, T, H, D] to [B, H, T, D] and back


def straighten(graph: ir.Graph) -> None:
    """Remove pairs of transpositions and reshapes, and rotate rows without transposing them."""
    for node in [n for n in graph if n.op_type == "RotaryEmbedding"]:
        _rotate_rows(graph, node)
    for node in [n for n in graph if n.op_type == "Transpose"]:
        before = producer(node.inputs[0], "Transpose")
        if before is not None and _order(before) == SWAP == _order(node):
            node.outputs[0].replace_all_uses_with(before.inputs[0])
    for node in [n for n in graph if n.op_type == "Reshape"]:
        _merge_reshapes(node)


def _rotate_rows(graph: ir.Graph, node: ir.Node) -> None:
    """Rotary positions over [B, T, H * D] instead of [B, H, T, D] between two transpositions."""
    before = producer(node.inputs[0], "Transpose")
    users = [user for user, _ in node.outputs[0].uses()]
    swapped = all(user.op_type == "Transpose" and _order(user) == SWAP for user in users)
    if before is None or _order(before) != SWAP or not users or not swapped:
        return
    rows = before.inputs[0]
    shape = rows.shape if rows is not None else None
    if rows is None or shape is None or len(shape) != 4:
        return
    heads, size = shape[2], shape[3]
    if not isinstance(heads, int) or not isinstance(size, int):
        return
    flat = _reshape(graph, node, rows, [heads * size])
    node.replace_input_with(0, flat)
    node.attributes["num_heads"] = ir.AttrInt64("num_heads", heads)
    output = node.outputs[0]
    output.shape = flat.shape
    back = _reshape(graph, users[0], output, [heads, size])
    for user in users:
        user.outputs[0].replace_all_uses_with(back)


def _merge_reshapes(node: ir.Node) -> None:
    """One reshape for two, and none for two that undo each other."""
    before = producer(node.inputs[0], "Reshape")
    if before is None or before.inputs[0] is None:
        return
    source, output = before.inputs[0], node.outputs[0]
    dims = node.inputs[1].const_value if node.inputs[1] is not None else None
    if source.shape is None or output.shape is None or dims is None:
        return
    if source.shape == output.shape:
        output.replace_all_uses_with(source)
    elif 0 not in dims.numpy() or list(source.shape)[:2] == list(output.shape)[:2]:
        node.replace_input_with(0, source)


def _reshape(graph: ir.Graph, before: ir.Node, value: ir.Value, dims: list[int]) -> ir.Value:
    """Give the rows of a value, [B, T, ...], other dimensions: [B, T, *dims]"""
    name = f"{value.name}.as{len(dims)}"
    wanted = constant(graph, np.array([0, 0, *dims], np.int64), f"{name}.dims")
    reshaped = insert(before, "Reshape", [value, wanted], name, value)
    assert value.shape is not None
    reshaped.shape = ir.Shape([*value.shape[:2], *dims])
    return reshaped


def _order(node: ir.Node) -> list[int]:
    return list(node.attributes["perm"].as_ints())
