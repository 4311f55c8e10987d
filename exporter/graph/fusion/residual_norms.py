"""Residual addition and RMS norm as one SkipSimplifiedLayerNormalization node."""

from __future__ import annotations

import onnx_ir as ir

from ..nodes import producer


def fuse(graph: ir.Graph) -> None:
    """Replace each Add whose sum an RMSNormalization reads, and that norm.

    The node's fourth output is the sum, for the residual stream's other readers.
    """
    for norm in [node for node in graph if node.op_type == "RMSNormalization"]:
        add = producer(norm.inputs[0], "Add")
        if add is not None and _is_residual(add) and _is_over_rows(norm):
            _replace(graph, add, norm)


def _is_residual(add: ir.Node) -> bool:
    """Return True if a node adds two activations of one shape, [1, T, N]."""
    left, right = add.inputs
    if left is None or right is None or left.shape is None or right.shape is None:
        return False
    return left.shape == right.shape and len(left.shape) == 3 and not left.shape.is_static()


def _is_over_rows(norm: ir.Node) -> bool:
    axis, scale = norm.attributes.get("axis"), norm.inputs[1]
    is_vector = scale is not None and scale.shape is not None and len(scale.shape) == 1
    return is_vector and (axis is None or axis.as_int() in (-1, 2))


def _replace(graph: ir.Graph, add: ir.Node, norm: ir.Node) -> None:
    total, output = add.outputs[0], norm.outputs[0]
    is_read = len(total.uses()) > 1
    node = ir.node(
        "SkipSimplifiedLayerNormalization",
        [*add.inputs, norm.inputs[1]],
        {"epsilon": norm.attributes["epsilon"].as_float()},
        domain="com.microsoft",
        num_outputs=4 if is_read else 1,
    )
    for new, old in zip((node.outputs[0], *node.outputs[3:]), (output, total), strict=False):
        new.name, new.shape, new.type = f"{old.name}.fused", old.shape, old.type
    for empty in node.outputs[1:3]:
        empty.name = ""
    graph.insert_before(norm, node)
    output.replace_all_uses_with(node.outputs[0], replace_graph_outputs=True)
    if is_read:
        total.replace_all_uses_with(node.outputs[3])
    graph.remove(norm, safe=True)
