"""Fusion to ONNX Runtime's operators: fewer nodes for the same function.

Each node costs a few microseconds of overhead, which dominates passes of small models. Rewrites
skip nodes that do not match. Only graph variants with GroupQueryAttention, except `gqa-fp32`, are
fused: they need the domain `com.microsoft` in any case. Quantization starts from the graph before
fusion, and 16-bit graphs are fused before their conversion.

B = 1 sequence, T new tokens, S rows of cache; heads of size D.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir
import onnx_ir.passes.common as passes

from specedge.bundle.graph_variants import attention_ops, has_compute_type

from .external_data import view_tensor
from .lm_head import INPUT as LOGITS_FROM
from .nodes import (
    MICROSOFT_DOMAIN,
    GqaInput,
    add_constant,
    add_initializer,
    insert_node,
    is_token_positions,
    operand,
    producer,
    replace_output,
    static_shape,
)
from .opset import lower_opset

# ONNX Runtime's nodes for a norm of a sum; numbers of a norm's stored vectors.
_SKIP_NORMS = {
    "RMSNormalization": "SkipSimplifiedLayerNormalization",
    "LayerNormalization": "SkipLayerNormalization",
}
_NUM_VECTORS = {"RMSNormalization": 1, "LayerNormalization": 2}
HEAD_MULTIPLE = 16  # of heads and their rotated parts, for ONNX Runtime's fused rotary embedding


def fuse(model: ir.Model, is_for_gpu: bool = False) -> None:
    """Run every rewrite, in place; those of activations, biases and LayerNormalization for GPUs.

    On CPUs, ONNX Runtime has fusions of its own for them.
    """
    graph = model.graph
    fuse_attention(graph)
    drop_rows_of_terms(graph, with_biases=is_for_gpu)
    if is_for_gpu:
        fuse_swish(graph)
        fuse_biased_gelu(graph)
        fuse_residual_norms(graph, _SKIP_NORMS, with_biases=True)
    else:
        fuse_residual_norms(graph)
        fuse_integer_products(graph)
    lower_opset(model)
    passes.RemoveUnusedNodesPass()(model)
    model.graph.opset_imports[MICROSOFT_DOMAIN] = 1


def is_fused(ops: str) -> bool:
    """Return True if a graph variant is fused as it is written."""
    return attention_ops(ops) == "gqa" and not has_compute_type(ops)


def fuse_attention(graph: ir.Graph) -> None:
    """Move rotary embedding and the split of a joined QKV product into attention nodes."""
    for node in [node for node in graph if node.op_type == "GroupQueryAttention"]:
        _rotate_inside(node)
        _pack(node)
    for node in [node for node in graph if node.op_type == "Reshape"]:
        source, output = node.inputs[0], node.outputs[0]
        if source is not None and source.shape is not None and source.shape == output.shape:
            output.replace_all_uses_with(source)


def _rotate_inside(node: ir.Node) -> None:
    """Replace rotary embedding before an attention node by its attribute `do_rotary`.

    The node derives positions past_length, past_length + 1 ... from `seqlens_k`, and the rotated
    part of a head from the tables. Interleaved rotary embedding and modified positions are not
    replaced.
    """
    rows = [gather for value in node.inputs[:2] if (gather := producer(value, "Gather"))]
    rotations = [x for gather in rows if (x := producer(gather.inputs[0], "RotaryEmbedding"))]
    if len(rotations) != 2 or [*rotations[0].inputs[1:]] != [*rotations[1].inputs[1:]]:
        return
    if any({*r.attributes} - {"rotary_embedding_dim"} != {"num_heads"} for r in rotations):
        return
    tables = [table for value in rotations[0].inputs[1:] if (table := _table(value))]
    _, _, capacity, size = static_shape(operand(node, GqaInput.PAST_KEY))
    rotated = rotations[0].attributes.get_int("rotary_embedding_dim", size)
    if size % HEAD_MULTIPLE or rotated % HEAD_MULTIPLE:
        return
    if [table.shape for table in tables] != 2 * [[capacity, rotated // 2]]:
        return
    for gather, rotation in zip(rows, rotations, strict=True):
        gather.replace_input_with(0, rotation.inputs[0])
    node.resize_inputs(max(GqaInput.SIN_CACHE + 1, len(node.inputs)))
    for index, table in zip((GqaInput.COS_CACHE, GqaInput.SIN_CACHE), tables, strict=True):
        node.replace_input_with(index, table)
    node.attributes["do_rotary"] = ir.AttrInt64("do_rotary", 1)


def _table(value: ir.Value | None) -> ir.Value | None:
    """Return the table [S, D/2] that is gathered by the positions of a pass's tokens."""
    gather = producer(value, "Gather")
    clip = producer(gather.inputs[1], "Clip") if gather is not None else None
    if gather is None or clip is None or not is_token_positions(clip.inputs[0]):
        return None
    return gather.inputs[0]


