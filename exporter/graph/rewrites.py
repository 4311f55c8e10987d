"""Small rewrites of a traced graph: fewer nodes, and accurate sigmoids.

GroupQueryAttention reads rows [B, T, heads * D], which models needlessly reshape to heads and
transpose. Each node costs a few microseconds, which dominates passes of a small draft model.

ONNX Runtime's Sigmoid has an absolute error of 2e-7 on CPUs, so x * sigmoid(x) is off by 2% at -12
and by several times its value at -17, which large weights of massive activations amplify. Exp is
accurate to one unit in the last place, so sigmoids become 1 / (1 + exp(-x)), as in PyTorch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import DeduplicateInitializersPass, LiftConstantsToInitializersPass
from onnxscript.rewriter.pattern import RewriteRule, RewriteRuleSet

from .nodes import (
    add_constant,
    insert_node,
    operand,
    producer,
    replace_output,
    split_columns,
)

SWAP = [0, 2, 1, 3]  # [B, T, H, D] to [B, H, T, D] and back


def remove_transposes(graph: ir.Graph) -> None:
    """Remove canceling transpositions and reshapes, also around rotary embedding."""
    for node in [n for n in graph if n.op_type in ("LayerNormalization", "RMSNormalization")]:
        _normalize_rows(graph, node)
    for node in [n for n in graph if n.op_type == "RotaryEmbedding"]:
        _rotate_whole_heads(graph, node)
        _rotate_rows(graph, node)
    for node in [n for n in graph if n.op_type == "Transpose"]:
        before = producer(node.inputs[0], "Transpose")
        if before is not None and _permutation(before) == SWAP == _permutation(node):
            node.outputs[0].replace_all_uses_with(before.inputs[0])
    for node in [n for n in graph if n.op_type == "Reshape"]:
        _merge_reshapes(node)


def _normalize_rows(graph: ir.Graph, node: ir.Node) -> None:
    """Normalize heads [B, T, H, D] before instead of after a transposition to [B, H, T, D]."""
    before, axis = producer(node.inputs[0], "Transpose"), node.attributes.get("axis")
    is_last = axis is None or axis.as_int() in (-1, len(SWAP) - 1)
    shapes = [value.shape for value in node.inputs[1:] if value is not None]
    are_vectors = all(shape is not None and shape.rank() == 1 for shape in shapes)
    if before is None or _permutation(before) != SWAP or not is_last or not are_vectors:
        return
    output = node.outputs[0]
    node.replace_input_with(0, before.inputs[0])
    users, shape = list(output.uses()), output.shape
    turned = ir.node("Transpose", [output], {"perm": SWAP})
    value = turned.outputs[0]
    value.name, value.shape, value.dtype = f"{output.name}.turned", shape, output.dtype
    output.shape = operand(before, 0).shape
    graph.insert_after(node, turned)
    for user, index in users:
        user.replace_input_with(index, value)


def _rotate_whole_heads(graph: ir.Graph, node: ir.Node) -> None:
    """Apply partial rotary embedding to heads that are not split, if rows are rotated."""
    split = producer(node.inputs[0], "Split")
    users = [user for user, _ in node.outputs[0].uses()]
    if split is None or producer(split.inputs[0], "Transpose") is None or len(users) != 1:
        return
    (joined,), output, heads = users, node.outputs[0], operand(split, 0)
    is_first = [*split.outputs] == [node.inputs[0], *joined.inputs[1:]]
    is_first &= all(x.attributes.get_int("axis", 0) in (-1, len(SWAP) - 1) for x in (split, joined))
    is_turned = all(user.op_type == "Transpose" for user, _ in joined.outputs[0].uses())
    if joined.op_type != "Concat" or not is_first or not is_turned or output.shape is None:
        return
    size = ir.AttrInt64("rotary_embedding_dim", output.shape[-1])
    node.attributes["rotary_embedding_dim"] = size
    node.replace_input_with(0, heads)
    output.shape = heads.shape
    joined.outputs[0].replace_all_uses_with(output)
    graph.remove(joined, safe=True)


def _rotate_rows(graph: ir.Graph, node: ir.Node) -> None:
    """Apply rotary embedding to [B, T, H * D] instead of [B, H, T, D] between transpositions."""
    before = producer(node.inputs[0], "Transpose")
    users = [user for user, _ in node.outputs[0].uses()]
    swapped = all(user.op_type == "Transpose" and _permutation(user) == SWAP for user in users)
    if before is None or _permutation(before) != SWAP or not users or not swapped:
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
    """Merge two reshapes, and remove both if they cancel."""
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
    """Reshape the rows of a value, [B, T, ...]. -> [B, T, *dims]"""
    name = f"{value.name}.as{len(dims)}"
    shape = add_constant(graph, np.array([0, 0, *dims], np.int64), f"{name}.dims")
    reshaped = insert_node(before, "Reshape", [value, shape], name, value)
    assert value.shape is not None
    reshaped.shape = ir.Shape([*value.shape[:2], *dims])
    return reshaped


def _permutation(node: ir.Node) -> list[int]:
    return list(node.attributes["perm"].as_ints())


def merge_slices(graph: ir.Graph) -> None:
    """Replace slices that together are all columns of a value by one split."""
    for value in [value for node in graph for value in node.outputs]:
        slices = [user for user, _ in value.uses()] if value.shape is not None else []
        starts = {start: node for node in slices if (start := _first_column(node)) is not None}
        outputs = [starts[start].outputs[0] for start in sorted(starts)]
        widths = [output.shape[-1] for output in outputs]
        is_whole = len(starts) == len(slices) > 1 and sum(widths) == value.shape[-1]
        if is_whole and sorted(starts) == [sum(widths[:i]) for i in range(len(widths))]:
            first = next(node for node in graph if node in slices)
            names = [f"{output.name}.part" for output in outputs]
            parts = split_columns(first, value, widths, names)
            for output, part in zip(outputs, parts, strict=True):
                replace_output(output, part)


def _first_column(node: ir.Node) -> int | None:
    """Return the first column of a slice of consecutive columns; None for another node."""
    output = node.outputs[0]
    if node.op_type != "Slice" or output.shape is None or not isinstance(output.shape[-1], int):
        return None
    bounds = [None if x is None else x.const_value for x in node.inputs[1:]]
    start, _, *rest = [-1 if x is None or x.size != 1 else x.numpy().item() for x in bounds]
    last = output.shape.rank() - 1
    return start if rest in ([last], [last, 1]) else None


def expand_sigmoids(model: ir.Model) -> None:
    """Replace every Sigmoid node in place; x * sigmoid(y) becomes x / (1 + exp(-y))."""
    # In this order: a single rule set would replace Sigmoid before it matches the product.
    _rewrite(model, _swish, lambda op, x, y: op.Div(x, _denominator(op, y)))
    _rewrite(model, _sigmoid, lambda op, y: op.Reciprocal(_denominator(op, y)))
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    DeduplicateInitializersPass(size_limit=1)(model)


def fuse_sigmoids(model: ir.Model) -> None:
    """Replace the expanded form by Sigmoid, in place, where other errors are larger."""
    _rewrite(model, lambda op, x, y: op.Div(x, op.Add(op.Exp(op.Neg(y)), 1.0)), _swish)
    _rewrite(model, lambda op, y: op.Reciprocal(op.Add(op.Exp(op.Neg(y)), 1.0)), _sigmoid)


def _rewrite(model: ir.Model, pattern: Any, replacement: Any) -> None:
    RewriteRuleSet([RewriteRule(pattern, replacement)], commute=True).apply_to_model(model)


def _swish(op: Any, x: Any, y: Any) -> Any:
    return op.Mul(x, op.Sigmoid(y))


def _sigmoid(op: Any, y: Any) -> Any:
    return op.Sigmoid(y)


def _denominator(op: Any, y: Any) -> Any:
    return op.Add(op.Exp(op.Neg(y)), op.Constant(value_float=1.0))
