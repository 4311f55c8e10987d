"""Fusion of a product's input quantization, and of its scales, into fewer nodes.

Rows x [..., T, K] are divided by their largest magnitude, so that one constant step, 1 / 127, is
every row's quantization scale; MatMulIntegerToFloat multiplies by that and by the columns' scales.
A row of zeros is 0 / 0 there, some byte each, and 0 again where it is multiplied by its magnitude.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ..nodes import insert_node, producer
from ..weights import view_tensor


@dataclass(frozen=True)
class _Product:
    """A product of bytes [..., T, N] and the nodes that multiply it by its scales."""

    node: ir.Node
    rows: ir.Node
    columns: ir.Node


def fuse(graph: ir.Graph) -> None:
    """Rewrite every input that is quantized by row, and the products that read it."""
    for node in [node for node in graph if node.op_type == "QuantizeLinear"]:
        divided = producer(node.inputs[0], "Div")
        scale = producer(divided.inputs[1], "Mul") if divided is not None else None
        above = producer(scale.inputs[0], "Max") if scale is not None else None
        largest = producer(above.inputs[0], "ReduceMax") if above is not None else None
        if divided is None or scale is None or largest is None:
            continue
        products = [_product(user, scale.outputs[0]) for user, _ in node.outputs[0].uses()]
        if all(products):
            magnitude, step = largest.outputs[0], scale.inputs[1]
            divided.replace_input_with(1, magnitude)
            node.replace_input_with(1, step)
            for product in products:
                assert product is not None
                _rewrite(graph, product, magnitude, step)


def _product(node: ir.Node, scale: ir.Value) -> _Product | None:
    """Return the product that a MatMulInteger node begins, if its rows have this scale."""
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


def _rewrite(graph: ir.Graph, product: _Product, magnitude: ir.Value, step: ir.Value) -> None:
    rows, weights, zero = product.node.inputs
    output, scales = product.columns.outputs[0], product.columns.inputs[1]
    name = output.name
    whole = insert_node(
        product.node, "MatMulIntegerToFloat", [rows, weights, step, _flat(graph, scales), zero],
        f"{name}.steps", output, "com.microsoft",
    )  # fmt: skip
    output.name = f"{name}.unfused"
    scaled = insert_node(product.columns, "Mul", [whole, magnitude], str(name), output)
    output.replace_all_uses_with(scaled, replace_graph_outputs=True)


def _flat(graph: ir.Graph, scales: ir.Value | None) -> ir.Value:
    """Return stored scales [1, N] as a vector [N]."""
    assert scales is not None
    tensor = scales.const_value
    assert isinstance(tensor, ir.ExternalTensor)
    name = f"{scales.name}.columns"
    if name not in graph.initializers:
        shape = ir.Shape([tensor.size])
        flat = ir.Value(
            name=name, shape=shape, type=scales.type, const_value=view_tensor(tensor, shape, name)
        )
        graph.register_initializer(flat)
    return graph.initializers[name]
