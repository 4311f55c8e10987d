"""Rewriting of float graphs to graphs that dequantize weights and multiply in float.

For devices without kernels for integer products. On CUDA ONNX Runtime fuses DequantizeLinear and
MatMul. Integers and scales are shared with the other graphs.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from ..graph.external_data import view_tensor
from ..graph.nodes import static_shape
from . import expert_rewriter
from .experts import ExpertLayer
from .graph_editor import INT8_ACCURACY_LEVEL
from .integer_rewriter import IntegerRewriter
from .schemes import Scheme


class DequantizeRewriter(IntegerRewriter):
    """Rewriter of the products and embeddings of one graph; activations stay float.

    Block-wise products are MatMulNBits here as well, since ONNX Runtime would not fuse
    DequantizeLinear and MatMul.
    """

    has_float_inputs = True

    def experts(self, mixture: ExpertLayer, choice: Scheme) -> None:
        """Replace experts by a MoE node of dequantized weights."""
        if choice.num_parts:
            stored = expert_rewriter.store_experts(self, mixture.experts, choice)
            level = INT8_ACCURACY_LEVEL if choice.experts is None else 0
            expert_rewriter.dequantize_experts(self, mixture, stored, level)

    def _quantize_input(self, before: ir.Node, value: ir.Value) -> tuple[ir.Value, ...]:
        return (value,)

    def _multiply(
        self,
        before: ir.Node,
        quantized_input: tuple[ir.Value, ...],
        weights: tuple[ir.Value, ir.Value],
        name: str,
        like: ir.Value,
        width: int,
    ) -> ir.Value:
        (x,), wide = quantized_input, self._dequantize_weights(before, *weights, name)
        return self.node(before, "MatMul", [x, wide], f"{name}.whole", like, width)

    def _dequantize_weights(
        self, before: ir.Node, values: ir.Value, scales: ir.Value, name: str
    ) -> ir.Value:
        """Insert the dequantization of per-channel weights. [..., K, N]"""
        stored = scales.const_value
        assert isinstance(stored, ir.ExternalTensor)
        if len(stored.shape) == 2:  # one scale per column, which ONNX Runtime fuses
            columns = ir.Shape([stored.size])
            scales = self.external(view_tensor(stored, columns, f"{stored.name}.columns"))
            sizes: dict[str, Any] = {"axis": 1}
        else:
            sizes = {"axis": len(stored.shape) - 2, "block_size": static_shape(values)[-2]}
        return self._insert_dequantize(before, values, scales, f"{name}.wide", **sizes)

    def _insert_dequantize(
        self, before: ir.Node, values: ir.Value, scales: ir.Value, name: str, **sizes: Any
    ) -> ir.Value:
        inputs = [values, scales]
        if values.dtype != ir.DataType.INT4:
            # Without zero points, or with shared ones, ONNX Runtime fails with
            # `session.x64quantprecision`.
            zeros = self.store.zeros(tuple(static_shape(scales)))
            zero = f"{name.removesuffix('.wide')}.zero"
            inputs.append(self.external(view_tensor(zeros, zeros.shape, zero)))
        return self.node(before, "DequantizeLinear", inputs, name, values, **sizes)
