"""Joining of attention's query, key and value products to one product with stored weights.

One product takes one kernel launch on a GPU instead of three, and GroupQueryAttention reads it
without a split. Quantized products are joined when they are quantized.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from .external_data import WeightsFile, fold_transposes
from .nodes import (
    GqaInput,
    add_constant,
    add_initializer,
    insert_node,
    operand,
    replace_output,
    split_columns,
    static_shape,
)

_NUM_ROWS = 3  # inputs of an attention node: queries, keys, values


def join_attention_products(model: ir.Model, stored: WeightsFile) -> None:
    """Join the products that compute the inputs of an attention node from the same rows.

    The graph variants of a model join the same products, so that all read the joined weights.
    """
    graph = model.graph
    fold_transposes(graph)
    for node in [n for n in graph if n.op_type in ("Attention", "GroupQueryAttention")]:
        # Standard ONNX has no attention node with sinks.
        if node.op_type == "GroupQueryAttention" and GqaInput.HEAD_SINK.of(node) is not None:
            continue
        sources = [list(_nearest_products(value)) for value in node.inputs[:_NUM_ROWS]]
        products = [source[0] for source in sources if len(source) == 1]
        inputs = {product.inputs[0] for product in products}
        if len({*products}) == _NUM_ROWS and len(inputs) == 1 and all(map(_is_joinable, products)):
            _join(graph, products, stored)
    passes.RemoveUnusedNodesPass()(model)


def _nearest_products(value: ir.Value | None) -> Iterator[ir.Node]:
    """Yield the products with weights from which a value is computed, but none behind them."""
    remaining, visited = [value], set[ir.Node]()
    while remaining:
        value = remaining.pop()
        node = None if value is None else value.producer()
        if node is None or node in visited:
            continue
        visited.add(node)
        if node.op_type == "MatMul" and operand(node, 1).is_initializer():
            yield node
        else:
            remaining += node.inputs


def _is_joinable(product: ir.Node) -> bool:
    weight, output = operand(product, 1), product.outputs[0]
    is_matrix = weight.const_value is not None and len(weight.const_value.shape) == 2
    return is_matrix and len(weight.uses()) == 1 and output.shape is not None


def _join(graph: ir.Graph, products: list[ir.Node], stored: WeightsFile) -> None:
    """Replace products [1, T, N] by one and a split of its columns."""
    first = next(node for node in graph if node in products)
    outputs, weights = [p.outputs[0] for p in products], [operand(p, 1) for p in products]
    widths = [static_shape(weight)[-1] for weight in weights]
    name = f"{outputs[0].name}.joined"
    weight = add_initializer(graph, stored.join_columns(weights), f"{name}.weight")
    whole = insert_node(first, "MatMul", [first.inputs[0], weight], name, outputs[0])
    assert whole.shape is not None
    whole.shape = ir.Shape([*whole.shape[:-1], sum(widths)])
    parts = split_columns(first, whole, widths, [f"{output.name}.part" for output in outputs])
    for output, part in zip(outputs, parts, strict=True):
        replace_output(output, part)
    _join_biases(graph, whole, parts)


def _join_biases(graph: ir.Graph, whole: ir.Value, parts: list[ir.Value]) -> None:
    """Add the biases before the split, if every part has one."""
    ((split, _),) = whole.uses()
    users = [[user for user, _ in part.uses()] for part in parts]
    biases = [bias for nodes in users if len(nodes) == 1 and (bias := _bias(*nodes)) is not None]
    widths = [part.shape[-1:] if part.shape is not None else () for part in parts]
    if [tuple(bias.shape) for bias in biases] != [(1, 1, *width) for width in widths]:
        return
    array = np.concatenate([bias.numpy() for bias in biases], -1)
    bias = add_constant(graph, array, f"{whole.name}.bias")
    total = insert_node(split, "Add", [whole, bias], f"{whole.name}.sum", whole)
    split.replace_input_with(0, total)
    for part, (add,) in zip(parts, users, strict=True):
        replace_output(add.outputs[0], part)


def _bias(node: ir.Node) -> ir.TensorProtocol | None:
    """Return the constant that a node adds, if it does."""
    constants = [x.const_value for x in node.inputs if x is not None and x.const_value is not None]
    return constants[0] if node.op_type == "Add" and len(constants) == 1 else None
