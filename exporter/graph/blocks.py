"""Products with matrices of bytes as MatMulNBits nodes, which ONNX Runtime would make of them.

Its own fusion needs a DequantizeLinear for each product. Where a graph multiplies with a matrix
more than once, it would keep a copy for each, or widen the matrix in every run.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..hosts.nodes import Nodes
from .nodes import producer

BLOCK = 32  # the rows that ONNX Runtime's fusion takes
_IN_BYTES = 4  # the level that the fusion chooses: on the CPU inputs are rounded to bytes, too
_ZERO = np.array(128, np.uint8)  # what a byte of 0 is without a sign


class Blocks:
    """Matrices as MatMulNBits takes them, made of constants once, when the graph is loaded."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._made: dict[tuple[ir.Value, ir.Value], tuple[ir.Value, ir.Value]] = {}

    def rewrite(self, node: ir.Node) -> ir.Value | None:
        """A product with bytes anew; None where a node is no such product."""
        widened = producer(node.inputs[1], "DequantizeLinear") if node.op_type == "MatMul" else None
        if widened is None or "block_size" in widened.attributes:
            return None
        matrix, scales, *_ = widened.inputs
        assert matrix is not None
        assert scales is not None
        turned = producer(matrix, "Transpose")
        source = turned.inputs[0] if turned is not None else matrix
        assert source is not None
        rows, columns = _shape(source)[:: -1 if turned is not None else 1]
        if (source, scales) not in self._made:
            self._made[source, scales] = self._blocks(source, scales, rows, columns, turned is None)
        sizes = {"K": rows, "N": columns, "bits": 8, "block_size": BLOCK}
        sizes["accuracy_level"] = _IN_BYTES
        inputs = [node.inputs[0], *self._made[source, scales]]
        found = ir.node("MatMulNBits", inputs, sizes, domain="com.microsoft")
        output = node.outputs[0]
        found.outputs[0].type, found.outputs[0].shape = output.type, output.shape
        node.replace_input_with(1, None)
        self._nodes.put(found, str(node.name))
        return found.outputs[0]

    def _blocks(
        self, source: ir.Value, scales: ir.Value, rows: int, columns: int, turn: bool
    ) -> tuple[ir.Value, ir.Value]:
        """Bytes [N, blocks, 32] and scales [N, blocks] of a matrix [K, N], or [N, K] unturned."""
        nodes, count = self._nodes, -(-rows // BLOCK)
        found = nodes("Transpose", source, perm=[1, 0]) if turn else source
        found = nodes("BitwiseXor", nodes("Cast", found, to=ir.DataType.UINT8), _ZERO)
        if padding := count * BLOCK - rows:
            found = nodes("Pad", found, [0, 0, 0, padding], _ZERO)
        found = nodes("Reshape", found, [columns, count, BLOCK])
        return found, nodes("Expand", nodes("Unsqueeze", scales, [1]), [columns, count])


def _shape(value: ir.Value) -> list[int]:
    assert value.shape is not None
    return [int(size) for size in value.shape]  # type: ignore[arg-type]
