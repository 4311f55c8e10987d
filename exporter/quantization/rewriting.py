"""The nodes of a graph whose matrices are integers.

In columns they are standard ONNX operators alone. Inputs x [..., T, K] are rounded once for all
matrices that read them, a scale a row. Products are of unsigned and signed bytes, which add up in
32 bits: the same sum in every order, everywhere. In blocks each product is ONNX Runtime's
MatMulNBits, which rounds x itself, a scale a block, at accuracy level 4.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ..graph.nodes import add_constant, insert_node
from ..graph.weights import view_tensor
from . import mixing, rounding
from .choosing import Choice
from .editing import IN_BYTES, MICROSOFT, Editor, take_over
from .experts import Mixture
from .matrices import Group, Matrix, Stored, contents
from .rounding import Blocks, Integers

_ZERO = 128  # of x as unsigned bytes


@dataclass
class Rewriter(Editor):
    """Replaces products and embeddings in one graph; the weights go to `store`."""

    tables: Mapping[int, np.ndarray | None]  # embeddings' places, and powers moved into them, [H]
    block_tables: Container[int] = ()  # places of those that are in blocks of 8 bits
    column_powers: dict[ir.Node, np.ndarray] = field(default_factory=dict)

    def group(self, group: Group, choice: Choice) -> None:
        """Replace the products of a group."""
        first = next(node for node in self.graph if node in {m.node for m in group.matrices})
        if not choice.num_parts:
            for matrix in group.matrices:
                self._columns_of_float(matrix)
            return
        if choice.bits:
            self._blocks(first, group, choice)
            return
        pieces = [self._given(first, part) for part in self._parts(first, group.value, choice)]
        joined = len(group.matrices) > 1 and all(len(m.stored.order) == 2 for m in group.matrices)
        for matrices in [group.matrices] if joined else [(m,) for m in group.matrices]:
            self._product(first, matrices, pieces, choice)

    def experts(self, mixture: Mixture, choice: Choice) -> None:
        """Replace a layer's experts."""
        if choice.num_parts:
            mixing.rewrite(self, mixture, choice)

    def embedding(self, node: ir.Node, stored: Stored) -> None:
        """Take rows of integers from a table, [V, H]."""
        output, by = node.outputs[0], self.tables[stored.place]
        if stored.place in self.block_tables:
            take_over(output, self._rows_of_blocks(node, stored))
            return
        rows = self._rows(node, *self._table(stored))
        if by is not None:  # the head reads the table's channels times these powers
            name = f"{output.name}.powers"
            powers = add_constant(self.graph, np.exp2(-by).astype(np.float32), name)
            rows = self.node(node, "Mul", [rows, powers], f"{output.name}.divided", output)
        take_over(output, rows)

    def _table(self, stored: Stored) -> tuple[ir.ExternalTensor, ir.ExternalTensor]:
        """Where a table's integers lie, [V, H], and its scales, [V, 1]."""
        by = self.tables[stored.place]
        return self.store.integers((stored.place, known(by)), lambda: rows_of(stored, by))

    def _rows(
        self, node: ir.Node, stored_values: ir.ExternalTensor, stored_scales: ir.ExternalTensor
    ) -> ir.Value:
        """Rows of a table's integers times their scales, for the tokens of a lookup."""
        output, ids = node.outputs[0], node.inputs[1]
        values, scales = self.external(stored_values), self.external(stored_scales)
        kind, to = ir.DataType.INT8, ir.DataType.FLOAT
        taken = self.node(node, "Gather", [values, ids], f"{output.name}.int8", output, dtype=kind)
        wide = self.node(node, "Cast", [taken], f"{output.name}.wide", output, to=to)
        scale = self.node(node, "Gather", [scales, ids], f"{output.name}.scale", output, 1)
        return self.node(node, "Mul", [wide, scale], f"{output.name}.whole", output)

    def _rows_of_blocks(self, node: ir.Node, stored: Stored) -> ir.Value:
        """Rows of a table in blocks of 8 bits, [V, H / 32, 32], which a tied head multiplies with.

        The key of its blocks is that of the head.
        """
        output, ids = node.outputs[0], node.inputs[1]
        key = ((stored.place,), 8, None)
        blocks, scales = self.store.blocks(
            key, lambda: rounding.blocks(contents(stored.tensor).T, 8)
        )
        rows, groups, size = blocks.shape.numpy()
        scales = view_tensor(scales, ir.Shape([rows, groups, 1]), f"{scales.name}.rows")
        name, kind = output.name, ir.DataType.UINT8
        inputs = [self.external(blocks), ids]
        taken = self.node(node, "Gather", inputs, f"{name}.bytes", output, dtype=kind)
        scale = self.node(node, "Gather", [self.external(scales), ids], f"{name}.scale", output)
        wide = self.node(node, "Cast", [taken], f"{name}.wide", output, to=ir.DataType.FLOAT)
        middle = self.constant("middle", np.float32(128))
        signed = self.node(node, "Sub", [wide, middle], f"{name}.signed", output)
        whole = self.node(node, "Mul", [signed, scale], f"{name}.blocks", output)
        for value, last in ((taken, size), (wide, size), (signed, size), (whole, size), (scale, 1)):
            if output.shape is not None:
                value.shape = ir.Shape([*output.shape[:-1], groups, last])
        dims = self.constant("row", np.array([1, -1, groups * size], np.int64))
        return self.node(node, "Reshape", [whole, dims], f"{name}.whole", output)

    def _parts(self, before: ir.Node, value: ir.Value, choice: Choice) -> list[ir.Value]:
        """x in parts of K."""
        if choice.num_parts == 1:
            return [value]
        name, size = value.name, value.shape[-1] if value.shape is not None else None
        assert isinstance(size, int)
        sizes = np.full(choice.num_parts, size // choice.num_parts, np.int64)
        names = [f"{name}.part{i}" for i in range(choice.num_parts)]
        return _split(before, value, add_constant(self.graph, sizes, f"{name}.parts"), names)

    def _given(self, before: ir.Node, value: ir.Value) -> tuple[ir.Value, ...]:
        """x as bytes and its scales, [..., T, K] and [..., T, 1]."""
        name = f"{value.name}.rounded"
        sizes = self.node(before, "Abs", [value], f"{name}.sizes", value)
        axis = self.constant("axis", np.array([-1], np.int64))
        largest = self.node(before, "ReduceMax", [sizes, axis], f"{name}.largest", value, 1)
        least = self.constant("least", np.float32(1e-30))
        above = self.node(before, "Max", [largest, least], f"{name}.above", value, 1)
        share = self.constant("share", np.float32(1 / rounding.LARGEST))
        scale = self.node(before, "Mul", [above, share], f"{name}.scale", value, 1)
        scaled = self.node(before, "Div", [value, scale], f"{name}.scaled", value)
        steps = [scaled, self.constant("one", np.float32(1)), self._zero()]
        kind = ir.DataType.UINT8
        return self.node(before, "QuantizeLinear", steps, name, value, dtype=kind), scale

    def _zero(self) -> ir.Value:
        return self.constant("zero", np.uint8(_ZERO))

    def _product(
        self,
        before: ir.Node,
        matrices: Sequence[Matrix],
        pieces: Sequence[tuple[ir.Value, ...]],
        choice: Choice,
    ) -> None:
        """The products of matrices joined along N, of the parts of K added up."""
        name = f"{matrices[0].node.outputs[0].name}.int8"
        total: ir.Value | None = None
        like, width = matrices[0].node.outputs[0], sum(map(width_of, matrices))
        for i, piece in enumerate(pieces):
            label = f"{name}.{i}" if len(pieces) > 1 else name
            weights = self._weights(before, matrices, choice, i)
            whole = self._multiplied(before, piece, weights, label, like, width)
            if total is not None:
                whole = self.node(before, "Add", [total, whole], f"{label}.sum", like, width)
            total = whole
        assert total is not None
        self._hand_over(before, matrices, total, name)

    def _multiplied(
        self,
        before: ir.Node,
        given: tuple[ir.Value, ...],
        weights: tuple[ir.Value, ir.Value],
        name: str,
        like: ir.Value,
        width: int,
    ) -> ir.Value:
        """A product of bytes, times both scales."""
        (bytes_, scale), (values, scales) = given, weights
        inputs = [bytes_, values, self._zero()]
        kind, to = ir.DataType.INT32, ir.DataType.FLOAT
        sums = self.node(before, "MatMulInteger", inputs, f"{name}.sums", like, width, kind)
        wide = self.node(before, "Cast", [sums], f"{name}.wide", like, width, to=to)
        rows = self.node(before, "Mul", [wide, scale], f"{name}.rows", like, width)
        return self.node(before, "Mul", [rows, scales], f"{name}.whole", like, width)

    def _blocks(self, before: ir.Node, group: Group, choice: Choice) -> None:
        """The product of a group's matrices joined along N, in blocks."""
        matrices = group.matrices
        like, width = matrices[0].node.outputs[0], sum(map(width_of, matrices))
        by = [self.column_powers.get(m.node) for m in matrices]
        key = (tuple(m.place for m in matrices), choice.bits, *map(known, by))
        stored = self.store.blocks(key, lambda: in_blocks(matrices, by, choice))
        inputs = [group.value, *map(self.external, stored)]
        name = f"{like.name}.int{choice.bits}"
        size = matrices[0].stored.numbers().shape[0]
        sizes = {"K": size, "N": width, "bits": choice.bits, "block_size": rounding.BLOCK}
        whole = self.node(
            before, "MatMulNBits", inputs, f"{name}.whole", like, width,
            domain=MICROSOFT, accuracy_level=IN_BYTES, **sizes,
        )  # fmt: skip
        self._hand_over(before, matrices, whole, name)

    def _hand_over(
        self, before: ir.Node, matrices: Sequence[Matrix], total: ir.Value, name: str
    ) -> None:
        """Give each matrix's readers its part of a product of all."""
        outputs = [m.node.outputs[0] for m in matrices]
        found = [total]
        if len(matrices) > 1:
            widths = np.array([width_of(m) for m in matrices], np.int64)
            sizes = add_constant(self.graph, widths, f"{name}.widths")
            found = _split(before, total, sizes, [f"{o.name}.whole" for o in outputs])
        for output, value in zip(outputs, found, strict=True):
            value.shape, value.dtype = output.shape, output.dtype
            take_over(output, value)

    def _weights(
        self, before: ir.Node, matrices: Sequence[Matrix], choice: Choice, part: int
    ) -> tuple[ir.Value, ir.Value]:
        """The integers and scales of matrices beside each other, for a part of K."""
        first = matrices[0]
        if first.place in self.tables:
            values, scales = self._table(first.stored)
            table = self.external(values)
            name = f"{first.node.outputs[0].name}.turned"
            turned = insert_node(before, "Transpose", [table], name, perm=[1, 0])
            flat = view_tensor(scales, ir.Shape([1, scales.size]), f"{scales.name}.flat")
            return turned, self.external(flat)
        by = [self.column_powers.get(m.node) for m in matrices]
        moved = map(known, (choice.powers, *by))
        key = (tuple(m.place for m in matrices), choice.num_parts, part, *moved)
        values, scales = self.store.integers(key, lambda: _columns(matrices, by, choice, part))
        return self.external(values), self.external(scales)

    def _columns_of_float(self, matrix: Matrix) -> None:
        """A product that stays as it is, with its columns divided behind it."""
        by = self.column_powers.get(matrix.node)
        if by is None:
            return
        output = matrix.node.outputs[0]
        users = list(output.uses())
        factors = add_constant(self.graph, np.exp2(by).astype(np.float32), f"{output.name}.factors")
        scaled = ir.node("Mul", [output, factors])
        scaled.outputs[0].name = f"{output.name}.scaled"
        scaled.outputs[0].shape, scaled.outputs[0].dtype = output.shape, output.dtype
        self.graph.insert_after(matrix.node, scaled)
        for user, index in users:
            user.replace_input_with(index, scaled.outputs[0])


def _split(before: ir.Node, value: ir.Value, sizes: ir.Value, names: list[str]) -> list[ir.Value]:
    """Parts of a value along its last axis."""
    node = ir.node("Split", [value, sizes], {"axis": -1}, num_outputs=len(names))
    assert sizes.const_value is not None
    for output, name, size in zip(node.outputs, names, sizes.const_value.numpy(), strict=True):
        output.name, output.dtype = name, ir.DataType.FLOAT
        if value.shape is not None:
            output.shape = ir.Shape([*value.shape[:-1], int(size)])
    assert before.graph is not None
    before.graph.insert_before(before, node)
    return list(node.outputs)


def width_of(matrix: Matrix) -> int:
    return matrix.stored.numbers().shape[-1]


def known(powers: np.ndarray | None) -> bytes | None:
    return None if powers is None else powers.tobytes()


def rows_of(stored: Stored, by: np.ndarray | None) -> Integers:
    """A table [V, H] with one scale a row, after channel k was multiplied by 2 ** by[k]."""
    turned = rounding.columns(contents(stored.tensor).T, by)
    return Integers(np.ascontiguousarray(turned.values.T), turned.scales.T)


def _columns(
    matrices: Sequence[Matrix], by: Sequence[np.ndarray | None], choice: Choice, part: int
) -> Integers:
    """Matrices beside each other, a part of K, with the powers that smoothing moved into them."""
    found = []
    for matrix, columns in zip(matrices, by, strict=True):
        weights = matrix.stored.numbers()
        size = weights.shape[-2] // choice.num_parts
        rows = slice(part * size, (part + 1) * size)
        powers = None if choice.powers is None else choice.powers[rows]
        integers = choice.rounded.get(matrix.place)
        if integers is None:
            integers = rounding.columns(weights[..., rows, :], powers)
        assert isinstance(integers, Integers)
        factors = np.float32(1) if columns is None else np.exp2(columns).astype(np.float32)
        found.append(Integers(integers.values, integers.scales * factors))
    if len(found) == 1:
        return found[0]
    return Integers(
        np.concatenate([one.values for one in found], -1),
        np.concatenate([one.scales for one in found], -1),
    )


def in_blocks(
    matrices: Sequence[Matrix], by: Sequence[np.ndarray | None], choice: Choice
) -> Blocks:
    """Matrices beside each other in blocks, with the powers that smoothing moved into them."""
    found = []
    for matrix, columns in zip(matrices, by, strict=True):
        one = choice.rounded.get(matrix.place)
        if one is None:
            one = rounding.blocks(matrix.stored.numbers(), choice.bits, choice.weight)
        assert isinstance(one, Blocks)
        factors = np.float32(1) if columns is None else np.exp2(columns).astype(np.float32)[:, None]
        found.append(Blocks(one.values, one.scales * factors))
    return Blocks(
        np.concatenate([one.values for one in found]), np.concatenate([one.scales for one in found])
    )
