"""Rewriting of float graphs to quantized graphs.

Per-channel products are standard ONNX operators: inputs x [..., T, K] are quantized dynamically,
one scale per row, once for all matrices that read them, and accumulated in int32, which is exact in
any order. Block-wise products are ONNX Runtime's MatMulNBits, which at accuracy level 4 quantizes x
with one scale per block.

For blocks with offsets, which only checkpoints have, the sums of the input over each block of B are
multiplied by the matrix of offsets:

    x W = x Q + sums(x) O    x [T, K], Q [K, N], sums(x) [T, K / B], O [K / B, N]

If blocks permute the inputs (act-order), x is permuted once for all products with the same order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ..checkpoint.quantized_tensors import BlockLayout
from ..graph.external_data import view_tensor
from ..graph.nodes import (
    MICROSOFT_DOMAIN,
    add_constant,
    insert_node,
    replace_output,
    split_columns,
)
from . import expert_rewriter, rounding
from .block_sources import BlockSource, CheckpointMatrix, RoundedMatrix
from .experts import ExpertLayer
from .graph_editor import INT8_ACCURACY_LEVEL, GraphEditor
from .matrices import Matrix, MatrixGroup, StoredTensor, tensor_data
from .rounding import IntegerMatrix
from .schemes import Scheme

_ZERO_POINT = 128  # zero point of x as unsigned bytes


@dataclass
class IntegerRewriter(GraphEditor):
    """Rewriter of the products and embeddings of one graph.

    Attributes:
        tables: Offsets of embeddings.
        block_tables: Offsets of embeddings in 8-bit blocks.
        kept_tables: Embeddings of a checkpoint whose integers are kept, by offset; None if this
            model is rounded.
    """

    has_float_inputs: ClassVar = False

    tables: Container[int]
    block_tables: Container[int] = ()
    kept_tables: Mapping[int, CheckpointMatrix] | None = None
    _sums: dict[tuple[ir.Value, int], ir.Value] = field(default_factory=dict)
    _ordered: dict[tuple[ir.Value, bytes], ir.Value] = field(default_factory=dict)

    def group(self, group: MatrixGroup, choice: Scheme) -> None:
        """Replace the products of a group."""
        first = next(node for node in self.graph if node in {m.node for m in group.matrices})
        if not choice.num_parts:
            return
        if choice.bits:
            self._insert_block_products(first, group, choice)
            return
        pieces = [
            self._quantize_input(first, part)
            for part in self._split_input(first, group.value, choice)
        ]
        joined = len(group.matrices) > 1 and all(len(m.stored.order) == 2 for m in group.matrices)
        for matrices in [group.matrices] if joined else [(m,) for m in group.matrices]:
            self._insert_product(first, matrices, pieces, choice)

    def experts(self, mixture: ExpertLayer, choice: Scheme) -> None:
        """Replace a layer's experts."""
        if choice.num_parts:
            expert_rewriter.rewrite_experts(self, mixture, choice, self.has_float_inputs)

    def embedding(self, node: ir.Node, stored: StoredTensor) -> None:
        """Replace a lookup in a table, [V, H]."""
        output = node.outputs[0]
        if self.kept_tables is not None:
            if (source := self.kept_tables.get(stored.offset)) is not None:
                replace_output(output, self._insert_kept_lookup(node, stored, source))
            return
        if stored.offset in self.block_tables:
            replace_output(output, self._insert_block_lookup(node, stored))
            return
        replace_output(output, self._insert_lookup(node, *self._stored_table(stored)))

    def _stored_table(self, stored: StoredTensor) -> tuple[ir.ExternalTensor, ir.ExternalTensor]:
        """Return a table's stored integers, [V, H], and scales, [V, 1]."""
        return self.store.matrix(stored.offset, lambda: quantize_table(stored))

    def _insert_lookup(
        self, node: ir.Node, stored_values: ir.ExternalTensor, stored_scales: ir.ExternalTensor
    ) -> ir.Value:
        """Insert a lookup in an integer table, and dequantize the rows."""
        output, ids = node.outputs[0], node.inputs[1]
        values, scales = self.external(stored_values), self.external(stored_scales)
        integer_type, to = ir.DataType.INT8, ir.DataType.FLOAT
        taken = self.node(
            node, "Gather", [values, ids], f"{output.name}.int8", output, dtype=integer_type
        )
        wide = self.node(node, "Cast", [taken], f"{output.name}.wide", output, to=to)
        scale = self.node(node, "Gather", [scales, ids], f"{output.name}.scale", output, 1)
        return self.node(node, "Mul", [wide, scale], f"{output.name}.whole", output)

    def _insert_block_lookup(self, node: ir.Node, stored: StoredTensor) -> ir.Value:
        """Insert a lookup in a table of 8-bit blocks, [V, H / 32, 32].

        The blocks are shared with a tied LM head.
        """
        output, ids = node.outputs[0], node.inputs[1]
        key = ((stored.offset,), 8)
        blocks, scales = self.store.matrix(
            key, lambda: rounding.quantize_blocks(tensor_data(stored.tensor).T, 8)
        )
        rows, groups, size = blocks.shape.numpy()
        scales = view_tensor(scales, ir.Shape([rows, groups, 1]), f"{scales.name}.rows")
        name, integer_type = output.name, ir.DataType.UINT8
        inputs = [self.external(blocks), ids]
        taken = self.node(node, "Gather", inputs, f"{name}.bytes", output, dtype=integer_type)
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

    def _insert_kept_lookup(
        self, node: ir.Node, stored: StoredTensor, source: CheckpointMatrix
    ) -> ir.Value:
        """Insert a lookup in a checkpoint's table, [V, H], which is shared with a tied LM head."""
        output, ids, layout = node.outputs[0], node.inputs[1], source.layout
        name, key = f"{output.name}.int{layout.bits}", ((stored.offset,), layout.bits, None)
        values, scales = self.store.matrix(key, source.blocks)
        num_rows, num_blocks, num_bytes = values.shape.numpy()
        table = view_tensor(values, ir.Shape([num_rows, num_blocks * num_bytes]), f"{name}.table")
        inputs = [self.external(table), ids, self.external(scales)]
        inputs += self._zero_points(key, [source], values.name)
        rows = self.node(
            node, "GatherBlockQuantized", inputs, f"{name}.rows", output,
            domain=MICROSOFT_DOMAIN, bits=layout.bits, block_size=layout.block_size,
            gather_axis=0, quantize_axis=1,
        )  # fmt: skip
        if layout.has_offsets:
            offsets = self.store.array(
                ("offsets of rows", key),
                lambda: source.offsets()[..., None],
                f"{values.name}.row_offsets",
            )
            added = self.node(node, "Gather", [self.external(offsets), ids], f"{name}.offsets",
                              output)  # fmt: skip
            split = self._split_blocks(node, rows, layout, num_blocks)
            whole = self.node(node, "Add", [split, added], f"{name}.blocks", split)
            if output.shape is not None:
                added.shape = ir.Shape([*output.shape[:-1], num_blocks, 1])
            dims = self.constant("row", np.array([1, -1, num_blocks * layout.block_size], np.int64))
            rows = self.node(node, "Reshape", [whole, dims], f"{name}.whole", output)
        return rows

    def _split_input(self, before: ir.Node, value: ir.Value, choice: Scheme) -> list[ir.Value]:
        """Split x along K."""
        if choice.num_parts == 1:
            return [value]
        name, size = value.name, value.shape[-1] if value.shape is not None else None
        assert isinstance(size, int)
        widths = [size // choice.num_parts] * choice.num_parts
        names = [f"{name}.part{i}" for i in range(len(widths))]
        return split_columns(before, value, widths, names)

    def _quantize_input(self, before: ir.Node, value: ir.Value) -> tuple[ir.Value, ...]:
        """Quantize x dynamically; return bytes [..., T, K] and scales [..., T, 1]."""
        name = f"{value.name}.rounded"
        sizes = self.node(before, "Abs", [value], f"{name}.sizes", value)
        axis = self.constant("axis", np.array([-1], np.int64))
        largest = self.node(before, "ReduceMax", [sizes, axis], f"{name}.largest", value, 1)
        least = self.constant("least", np.float32(1e-30))
        above = self.node(before, "Max", [largest, least], f"{name}.above", value, 1)
        share = self.constant("share", np.float32(1 / rounding.MAX_INT8))
        scale = self.node(before, "Mul", [above, share], f"{name}.scale", value, 1)
        scaled = self.node(before, "Div", [value, scale], f"{name}.scaled", value)
        steps = [scaled, self.constant("one", np.float32(1)), self._zero_point()]
        integer_type = ir.DataType.UINT8
        return self.node(before, "QuantizeLinear", steps, name, value, dtype=integer_type), scale

    def _zero_point(self) -> ir.Value:
        return self.constant("zero", np.uint8(_ZERO_POINT))

    def _insert_product(
        self,
        before: ir.Node,
        matrices: Sequence[Matrix],
        pieces: Sequence[tuple[ir.Value, ...]],
        choice: Scheme,
    ) -> None:
        """Insert the product of matrices concatenated along N, summed over parts of K."""
        name = f"{matrices[0].node.outputs[0].name}.int8"
        total: ir.Value | None = None
        like, width = matrices[0].node.outputs[0], sum(map(num_columns, matrices))
        for i, piece in enumerate(pieces):
            label = f"{name}.{i}" if len(pieces) > 1 else name
            weights = self._stored_weights(before, matrices, choice, i)
            whole = self._multiply(before, piece, weights, label, like, width)
            if total is not None:
                whole = self.node(before, "Add", [total, whole], f"{label}.sum", like, width)
            total = whole
        assert total is not None
        self._replace_outputs(before, matrices, total, name)

    def _multiply(
        self,
        before: ir.Node,
        quantized_input: tuple[ir.Value, ...],
        weights: tuple[ir.Value, ir.Value],
        name: str,
        like: ir.Value,
        width: int,
    ) -> ir.Value:
        """Insert an integer product, multiplied by both scales."""
        (bytes_, scale), (values, scales) = quantized_input, weights
        inputs = [bytes_, values, self._zero_point()]
        sum_type, to = ir.DataType.INT32, ir.DataType.FLOAT
        sums = self.node(before, "MatMulInteger", inputs, f"{name}.sums", like, width, sum_type)
        wide = self.node(before, "Cast", [sums], f"{name}.wide", like, width, to=to)
        rows = self.node(before, "Mul", [wide, scale], f"{name}.rows", like, width)
        return self.node(before, "Mul", [rows, scales], f"{name}.whole", like, width)

    def _insert_block_products(self, before: ir.Node, group: MatrixGroup, choice: Scheme) -> None:
        """Insert products in blocks; those of equal layout and order of inputs are joined."""
        joined: defaultdict[tuple[BlockLayout, bytes], dict[Matrix, BlockSource]]
        joined = defaultdict(dict)
        for matrix in group.matrices:
            if (source := self._block_source(matrix, choice)) is not None:
                order = b"" if source.order is None else source.order.tobytes()
                joined[source.layout, order][matrix] = source
        for sources in joined.values():
            self._insert_block_product(before, group.value, sources)

    def _block_source(self, matrix: Matrix, choice: Scheme) -> BlockSource | None:
        """Return the block-wise integers of a matrix; None if it stays in float."""
        if choice.kept is not None:
            return choice.kept.get(matrix.offset)
        integers = choice.integers.get(matrix.offset)
        return RoundedMatrix(matrix.stored, choice.bits, choice.importance, integers)

    def _store_blocks(
        self, sources: Mapping[Matrix, BlockSource]
    ) -> tuple[Hashable, tuple[ir.ExternalTensor, ir.ExternalTensor]]:
        """Store the integers and scales of matrices, joined along N; return their key as well."""
        bits = next(iter(sources.values())).layout.bits
        key = (tuple(matrix.offset for matrix in sources), bits)
        return key, self.store.matrix(
            key, lambda: rounding.join((source.blocks() for source in sources.values()), 0)
        )

    def _insert_block_product(
        self, before: ir.Node, x: ir.Value, sources: Mapping[Matrix, BlockSource]
    ) -> None:
        """Insert the product of x with matrices of a layout, joined along N."""
        matrices, first = [*sources], next(iter(sources.values()))
        layout, size = first.layout, int(matrices[0].stored.shape[0])
        like, width = matrices[0].node.outputs[0], sum(map(num_columns, matrices))
        name, (key, stored) = f"{like.name}.int{layout.bits}", self._store_blocks(sources)
        x = self._in_order(before, x, first.order)
        inputs = [x, *map(self.external, stored)]
        kept = [source for source in sources.values() if isinstance(source, CheckpointMatrix)]
        inputs += self._zero_points(key, kept, stored[0].name)
        is_float = self.has_float_inputs and bool(kept)
        level = {} if is_float else {"accuracy_level": INT8_ACCURACY_LEVEL}
        whole = self.node(
            before, "MatMulNBits", inputs, f"{name}.whole", like, width,
            domain=MICROSOFT_DOMAIN, **level, K=size, N=width, bits=layout.bits,
            block_size=layout.block_size,
        )  # fmt: skip
        if layout.has_offsets:
            offsets = self.store.array(
                ("offsets", key),
                lambda: np.concatenate([source.offsets() for source in kept]).T,
                f"{stored[0].name}.offsets",
            )
            sums = self._block_sums(before, x, layout, size)
            factors = [sums, self.external(offsets)]
            added = self.node(before, "MatMul", factors, f"{name}.offsets", like, width)
            whole = self.node(before, "Add", [whole, added], f"{name}.sum", like, width)
        self._replace_outputs(before, matrices, whole, name)

    def _zero_points(
        self, key: Hashable, sources: Sequence[CheckpointMatrix], name: str | None
    ) -> list[ir.Value]:
        """Return the zero points of joined matrices as an input, if they have any. [N, bytes]"""
        if not any(source.layout.has_zero_points for source in sources):
            return []
        points = self.store.array(
            ("zero points", key),
            lambda: np.concatenate([source.zero_points() for source in sources]),
            f"{name}.zero_points",
        )
        return [self.external(points)]

    def _in_order(self, before: ir.Node, x: ir.Value, order: np.ndarray | None) -> ir.Value:
        """Return x with its last axis permuted. [..., K]"""
        if order is None:
            return x
        key = x, order.tobytes()
        if key not in self._ordered:
            name = f"{x.name}.ordered{len(self._ordered)}"
            indices = add_constant(self.graph, order.astype(np.int64), f"{name}.order")
            self._ordered[key] = self.node(before, "Gather", [x, indices], name, x, axis=-1)
        return self._ordered[key]

    def _block_sums(self, before: ir.Node, x: ir.Value, layout: BlockLayout, size: int) -> ir.Value:
        """Return the sums of x over blocks along K. [..., T, K] -> [..., T, K / block_size]"""
        key = x, layout.block_size
        if key not in self._sums:
            num_blocks = size // layout.block_size
            split = self._split_blocks(before, x, layout, num_blocks)
            axis = self.constant("axis", np.array([-1], np.int64))
            name, inputs = f"{x.name}.sums_of_{layout.block_size}", [split, axis]
            self._sums[key] = self.node(
                before, "ReduceSum", inputs, name, x, num_blocks, keepdims=0
            )
        return self._sums[key]

    def _split_blocks(
        self, before: ir.Node, x: ir.Value, layout: BlockLayout, num_blocks: int
    ) -> ir.Value:
        """Reshape rows to blocks. [1, T, K] -> [1, T, K / block_size, block_size]"""
        dims = np.array([1, -1, num_blocks, layout.block_size], np.int64)
        shape = self.constant(f"blocks.{num_blocks}.{layout.block_size}", dims)
        name = f"{x.name}.blocks_of_{layout.block_size}"
        split = self.node(before, "Reshape", [x, shape], name, x)
        if x.shape is not None:
            split.shape = ir.Shape([*x.shape[:-1], num_blocks, layout.block_size])
        return split

    def _replace_outputs(
        self, before: ir.Node, matrices: Sequence[Matrix], total: ir.Value, name: str
    ) -> None:
        """Replace the outputs of matrices by parts of a joined product."""
        outputs = [m.node.outputs[0] for m in matrices]
        parts = [total]
        if len(matrices) > 1:
            names = [f"{output.name}.whole" for output in outputs]
            parts = split_columns(before, total, list(map(num_columns, matrices)), names)
        for output, value in zip(outputs, parts, strict=True):
            value.shape, value.dtype = output.shape, output.dtype
            replace_output(output, value)

    def _stored_weights(
        self, before: ir.Node, matrices: Sequence[Matrix], choice: Scheme, part: int
    ) -> tuple[ir.Value, ir.Value]:
        """Return integers and scales of joined matrices, for a part of K."""
        first = matrices[0]
        if first.offset in self.tables:
            values, scales = self._stored_table(first.stored)
            table = self.external(values)
            name = f"{first.node.outputs[0].name}.turned"
            turned = insert_node(before, "Transpose", [table], name, perm=[1, 0])
            flat = view_tensor(scales, ir.Shape([1, scales.size]), f"{scales.name}.flat")
            return turned, self.external(flat)
        key = ("columns", tuple(m.offset for m in matrices), choice.num_parts, part)
        values, scales = self.store.matrix(key, lambda: _join_columns(matrices, choice, part))
        return self.external(values), self.external(scales)


def num_columns(matrix: Matrix) -> int:
    """Return N of a matrix [K, N]."""
    return matrix.stored.shape[-1]


def quantize_table(stored: StoredTensor) -> IntegerMatrix:
    """Quantize a table [V, H] per row."""
    turned = rounding.quantize_columns(tensor_data(stored.tensor).T)
    return IntegerMatrix(np.ascontiguousarray(turned.values.T), turned.scales.T)


def _join_columns(matrices: Sequence[Matrix], choice: Scheme, part: int) -> IntegerMatrix:
    """Join quantized matrices along N, for a part of K."""
    pieces = []
    for matrix in matrices:
        size = matrix.stored.shape[-2] // choice.num_parts
        rows = slice(part * size, (part + 1) * size)
        integers = choice.integers.get(matrix.offset)
        if integers is None:
            integers = rounding.quantize_columns(matrix.stored.data()[..., rows, :])
        pieces.append(integers)
    return rounding.join(pieces, -1)
