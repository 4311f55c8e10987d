"""The nodes of a graph whose stored integers TensorRT takes.

There DequantizeLinear alone may read them: before rows are taken of a table, before a matrix is
turned, and of blocks, which are stored as signed integers in the matrix's order for it.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from ..graph.nodes import producer
from ..graph.weights import seen_as
from . import rounding
from .choosing import Choice
from .matrices import Group, Stored
from .rewriting import in_blocks, known, rows_of, width_of
from .widening import Widener


class Dequantiser(Widener):
    """Replaces products and embeddings in one graph.

    Lookups and products have initializers of their own over a tied table's bytes: over one
    ONNX Runtime fails with `session.x64quantprecision`. TensorRT-RTX makes one constant of both.
    """

    def embedding(self, node: ir.Node, stored: Stored) -> None:
        """Take rows of floats from a table of integers, [V, H], and their scales."""
        values, scales = self.store.integers(stored.place, lambda: rows_of(stored))
        table = self.external(seen_as(values, values.shape, f"{values.name}.rows"))
        node.replace_input_with(0, self._table(node, table, scales))
        node.outputs[0].dtype = ir.DataType.FLOAT

    def _widened(self, before: ir.Node, values: ir.Value, scales: ir.Value, name: str) -> ir.Value:
        turned = producer(values, "Transpose")
        if turned is None:
            return super()._widened(before, values, scales, name)
        table, stored = turned.inputs[0], scales.const_value
        assert table is not None
        assert isinstance(stored, ir.ExternalTensor)
        wide = self._table(before, table, stored)
        return self.node(before, "Transpose", [wide], f"{name}.wide", values, perm=[1, 0])

    def _table(self, before: ir.Node, table: ir.Value, scales: ir.ExternalTensor) -> ir.Value:
        """All of a table, [V, H], with a scale a row."""
        flat = seen_as(scales, ir.Shape([scales.size]), f"{table.name}.wide.scales")
        return self._dequantised(before, table, self.external(flat), f"{table.name}.wide", axis=0)

    def _blocks(self, before: ir.Node, group: Group, choice: Choice) -> None:
        """The product of a group's matrices joined along N, in blocks."""
        matrices = group.matrices
        like, width = matrices[0].node.outputs[0], sum(map(width_of, matrices))
        by = [self.column_powers.get(m.node) for m in matrices]
        key = (tuple(m.place for m in matrices), choice.bits, *map(known, by))
        size, bits = int(matrices[0].stored.numbers().shape[0]), choice.bits
        blocks = self.store.blocks(key, lambda: in_blocks(matrices, by, choice))
        stored = self.store.signed_blocks(blocks, bits, (size, width))
        values, scales = map(self.external, stored)
        name = f"{like.name}.int{bits}"
        sizes: dict[str, Any] = {"axis": 0, "block_size": rounding.BLOCK}
        wide = self._dequantised(before, values, scales, f"{name}.wide", **sizes)
        whole = self.node(before, "MatMul", [group.value, wide], f"{name}.whole", like, width)
        self._hand_over(before, matrices, whole, name)
