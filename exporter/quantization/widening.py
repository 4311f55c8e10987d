"""The nodes of a graph whose stored integers are widened and multiplied as floats.

For devices that do not multiply bytes of both kinds: of DequantizeLinear and MatMul ONNX Runtime
makes a product of floats with integers on CUDA. Integers and scales are those of the other graphs.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from ..graph.weights import view_tensor
from . import mixing
from .choosing import Choice
from .experts import Mixture
from .rewriting import Rewriter


class Widener(Rewriter):
    """Replaces products and embeddings in one graph; what they read stays as it is.

    Blocks are MatMulNBits here, too: DequantizeLinear and MatMul would be fused to nothing else.
    """

    def experts(self, mixture: Mixture, choice: Choice) -> None:
        """As the MoE node of floats takes them."""
        if choice.num_parts:
            mixing.widen(self, mixture, choice)

    def _given(self, before: ir.Node, value: ir.Value) -> tuple[ir.Value, ...]:
        return (value,)

    def _multiplied(
        self,
        before: ir.Node,
        given: tuple[ir.Value, ...],
        weights: tuple[ir.Value, ir.Value],
        name: str,
        like: ir.Value,
        width: int,
    ) -> ir.Value:
        (x,), wide = given, self._widened(before, *weights, name)
        return self.node(before, "MatMul", [x, wide], f"{name}.whole", like, width)

    def _widened(self, before: ir.Node, values: ir.Value, scales: ir.Value, name: str) -> ir.Value:
        """Integers [..., K, N] times scales [..., 1, N]."""
        stored = scales.const_value
        assert isinstance(stored, ir.ExternalTensor)
        if len(stored.shape) == 2:  # a scale a column: what ONNX Runtime knows how to fuse
            columns = ir.Shape([stored.size])
            scales = self.external(view_tensor(stored, columns, f"{stored.name}.columns"))
            sizes: dict[str, Any] = {"axis": 1}
        else:
            assert values.shape is not None
            size = values.shape[-2]
            assert isinstance(size, int)
            sizes = {"axis": len(stored.shape) - 2, "block_size": size}
        return self._dequantised(before, values, scales, f"{name}.wide", **sizes)

    def _dequantised(
        self, before: ir.Node, values: ir.Value, scales: ir.Value, name: str, **sizes: Any
    ) -> ir.Value:
        inputs = [values, scales]
        if values.dtype != ir.DataType.INT4:
            assert scales.shape is not None
            # Without it, or where it is shared, ONNX Runtime fails over
            # `session.x64quantprecision`.
            zeros = self.store.zeros(scales.shape.numpy())
            zero = f"{name.removesuffix('.wide')}.zero"
            inputs.append(self.external(view_tensor(zeros, zeros.shape, zero)))
        return self.node(before, "DequantizeLinear", inputs, name, values, **sizes)