def _pack(node: ir.Node) -> None:
    """Let an attention node read a joined product [1, T, Q + K + V] instead of its parts."""
    rows = [gather for value in node.inputs[:3] if (gather := producer(value, "Gather"))]
    if len(rows) != 3 or len({gather.inputs[1] for gather in rows}) != 1:
        return
    split = producer(rows[0].inputs[0], "Split")
    if split is None or [gather.inputs[0] for gather in rows] != [*split.outputs]:
        return
    product, output = operand(split, 0), rows[0].outputs[0]
    rows[0].replace_input_with(0, product)
    if output.shape is not None and product.shape is not None:
        output.shape = ir.Shape([*output.shape[:-1], product.shape[-1]])
    for index in (GqaInput.KEY, GqaInput.VALUE):
        node.replace_input_with(index, None)


def drop_rows_of_terms(graph: ir.Graph, with_biases: bool = False) -> None:
    """Drop rows without logits before the last residual sum, so that it is fused with the norm.

    With biases, those of the products that it adds are fused as well.
    """
    for node in [node for node in graph if node.op_type == "Slice"]:
        add, output = producer(node.inputs[0], "Add"), node.outputs[0]
        if add is None or operand(node, 1).name != LOGITS_FROM:
            continue
        values, biases = _split_terms(add, with_biases)
        if not _are_residuals(values):
            continue
        total, last = (
            insert_node(node, "Slice", [value, *node.inputs[1:]], f"{output.name}.{i}", output)
            for i, value in enumerate(_add_all_but_two(node, values, output.name))
        )
        for i, term in enumerate((*biases, last)):
            total = insert_node(node, "Add", [total, term], f"{output.name}.sum.{i}", output)
        replace_output(output, total)


def fuse_residual_norms(
    graph: ir.Graph, op_types: Collection[str] = ("RMSNormalization",), with_biases: bool = False
) -> None:
    """Replace Add and a norm by a node of ONNX Runtime, with the biases that are added as well.

    The node's fourth output is the sum, for other readers of the residual stream.
    """
    for norm in [node for node in graph if node.op_type in op_types]:
        add = producer(norm.inputs[0], "Add")
        if add is None or not _is_over_rows(norm):
            continue
        values, biases = _split_terms(add, with_biases)
        if _are_residuals(values):
            _replace_norm(graph, add, norm, values, biases)


def _split_terms(add: ir.Node, with_biases: bool) -> tuple[list[ir.Value], list[ir.Value]]:
    """Return the activations and the biases of a sum; with biases, those of inner sums as well."""
    terms = list(_terms(add) if with_biases else filter(None, add.inputs))
    biases = [term for term in terms if _is_bias(term)]
    return [term for term in terms if term not in biases], biases


def _terms(add: ir.Node) -> Iterator[ir.Value]:
    """Yield the terms of a sum; those of a term with biases that nothing else reads, instead of it.

    Other inner sums are smaller than the residual stream, and more accurate apart from it.
    """
    for value in filter(None, add.inputs):
        inner = producer(value, "Add")
        terms = list(_terms(inner)) if inner is not None and len(value.uses()) == 1 else []
        yield from terms if any(map(_is_bias, terms)) else [value]


def _is_bias(value: ir.Value | None) -> bool:
    """Return True for a stored vector, of shape [1, 1, N] as `graphs.expand_biases` makes them."""
    if value is None or value.const_value is None or value.shape is None:
        return False
    return len(value.shape) == 3 and value.const_value.size == value.shape[-1]


def _are_residuals(values: Sequence[ir.Value]) -> bool:
    """Return True for two or more activations of one shape, [1, T, N]."""
    shape = values[0].shape if len(values) > 1 else None
    if shape is None or len(shape) != 3 or shape.is_static():
        return False
    return all(value.shape == shape for value in values)


def _add_all_but_two(before: ir.Node, values: list[ir.Value], name: str | None) -> list[ir.Value]:
    """Insert sums of activations until two are left."""
    while len(values) > 2:
        left, right, *values = values
        added = insert_node(before, "Add", [left, right], f"{name}.{len(values)}.added", left)
        values.append(added)
    return values


def _is_over_rows(norm: ir.Node) -> bool:
    axis, scale = norm.attributes.get("axis"), norm.inputs[1]
    is_vector = scale is not None and scale.shape is not None and len(scale.shape) == 1
    return is_vector and (axis is None or axis.as_int() in (-1, 2))


