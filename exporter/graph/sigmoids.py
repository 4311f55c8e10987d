"""Sigmoids as 1 / (1 + exp(-x)), which ONNX Runtime computes as exactly as PyTorch does.

Its Sigmoid on a CPU is within 2e-7 of the right number wherever that is, so that x * sigmoid(x) is
off by 2% at -12 and by several times its value at -17; of Exp all digits but the last are right. A
gate that is nearly shut in front of a massive activation's large weight lets such an error through.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import DeduplicateInitializersPass, LiftConstantsToInitializersPass
from onnxscript.rewriter.pattern import RewriteRule, RewriteRuleSet


def spell_out(model: ir.Model) -> None:
    """Replace every Sigmoid node in place; x * sigmoid(y) becomes x / (1 + exp(-y))."""
    # One after the other: a set would replace the Sigmoid before it sees the product behind it.
    _rewrite(model, _product, lambda op, x, y: op.Div(x, _divisor(op, y)))
    _rewrite(model, _sigmoid, lambda op, y: op.Reciprocal(_divisor(op, y)))
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    DeduplicateInitializersPass(size_limit=1)(model)


def shorten(model: ir.Model) -> None:
    """Undo it in place, where more is rounded than a Sigmoid is off by: fewer nodes take less."""
    _rewrite(model, lambda op, x, y: op.Div(x, op.Add(op.Exp(op.Neg(y)), 1.0)), _product)
    _rewrite(model, lambda op, y: op.Reciprocal(op.Add(op.Exp(op.Neg(y)), 1.0)), _sigmoid)


def _rewrite(model: ir.Model, pattern: Any, replacement: Any) -> None:
    RewriteRuleSet([RewriteRule(pattern, replacement)], commute=True).apply_to_model(model)


def _product(op: Any, x: Any, y: Any) -> Any:
    return op.Mul(x, op.Sigmoid(y))


def _sigmoid(op: Any, y: Any) -> Any:
    return op.Sigmoid(y)


def _divisor(op: Any, y: Any) -> Any:
    return op.Add(op.Exp(op.Neg(y)), op.Constant(value_float=1.0))
