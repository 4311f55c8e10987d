"""ONNX Runtime's fused operators in place of standard ones: fewer nodes for the same function.

A node costs an ONNX Runtime session some microseconds whatever it computes, which is most of what a
pass of a small model takes. Each module is one pass over a graph; all of them leave alone what does
not match. Only the op sets of GroupQueryAttention in float32 are fused: they need the domain
`com.microsoft` anyway, and further passes (quantization, narrowing) start from the graph before.
"""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as passes

from specedge.bundle.op_sets import attention_ops, has_compute_type

from ..weights import drop_unused
from . import integer_products, packed_attention, residual_norms

MICROSOFT = "com.microsoft"


def fuse(model: ir.Model) -> None:
    """Run every pass, in place."""
    for module in (packed_attention, residual_norms, integer_products):
        module.fuse(model.graph)
    passes.RemoveUnusedNodesPass()(model)
    drop_unused(model.graph)
    model.graph.opset_imports[MICROSOFT] = 1


def is_fused(ops: str) -> bool:
    """Return True if the graphs of an op set use fused operators."""
    return attention_ops(ops) == "gqa" and not has_compute_type(ops)
