"""Tied embeddings that lookups and products share on a GPU.

CPU kernels pack matrices in any case, but on a GPU the table is then in memory once.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from .nodes import (
    MICROSOFT_DOMAIN,
    GraphBuilder,
    operand,
    producer,
    static_shape,
)


def share_embeddings(model: ir.Model) -> None:
    """Let a tied embedding's products read the table without a transposed copy, in place."""
    for turned in [n for n in model.graph if n.op_type == "Transpose"]:
        table, users = operand(turned, 0), list(turned.outputs[0].uses())
        is_matrix = [*turned.attributes["perm"].as_ints()] == [1, 0] and _is_table(table)
        if is_matrix and all((user.op_type, i) == ("MatMul", 1) for user, i in users):
            for node, _ in users:
                node.replace_input_with(1, table)
                node.op_type, node.domain = "FusedMatMul", MICROSOFT_DOMAIN
                node.attributes["transB"] = ir.AttrInt64("transB", 1)
            model.graph.opset_imports[MICROSOFT_DOMAIN] = 1
    _share_int8_embeddings(model.graph)
    passes.RemoveUnusedNodesPass()(model)


def _is_table(value: ir.Value) -> bool:
    """Return True for a stored matrix, or a cast of one."""
    cast = producer(value, "Cast")
    source = cast.inputs[0] if cast is not None else value
    return source is not None and isinstance(source.const_value, ir.ExternalTensor)


def _share_int8_embeddings(graph: ir.Graph) -> None:
    """Let lookups in a tied int8 embedding read the matrix of the LM head's product, in place.

    Replaced nodes are left unused.
    """
    nodes = GraphBuilder("shared", graph)
    lookups = [
        node for node in graph if node.op_type == "Gather" and _is_int8_table(node.inputs[0])
    ]
    for table in dict.fromkeys(operand(node, 0) for node in lookups):
        rows = _product_matrix(table)
        if rows is None:
            continue
        for node in lookups:
            if node.inputs[0] is table:
                _replace_lookup(node, rows, nodes)
    graph.sort()


def _is_int8_table(value: ir.Value | None) -> bool:
    return (
        value is not None
        and value.dtype == ir.DataType.INT8
        and isinstance(value.const_value, ir.ExternalTensor)
    )


def _product_matrix(table: ir.Value) -> ir.Value | None:
    """Return the matrix of a table's MatMulNBits product, [V, blocks, b]; None without one."""
    for user, _ in table.uses():
        value = user.outputs[0] if user.op_type == "Cast" else None
        while value is not None and value.uses():
            user, index = next(iter(value.uses()))
            if user.op_type == "MatMulNBits":
                return value if index == 1 else None
            value = user.outputs[0] if user.op_type in ("BitwiseXor", "Pad", "Reshape") else None
    return None


def _replace_lookup(node: ir.Node, rows: ir.Value, nodes: GraphBuilder) -> None:
    """Gather unsigned rows instead of signed ones, and subtract their zero point."""
    size, ids = static_shape(operand(node, 0))[1], node.inputs[1]
    ((cast, _),) = node.outputs[0].uses()
    assert cast.op_type == "Cast"
    output, dtype = cast.outputs[0], ir.DataType(cast.attributes["to"].as_int())
    assert output.shape is not None
    copied_dims = [0] * (len(output.shape) - 1)
    _, num_blocks, block_size = static_shape(rows)
    width = num_blocks * block_size
    taken = nodes("Cast", nodes("Gather", rows, ids), to=dtype)
    centered = nodes("Sub", taken, np.array(128, dtype.numpy()))
    gathered = nodes("Reshape", centered, [*copied_dims, width])
    if width > size:
        gathered = nodes("Slice", gathered, [0], [size], [-1])
    gathered.shape, gathered.dtype = output.shape, output.dtype
    output.replace_all_uses_with(gathered)
