"""Schemes of weights that keep a checkpoint's integers without requantization."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir

from specedge.bundle.reports import WeightType

from ..checkpoint.quantized_rows import QuantizedRows, find_rows
from ..checkpoint.quantized_tensors import BlockLayout, QuantizedTensor
from ..graph.external_data import LazyWeights
from . import schemes
from .block_sources import CheckpointMatrix, find_matrix
from .checkpoint_experts import CheckpointExperts, find_experts
from .experts import ExcludedWeights, ExpertWeights, expert_layers
from .matrices import StoredTensor, embeddings, matrix_groups
from .schemes import Scheme

_FLOAT_BITS = 32  # bits of scales, offsets and dequantized weights


class KeptWeights:
    """Weights of graphs that are quantized tensors of the checkpoint.

    Args:
        tensors: Quantized tensors of the checkpoint.
        quantized: Tensors of the weights file by offset.
    """

    def __init__(
        self, tensors: Sequence[QuantizedTensor], quantized: Mapping[int, QuantizedRows]
    ) -> None:
        self._tensors, self._quantized = tensors, quantized
        self._layouts: dict[str, BlockLayout] = {}  # in the bundle
        self.offset_error = 0.0  # largest relative RMS error of experts by rounded offsets

    def select(self, graph: ir.Graph, excluded: ExcludedWeights) -> dict[tuple[int, ...], Scheme]:
        """Return the schemes of a graph's groups and experts."""
        selected = {}
        for group in matrix_groups(graph, excluded.offsets):
            sources = {
                m.offset: self._find(m.stored, m.stored.order == (0, 1)) for m in group.matrices
            }
            kept = {offset: source for offset, source in sources.items() if source is not None}
            scheme = schemes.unquantized("its type is not block-wise")
            if kept:
                bits = max(source.layout.bits for source in kept.values())
                reason = scheme.reason if len(kept) < len(sources) else ""
                scheme = Scheme(1, 0.0, 0.0, bits, reason=reason, kept=kept)
            left = [m.stored.tensor for m in group.matrices if m.offset not in kept]
            selected[group.key] = schemes.with_names(scheme, left)
        for layer in expert_layers(graph, excluded):
            experts = self._find_experts(layer.experts)
            scheme = schemes.unquantized("QMoE does not support their type, groups or input order")
            if experts is not None:
                error = experts.offset_error
                reason = f"their offsets are rounded (relative error {error:.2%})" if error else ""
                bits = experts.layout.bits
                scheme = Scheme(1, 0.0, 0.0, bits, reason=reason, experts=experts)
            selected[layer.experts.key] = schemes.with_names(scheme, layer.experts.names)
        return selected

    def tables(self, graph: ir.Graph) -> dict[int, CheckpointMatrix]:
        """Return the embeddings of a graph by offset."""
        sources = {stored.offset: self._find(stored, False) for _, stored in embeddings(graph)}
        return {
            offset: source
            for offset, source in sources.items()
            if source is not None and source.order is None
        }

    def types(self) -> dict[str, WeightType]:
        """Return the quantization types of the checkpoint, with their sizes."""
        sizes: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for tensor in self._tensors:
            count = tensor.shape[0] * tensor.shape[1]
            bits = bits_per_weight(self._layouts.get(tensor.name))
            sizes[tensor.type_name].update(
                {"count": count, "file": 8 * tensor.num_bytes, "bundle": round(bits * count)}
            )
        return {
            name: WeightType(size["count"], size["file"] / size["count"],
                             size["bundle"] / size["count"])
            for name, size in sorted(sizes.items())
        }  # fmt: skip

    def _find(self, stored: StoredTensor, is_transposed: bool) -> CheckpointMatrix | None:
        """Return a matrix whose rows are along the last axis of its file if it is transposed."""
        rows = self._quantized.get(stored.offset)
        if rows is None or rows.rows.ndim != 1 or rows.is_transposed != is_transposed:
            return None
        if (source := find_matrix(rows)) is not None:
            self._layouts[source.tensor.name] = source.layout
        return source

    def _find_experts(self, weights: ExpertWeights) -> CheckpointExperts | None:
        experts = find_experts(self._quantized, weights)
        if experts is not None:
            self.offset_error = max(self.offset_error, experts.offset_error)
            for stack in experts.stacks:
                layout = replace(experts.layout, has_zero_points=stack.has_zero_points)
                self._layouts |= {matrix.tensor.name: layout for matrix in stack.matrices}
        return experts


def rows_to_keep(lazy: LazyWeights) -> dict[int, QuantizedRows]:
    """Return the weights that are rows of block-wise quantized tensors, by offset."""
    rows = {offset: find_rows(tensor) for offset, tensor in lazy.items()}
    return {offset: x for offset, x in rows.items() if x is not None and x.can_be_kept}


def bits_per_weight(layout: BlockLayout | None) -> float:
    """Return the bits per weight in a bundle, including scales, offsets and zero points."""
    if layout is None:
        return _FLOAT_BITS
    of_block = (1 + layout.has_offsets) * _FLOAT_BITS + layout.has_zero_points * layout.bits
    return layout.bits + of_block / layout.block_size
