"""Quantized weights of a checkpoint that are kept without requantization.

MatMulNBits reads the checkpoint's integers and scales. For blocks with offsets the sums of the
input over each block of B are multiplied by the matrix of offsets:

    x W = x Q + sums(x) O    x [T, K], Q [K, N], sums(x) [T, K / B], O [K / B, N]

If blocks permute the inputs (act-order), x is permuted once for all products with the same order.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from specedge.bundle.graph_variants import has_compute_type
from specedge.bundle.reports import WeightType

from ..checkpoint.quantized_rows import QuantizedRows
from ..checkpoint.quantized_tensors import BlockLayout, QuantizedTensor
from ..graph import rewrites
from ..graph.external_data import drop_unused, view_tensor
from ..graph.nodes import MICROSOFT_DOMAIN, add_constant, replace_output
from . import expert_rewriter, schemes
from .checkpoint_experts import CheckpointExperts, ExpertStack, find_experts
from .checkpoint_matrices import CheckpointMatrix, find_matrix, join_matrices
from .expert_rewriter import StoredExperts, StoredStack
from .experts import ExcludedWeights, ExpertLayer, ExpertWeights, expert_layers, load_graph
from .float_model import FloatModel
from .graph_editor import INT8_ACCURACY_LEVEL
from .integer_rewriter import IntegerRewriter, num_columns
from .matrices import Matrix, MatrixGroup, StoredTensor, embeddings, matrix_groups
from .schemes import Scheme
from .weights_writer import WeightsWriter

_FLOAT_BITS = 32  # bits of scales, offsets and dequantized weights


class CheckpointMatrices:
    """Matrices of graphs that are quantized tensors of the checkpoint, by offset.

    Args:
        tensors: Quantized tensors of the checkpoint.
        quantized: Tensors of the weights file by offset.
    """

    def __init__(
        self, tensors: Sequence[QuantizedTensor], quantized: Mapping[int, QuantizedRows]
    ) -> None:
        self._tensors, self.quantized = tensors, quantized
        self._matrices: dict[int, CheckpointMatrix | None] = {}
        self._experts: dict[tuple[int, ...], CheckpointExperts | None] = {}

    def __contains__(self, offset: int) -> bool:
        return self._matrices.get(offset) is not None

    def __getitem__(self, offset: int) -> CheckpointMatrix:
        matrix = self._matrices[offset]
        assert matrix is not None
        return matrix

    def experts(self, weights: ExpertWeights) -> CheckpointExperts | None:
        """Return the experts of a layer; None if they are dequantized."""
        return self._experts[weights.key]

    @property
    def offset_error(self) -> float:
        """Largest relative RMS error of experts by rounded offsets."""
        kept = (experts for experts in self._experts.values() if experts is not None)
        return max((experts.offset_error for experts in kept), default=0.0)

    def add(self, graph: ir.Graph, excluded: ExcludedWeights) -> None:
        """Match the matrices, tables and experts of a graph."""
        for group in matrix_groups(graph, excluded.offsets):
            for matrix in group.matrices:
                self._add(matrix.offset, matrix.stored.order == (0, 1))
        for _, stored in embeddings(graph):
            self._add(stored.offset, is_transposed=False)
        for experts in excluded.experts:
            if experts.key not in self._experts:
                self._experts[experts.key] = find_experts(self.quantized, experts)

    def _add(self, offset: int, is_transposed: bool) -> None:
        """Add a tensor of two axes, of which the last one has the rows if it is transposed."""
        rows = self.quantized.get(offset)
        if rows is not None and rows.rows.ndim == 1 and rows.is_transposed == is_transposed:
            self._matrices[offset] = find_matrix(rows)

    def types(self) -> dict[str, WeightType]:
        """Return the quantization types of the checkpoint, with their sizes."""
        layouts = self._layouts()
        sizes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for tensor in self._tensors:
            count = tensor.shape[0] * tensor.shape[1]
            bits = bits_per_weight(layouts.get(tensor.name))
            sizes[tensor.type_name].update(
                {"count": count, "file": 8 * tensor.num_bytes, "bundle": round(bits * count)}
            )
        return {
            name: WeightType(size["count"], size["file"] / size["count"],
                             size["bundle"] / size["count"])
            for name, size in sorted(sizes.items())
        }  # fmt: skip

    def _layouts(self) -> dict[str, BlockLayout]:
        """Return the layouts of kept tensors in the bundle."""
        matrices = (matrix for matrix in self._matrices.values() if matrix is not None)
        layouts = {matrix.tensor.name: matrix.layout for matrix in matrices}
        kept = (experts for experts in self._experts.values() if experts is not None)
        for experts in kept:
            for stack in experts.stacks:
                layout = replace(experts.layout, has_zero_points=stack.has_zero_points)
                layouts |= {matrix.tensor.name: layout for matrix in stack.matrices}
        return layouts


def bits_per_weight(layout: BlockLayout | None) -> float:
    """Return the bits per weight in a bundle, including scales, offsets and zero points."""
    if layout is None:
        return _FLOAT_BITS
    of_block = (1 + layout.has_offsets) * _FLOAT_BITS + layout.has_zero_points * layout.bits
    return layout.bits + of_block / layout.block_size


def keep(
    parts: Sequence[FloatModel],
    graph_variants: Mapping[str, Sequence[str]],
    kept: CheckpointMatrices,
    excluded: ExcludedWeights,
    folder: Path,
    store: WeightsWriter,
) -> dict[tuple[str, str], dict[tuple[int, ...], Scheme]]:
    """Write the graphs of models with a checkpoint's quantized weights.

    Args:
        parts: Float models that share a folder.
        graph_variants: Graph variants to write, by role.
        kept: Collects the matrices of all graphs.
        excluded: Weights that no group contains.
        folder: Folder of the new graphs.
        store: Weights file of the new graphs.

    Returns:
        The schemes of all groups, by role and graph variant.
    """
    written = {}
    for part in parts:
        for ops in graph_variants[part.role]:
            model = load_graph(part.decoder(ops), excluded)
            kept.add(model.graph, excluded)
            written[part.role, ops] = _describe(model.graph, kept, excluded)
            rewriter = KeepRewriter(
                model.graph, store, {}, kept=kept, is_float=has_compute_type(ops)
            )
            tables = dict(embeddings(model.graph))
            for group in matrix_groups(model.graph, excluded.offsets):
                rewriter.keep_group(group)
            for layer in expert_layers(model.graph, excluded):
                rewriter.keep_experts(layer)
            for node, stored in tables.items():
                if stored.offset in kept and kept[stored.offset].tensor.order is None:
                    rewriter.keep_table(node, stored)
            rewrites.fuse_sigmoids(model)
            passes.RemoveUnusedNodesPass()(model)
            drop_unused(model.graph)
            store.adopt(model.graph, kept.quantized)
            part.write(model, folder, ops)
    return written


def _describe(
    graph: ir.Graph, kept: CheckpointMatrices, excluded: ExcludedWeights
) -> dict[tuple[int, ...], Scheme]:
    """Return a scheme for each matrix of a graph, for its report."""
    described: dict[tuple[int, ...], Scheme] = {}
    for group in matrix_groups(graph, excluded.offsets):
        for matrix in group.matrices:
            choice = (
                Scheme(None, 1, 0.0, 0.0, kept[matrix.offset].layout.bits)
                if matrix.offset in kept
                else schemes.unquantized("its type is not block-wise")
            )
            described[(matrix.offset,)] = schemes.with_names(choice, [matrix.stored.tensor])
    for layer in expert_layers(graph, excluded):
        experts = kept.experts(layer.experts)
        choice = schemes.unquantized("QMoE does not support their type, groups or input order")
        if experts is not None:
            error = experts.offset_error
            reason = f"their offsets are rounded (relative error {error:.2%})" if error else ""
            choice = Scheme(None, 1, 0.0, 0.0, experts.layout.bits, reason=reason)
        described[layer.experts.key] = schemes.with_names(choice, layer.experts.names)
    return described


@dataclass
class KeepRewriter(IntegerRewriter):
    """Rewriter of products and lookups whose weights are kept.

    With `is_float` activations stay float.
    """

    kept: CheckpointMatrices = field(kw_only=True)
    is_float: bool = field(kw_only=True)
    _sums: dict[tuple[ir.Value, int], ir.Value] = field(default_factory=dict, kw_only=True)
    _ordered: dict[tuple[ir.Value, bytes], ir.Value] = field(default_factory=dict, kw_only=True)

    def keep_group(self, group: MatrixGroup) -> None:
        """Replace the products of a group; those with equal layout and order are joined."""
        nodes = {matrix.node for matrix in group.matrices}
        first = next(node for node in self.graph if node in nodes)
        joined: defaultdict[tuple[BlockLayout, bytes], list[Matrix]] = defaultdict(list)
        for matrix in group.matrices:
            if matrix.offset in self.kept:
                kept = self.kept[matrix.offset]
                order = b"" if kept.tensor.order is None else kept.tensor.order.tobytes()
                joined[kept.layout, order].append(matrix)
        for (layout, _), matrices in joined.items():
            self._insert_kept_product(first, group.value, matrices, layout)

    def keep_experts(self, layer: ExpertLayer) -> None:
        """Replace a layer's experts, if they are kept."""
        experts = self.kept.experts(layer.experts)
        if experts is None:
            return
        layout = experts.layout
        stacks = [
            self._store_stack(("kept experts", offset), stack, layout)
            for offset, stack in zip(layer.experts.key, experts.stacks, strict=True)
        ]
        stored = StoredExperts(layout.bits, layout.block_size, *stacks)
        if self.is_float:
            expert_rewriter.dequantize_experts(self, layer, stored, accuracy_level=0)
        else:
            expert_rewriter.rewrite_experts(self, layer, stored)

    def _store_stack(self, key: Hashable, stack: ExpertStack, layout: BlockLayout) -> StoredStack:
        """Store the matrices of all experts."""
        convert = functools.cache(lambda: stack.blocks(layout))  # once, in strips
        values, scales = self.store.blocks(key, lambda: convert()[0])
        if not stack.has_zero_points:
            return StoredStack(values, scales)
        points = self.store.array(
            ("zero points", key),
            lambda: convert()[1],
            f"{values.name}.zero_points",
            ir.DataType.UINT8,
        )
        return StoredStack(values, scales, points)

    def keep_table(self, node: ir.Node, stored: StoredTensor) -> None:
        """Replace a lookup in a table, [V, H]."""
        kept, output, ids = self.kept[stored.offset], node.outputs[0], node.inputs[1]
        layout, name = kept.layout, f"{output.name}.int{kept.layout.bits}"
        values, scales = self.store.blocks(("kept", stored.offset), kept.blocks)
        num_rows, num_blocks, num_bytes = values.shape.numpy()
        table = view_tensor(values, ir.Shape([num_rows, num_blocks * num_bytes]), f"{name}.table")
        inputs = [self.external(table), ids, self.external(scales)]
        inputs += self._zero_points(("kept", stored.offset), [kept], values.name)
        rows = self.node(
            node, "GatherBlockQuantized", inputs, f"{name}.rows", output,
            domain=MICROSOFT_DOMAIN, bits=layout.bits, block_size=layout.block_size,
            gather_axis=0, quantize_axis=1,
        )  # fmt: skip
        if layout.has_offsets:
            key = "offsets of rows", stored.offset
            offsets = self.store.array(
                key, lambda: kept.offsets()[..., None], f"{values.name}.row_offsets"
            )
            added = self.node(node, "Gather", [self.external(offsets), ids], f"{name}.offsets",
                              output)  # fmt: skip
            split = self._split_blocks(node, rows, layout, num_blocks)
            whole = self.node(node, "Add", [split, added], f"{name}.blocks", split)
            if output.shape is not None:
                added.shape = ir.Shape([*output.shape[:-1], num_blocks, 1])
            dims = self.constant("row", np.array([1, -1, num_blocks * layout.block_size], np.int64))
            rows = self.node(node, "Reshape", [whole, dims], f"{name}.whole", output)
        replace_output(output, rows)

    def _insert_kept_product(
        self, before: ir.Node, x: ir.Value, matrices: Sequence[Matrix], layout: BlockLayout
    ) -> None:
        """Insert the product of x with matrices of a layout, joined along N."""
        like, width = matrices[0].node.outputs[0], sum(map(num_columns, matrices))
        kept, name = [self.kept[m.offset] for m in matrices], f"{like.name}.int{layout.bits}"
        key = ("kept", *(matrix.offset for matrix in matrices))
        stored = self.store.blocks(key, lambda: join_matrices(matrix.blocks() for matrix in kept))
        x = self._in_order(before, x, kept[0].tensor.order)
        inputs = [x, *map(self.external, stored), *self._zero_points(key, kept, stored[0].name)]
        level = {} if self.is_float else {"accuracy_level": INT8_ACCURACY_LEVEL}
        whole = self.node(
            before, "MatMulNBits", inputs, f"{name}.whole", like, width,
            domain=MICROSOFT_DOMAIN, K=kept[0].tensor.shape[1], N=width, bits=layout.bits,
            block_size=layout.block_size, **level,
        )  # fmt: skip
        if layout.has_offsets:
            offsets = self.store.array(
                ("offsets", *key),
                lambda: np.concatenate([matrix.offsets() for matrix in kept]).T,
                f"{stored[0].name}.offsets",
            )
            sums = self._block_sums(before, x, layout, kept[0].tensor.shape[1])
            factors = [sums, self.external(offsets)]
            added = self.node(before, "MatMul", factors, f"{name}.offsets", like, width)
            whole = self.node(before, "Add", [whole, added], f"{name}.sum", like, width)
        self._replace_outputs(before, matrices, whole, name)

    def _zero_points(
        self, key: Hashable, kept: Sequence[CheckpointMatrix], name: str | None
    ) -> list[ir.Value]:
        """Return the zero points of joined matrices as an input, if they have any. [N, bytes]"""
        if not kept[0].layout.has_zero_points:
            return []
        points = self.store.array(
            ("zero points", key),
            lambda: np.concatenate([matrix.zero_points() for matrix in kept]),
            f"{name}.zero_points",
            ir.DataType.UINT8,
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
