"""The nodes of a graph whose stored integers TensorRT takes.

There DequantizeLinear alone may read them: before rows are taken of a table, before a matrix is
turned, and of blocks, which are stored as signed integers in the matrix's order for it.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from ..graph.nodes import producer
from ..graph.weights import view_tensor
from . import mixing, rounding
from .choosing import Choice
from .editing import take_over
from .experts import Mixture
from .matrices import Group, Stored
from .rewriting import in_blocks, known, width_of
from .widening import Widener


class Dequantiser(Widener):
    """Replaces products and embeddings in one graph.

    Lookups and products have initializers of their own over a tied table's bytes: over one
    ONNX Runtime fails with `session.x64quantprecision`. TensorRT-RTX makes one constant of both.
    """

    def _rows_of_blocks(self, node: ir.Node, stored: Stored) -> ir.Value:
        """Rows of a table that lies beside its blocks with one scale a row."""
        return self._rows(node, *self._table(stored))

    def _rows(
        self, node: ir.Node, stored_values: ir.ExternalTensor, stored_scales: ir.ExternalTensor
    ) -> ir.Value:
        """Rows of a table that is floats before they are taken."""
        output, ids = node.outputs[0], node.inputs[1]
        assert ids is not None
        name = f"{stored_values.name}.rows"
        table = self.external(view_tensor(stored_values, stored_values.shape, name))
        wide = self._wide(node, table, stored_scales)
        return self.node(node, "Gather", [wide, ids], f"{output.name}.whole", output)

    def _widened(self, before: ir.Node, values: ir.Value, scales: ir.Value, name: str) -> ir.Value:
        turned = producer(values, "Transpose")
        if turned is None:
            return super()._widened(before, values, scales, name)
        table, stored = turned.inputs[0], scales.const_value
        assert table is not None
        assert isinstance(stored, ir.ExternalTensor)
        wide = self._wide(before, table, stored)
        return self.node(before, "Transpose", [wide], f"{name}.wide", values, perm=[1, 0])

    def _wide(self, before: ir.Node, table: ir.Value, scales: ir.ExternalTensor) -> ir.Value:
        """All of a table, [V, H], with a scale a row."""
        flat = view_tensor(scales, ir.Shape([scales.size]), f"{table.name}.wide.scales")
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
        name = f"{like.name}.int{bits}"
        whole = self._product_of_signed(before, group.value, stored, name, like)
        self._hand_over(before, matrices, whole, name)

    def experts(self, mixture: Mixture, choice: Choice) -> None:
        """Replace the two products of all of a layer's experts side by side."""
        if not choice.num_parts:
            return
        blocks = mixing.stored(self, mixture.experts, choice)
        ways = (_below_each_other, _beside_each_other)
        for node, one, seen in zip(mixture.nodes, blocks, ways, strict=True):
            x, output = node.inputs[0], node.outputs[0]
            assert x is not None
            number, width, groups, _ = one[0].shape.numpy()
            size, along = groups * rounding.BLOCK, seen is _beside_each_other
            shape = (number * size, width) if along else (size, number * width)
            signed = self.store.signed_blocks(one, choice.bits, shape, seen)
            name = f"{output.name}.int{choice.bits}"
            take_over(output, self._product_of_signed(node, x, signed, name, output))

    def _product_of_signed(
        self,
        before: ir.Node,
        x: ir.Value,
        stored: tuple[ir.ExternalTensor, ir.ExternalTensor],
        name: str,
        like: ir.Value,
    ) -> ir.Value:
        """x times signed blocks, [K, N]."""
        (values, scales), width = map(self.external, stored), int(stored[0].shape.numpy()[-1])
        sizes: dict[str, Any] = {"axis": 0, "block_size": rounding.BLOCK}
        wide = self._dequantised(before, values, scales, f"{name}.wide", **sizes)
        return self.node(before, "MatMul", [x, wide], f"{name}.whole", like, width)


def _below_each_other(blocks: torch.Tensor) -> torch.Tensor:
    """Of N experts' columns each. [E, N, G, ...] -> [E * N, G, ...]"""
    return blocks.flatten(0, 1)


def _beside_each_other(blocks: torch.Tensor) -> torch.Tensor:
    """Of a sum over all experts. [E, N, G, ...] -> [N, E * G, ...]"""
    return blocks.transpose(0, 1).flatten(1, 2)