def _replace_norm(
    graph: ir.Graph,
    add: ir.Node,
    norm: ir.Node,
    values: list[ir.Value],
    biases: list[ir.Value],
) -> None:
    total, output = add.outputs[0], norm.outputs[0]
    is_read = len(total.uses()) > 1
    values = _add_all_but_two(norm, values, total.name)
    vectors = list(norm.inputs[1:])
    if biases:
        vectors += [None] * (_NUM_VECTORS[norm.op_type] - len(vectors))
        vectors.append(_sum_biases(graph, biases))
    node = ir.node(
        _SKIP_NORMS[norm.op_type],
        [*values, *vectors],
        {"epsilon": norm.attributes["epsilon"].as_float()},
        domain=MICROSOFT_DOMAIN,
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


def _sum_biases(graph: ir.Graph, biases: Sequence[ir.Value]) -> ir.Value:
    """Return the sum of biases [1, 1, N] as a vector [N]."""
    if len(biases) == 1:
        return _flat(graph, biases[0])
    array = sum(bias.const_value.numpy() for bias in biases)
    return add_constant(graph, array.reshape(-1), f"{biases[0].name}.sum")


def fuse_biased_gelu(graph: ir.Graph) -> None:
    """Replace Gelu of a sum with a bias by BiasGelu, or by FastGelu if approximated by tanh."""
    for node in [node for node in graph if node.op_type == "Gelu"]:
        add, output = producer(node.inputs[0], "Add"), node.outputs[0]
        biases = [value for value in add.inputs if _is_bias(value)] if add is not None else []
        if add is None or len(biases) != 1:
            continue
        (x,) = (value for value in add.inputs if value is not biases[0])
        is_exact = node.attributes.get_string("approximate", "none") == "none"
        fused = insert_node(
            node, "BiasGelu" if is_exact else "FastGelu", [x, _flat(graph, biases[0])],
            f"{output.name}.fused", output, MICROSOFT_DOMAIN,
        )  # fmt: skip
        replace_output(output, fused)


def fuse_swish(graph: ir.Graph) -> None:
    """Replace x * sigmoid(x) by QuickGelu, one kernel launch on a GPU."""
    for node in [node for node in graph if node.op_type == "Mul"]:
        for x, other in (node.inputs, node.inputs[::-1]):
            sigmoid = producer(other, "Sigmoid")
            if sigmoid is not None and sigmoid.inputs[0] is x:
                output = node.outputs[0]
                fused = insert_node(
                    node, "QuickGelu", [x], f"{output.name}.fused", output, MICROSOFT_DOMAIN,
                    alpha=1.0,
                )  # fmt: skip
                output.replace_all_uses_with(fused, replace_graph_outputs=True)
                break


@dataclass(frozen=True)
class _Product:
    """Integer product [..., T, N] and the nodes that multiply it by its scales."""

    node: ir.Node
    rows: ir.Node
    columns: ir.Node


def fuse_integer_products(graph: ir.Graph) -> None:
    """Fuse the quantization of rows, and the scales of the products that read them.

    Rows x [..., T, K] are divided by their largest magnitude, so that the constant 1 / 127 is the
    quantization scale of every row; MatMulIntegerToFloat multiplies by that and by the columns'
    scales. In a row of zeros 0 / 0 is quantized to an arbitrary byte, and the product with the
    row's magnitude is 0 again.
    """
    for node in [node for node in graph if node.op_type == "QuantizeLinear"]:
        divided = producer(node.inputs[0], "Div")
        scale = producer(divided.inputs[1], "Mul") if divided is not None else None
        above = producer(scale.inputs[0], "Max") if scale is not None else None
        largest = producer(above.inputs[0], "ReduceMax") if above is not None else None
        if divided is None or scale is None or largest is None:
            continue
        users = [user for user, _ in node.outputs[0].uses()]
        products = [p for user in users if (p := _find_product(user, scale.outputs[0]))]
        if len(products) == len(users):
            magnitude, step = largest.outputs[0], scale.inputs[1]
            divided.replace_input_with(1, magnitude)
            node.replace_input_with(1, step)
            for product in products:
                _rewrite_product(graph, product, magnitude, step)


def _find_product(node: ir.Node, scale: ir.Value) -> _Product | None:
    """Return the scaled product of a MatMulInteger node, if its rows have this scale."""
    if node.op_type != "MatMulInteger":
        return None
    chain = [node]
    for op_type in ("Cast", "Mul", "Mul"):
        users = [user for user, _ in chain[-1].outputs[0].uses()]
        if len(users) != 1 or users[0].op_type != op_type:
            return None
        chain += users
    _, _, rows, columns = chain
    stored = columns.inputs[1]
    if rows.inputs[1] is not scale or stored is None or stored.const_value is None:
        return None
    return _Product(node, rows, columns) if stored.const_value.size == stored.shape[-1] else None


def _rewrite_product(
    graph: ir.Graph, product: _Product, magnitude: ir.Value, step: ir.Value
) -> None:
    rows, weights, zero = product.node.inputs
    output, scales = product.columns.outputs[0], operand(product.columns, 1)
    whole = insert_node(
        product.node, "MatMulIntegerToFloat", [rows, weights, step, _flat(graph, scales), zero],
        f"{output.name}.steps", output, MICROSOFT_DOMAIN,
    )  # fmt: skip
    replace_output(output, insert_node(product.columns, "Mul", [whole, magnitude], "", output))


def _flat(graph: ir.Graph, stored: ir.Value) -> ir.Value:
    """Return stored numbers [1, N] or [1, 1, N] as a vector [N]."""
    tensor = stored.const_value
    assert tensor is not None
    name, shape = f"{stored.name}.flat", ir.Shape([tensor.size])
    if name not in graph.initializers:
        if isinstance(tensor, ir.ExternalTensor):
            vector = view_tensor(tensor, shape, name)
        else:
            vector = ir.tensor(tensor.numpy().reshape(-1), name=name)
        add_initializer(graph, vector, name)
    return graph.initializers[name]
