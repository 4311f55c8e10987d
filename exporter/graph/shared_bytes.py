"""Int8 matrices that lookups and matrix products share on a GPU.

MatMulNBits reads unsigned bytes [V, blocks, 32] in the order of the stored table. ONNX Runtime's
own fusion to MatMulNBits requires a DequantizeLinear node per product: if a graph multiplies by a
matrix more than once, it keeps a copy for each product, or dequantizes the matrix in every pass.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .nodes import (
    MICROSOFT_DOMAIN,
    GraphBuilder,
    operand,
    producer,
    replace_output,
    static_shape,
)


def share_int8_embeddings(graph: ir.Graph) -> None:
    """Let lookups in a tied int8 embedding read the matrix of the LM head's product, in place.

    Replaced nodes are left unused.
    """
    nodes = GraphBuilder("shared", graph)
    blocks = MatMulNBitsRewriter(nodes)
    lookups = [
        node for node in graph if node.op_type == "Gather" and _is_int8_table(node.inputs[0])
    ]
    for table in dict.fromkeys(operand(node, 0) for node in lookups):
        for node in list(graph):
            if _is_product_with(node, table):
                product = blocks.rewrite(node)
                assert product is not None
                replace_output(node.outputs[0], product)
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


def _is_product_with(node: ir.Node, table: ir.Value) -> bool:
    """Return True if a node is a product with the transposed table."""
    widened = producer(node.inputs[1], "DequantizeLinear") if node.op_type == "MatMul" else None
    turned = producer(widened.inputs[0], "Transpose") if widened is not None else None
    return turned is not None and turned.inputs[0] is table


def _product_matrix(table: ir.Value) -> ir.Value | None:
    """Return the matrix of a table's MatMulNBits products, [V, blocks, 32]; None without one."""
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
    width = -(-size // BLOCK) * BLOCK
    taken = nodes("Cast", nodes("Gather", rows, ids), to=dtype)
    centered = nodes("Sub", taken, np.array(128, dtype.numpy()))
    gathered = nodes("Reshape", centered, [*copied_dims, width])
    if width > size:
        gathered = nodes("Slice", gathered, [0], [size], [-1])
    gathered.shape, gathered.dtype = output.shape, output.dtype
    output.replace_all_uses_with(gathered)


BLOCK = 32  # block size of ONNX Runtime's fusion
_ZERO = np.array(128, np.uint8)  # zero point of unsigned bytes


class MatMulNBitsRewriter:
    """Rewriter of int8 products to MatMulNBits nodes, with matrices converted at loading."""

    def __init__(self, nodes: GraphBuilder) -> None:
        self._nodes = nodes
        self._matrices: dict[tuple[ir.Value, ir.Value], tuple[ir.Value, ir.Value]] = {}

    def rewrite(self, node: ir.Node) -> ir.Value | None:
        """Return the rewritten product of a node; None if it has no per-channel int8 weights."""
        widened = producer(node.inputs[1], "DequantizeLinear") if node.op_type == "MatMul" else None
        if widened is None or "block_size" in widened.attributes:
            return None
        matrix, scales = operand(widened, 0), operand(widened, 1)
        turned = producer(matrix, "Transpose")
        source = operand(turned, 0) if turned is not None else matrix
        rows, columns = static_shape(source)[:: -1 if turned is not None else 1]
        if (source, scales) not in self._matrices:
            self._matrices[source, scales] = self._blocks(
                source, scales, rows, columns, turned is None
            )
        sizes = {"K": rows, "N": columns, "bits": 8, "block_size": BLOCK}
        product = self._nodes(
            "MatMulNBits", node.inputs[0], *self._matrices[source, scales],
            domain=MICROSOFT_DOMAIN, **sizes,
        )  # fmt: skip
        product.type, product.shape = node.outputs[0].type, node.outputs[0].shape
        node.replace_input_with(1, None)
        return product

    def _blocks(
        self, source: ir.Value, scales: ir.Value, rows: int, columns: int, turn: bool
    ) -> tuple[ir.Value, ir.Value]:
        """Convert a matrix [K, N] (`turn`) or [N, K] to bytes [N, blocks, 32] and scales."""
        nodes, count = self._nodes, -(-rows // BLOCK)
        blocks = nodes("Transpose", source, perm=[1, 0]) if turn else source
        blocks = nodes("BitwiseXor", nodes("Cast", blocks, to=ir.DataType.UINT8), _ZERO)
        if padding := count * BLOCK - rows:
            blocks = nodes("Pad", blocks, [0, 0, 0, padding], _ZERO)
        blocks = nodes("Reshape", blocks, [columns, count, BLOCK])
        return blocks, nodes("Expand", nodes("Unsqueeze", scales, [1]), [columns, count])
