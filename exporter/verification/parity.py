"""Numerical verification of an exported graph against the PyTorch model, in every export."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import onnxscript
import torch
import transformers

from specedge.bundle.reports import ParityReport

from ..progress import Advance
from . import checks, structure
from .partition import check_forms
from .reference import Reference
from .row_errors import ErrorCheck, row_scales
from .runner import Runner

PACKAGES = (torch, transformers, onnx, onnxruntime, onnxscript)


def verify(
    role: str,
    parts: list[Reference],
    runner: Runner,
    tolerance: float | None = None,
    advance: Advance = lambda amount: None,
    is_final: bool = True,
) -> tuple[ParityReport, list[str]]:
    """Verify that the graph computes the model, and that it is as accurate as float32 allows.

    The structure is checked in float64. Float32 errors are checked by running all files along the
    same segments.

    Args:
        role: "target" or "draft".
        parts: Reference results of the segments.
        runner: Runner of the graph variant.
        tolerance: Maximum float32 error relative to the largest value of an output; None to bound
            errors by PyTorch's own.
        advance: Called with the number of finished stages.
        is_final: False if the graphs are quantized, after which their files are compared.

    Returns:
        The report, and the fixed-shape files that are not bitwise equal to the decoder.

    Raises:
        ParityError: The graph differs from the model.
    """
    errors = _compare(role, "the exact result", parts, runner, tolerance, advance)
    invariance, differing = checks.check_standalone(runner, parts[0].tokens, advance, is_final)
    parity = ParityReport(
        **errors,
        tolerance=tolerance,
        num_positions=sum(len(part.tokens) for part in parts),
        num_left_out=sum(part.left_out for part in parts),
        invariant_lengths=invariance,
        versions={package.__name__: package.__version__ for package in PACKAGES},
    )
    return parity, differing


def verify_depth(
    role: str,
    parts: Sequence[Reference],
    runner: Runner,
    first: Runner,
    kinds: Sequence[int],
    report: ParityReport,
    tolerance: float | None,
    advance: Advance,
) -> ParityReport:
    """Verify all layers of a model whose first layers were verified.

    Layers of one kind must have the same nodes, and two passes over each segment through all layers
    are compared with PyTorch in float32, which finds wrong weights. If PyTorch's results are exact,
    so is the comparison of their structure.

    Args:
        role: "target" or "draft".
        parts: Reference results of all layers.
        runner: Runner of the graph variant.
        first: Runner of the graphs of the first layers.
        kinds: First layer of the kind of each layer.
        report: Report of the first layers.
        tolerance: As in `verify`.
        advance: Called with the number of finished stages.

    Returns:
        The report of the whole model.

    Raises:
        ParityError: The graph differs from the model.
    """
    for name in runner.files:
        check_forms(role, runner.path(name), first.path(name), kinds)
    errors = _compare(role, "PyTorch's", parts, runner, tolerance, advance, in_two_passes=True)
    for key in ("structure_error", "error_ratio"):
        errors[key] = max(errors[key], getattr(report, key))
    num_left_out = report.num_left_out + sum(part.left_out for part in parts)
    return replace(report, **errors, num_left_out=num_left_out)


def _compare(
    role: str,
    reference_name: str,
    parts: Sequence[Reference],
    runner: Runner,
    tolerance: float | None,
    advance: Advance,
    in_two_passes: bool = False,
) -> dict[str, Any]:
    """Check a graph's structure if the results are exact, and its float32 errors.

    Returns the largest errors, and those of float32, as fields of the report.
    """
    runner.check_files()
    difference, ratio = 0.0, 0.0
    if parts[0].is_exact:
        difference, ratio = structure.check_structure(role, runner, parts, tolerance)
    error_check = ErrorCheck(role, reference_name, tolerance, ratio=ratio)
    actions = (checks.segment_actions(runner, x, error_check, in_two_passes) for x in parts)
    runner.run([*itertools.chain.from_iterable(actions)], advance)
    caches = [c for p in parts for c in map(_largest_error, p.caches_float32, p.caches)]
    return {
        "logits_error": error_check.worst["logits"],
        "cache_error": error_check.worst["cache"],
        "float32_logits_error": max(_largest_error(p.logits_float32, p.logits) for p in parts),
        "float32_cache_error": max(caches),
        "error_ratio": error_check.ratio,
        "structure_error": difference,
        "logits_std": float(parts[0].logits.std(1).mean()),  # mean over rows
    }


def _largest_error(errors: np.ndarray, values: np.ndarray) -> float:
    """Return the largest error relative to the output's largest value, from relative row errors."""
    return float((errors * row_scales(values)).max()) / max(1e-30, float(np.abs(values).max()))
