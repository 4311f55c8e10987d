"""Numerical verification of an exported graph against the PyTorch model, in every export."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import onnxscript
import torch
import transformers

from specedge.bundle.reports import ParityReport

from ..progress import Advance
from . import checks, structure
from .checks import Check
from .partition import check_forms
from .reference import Reference
from .row_errors import ErrorCheck, row_scales
from .runner import FillCaches, Runner

PACKAGES = (torch, transformers, onnx, onnxruntime, onnxscript)


def verify(
    role: str,
    parts: list[Reference],
    runner: Runner,
    tolerance: float | None = None,
    advance: Advance = lambda amount: None,
) -> tuple[ParityReport, list[str]]:
    """Verify that the graph computes the model, and that it is as accurate as float32 allows.

    The structure is checked in float64. Float32 errors are checked by running all files along the
    same segments. For a large model with layers of equal form, two passes over each segment run all
    layers and are compared with PyTorch; other passes run one layer of each form and are compared
    with a single pass of these layers.

    Args:
        role: "target" or "draft".
        parts: Reference results of the segments.
        runner: Runner of the graph variant.
        tolerance: Maximum float32 error relative to the largest value of an output; None to bound
            errors by PyTorch's own.
        advance: Called with the number of finished stages.

    Returns:
        The report, and the fixed-shape files that are not bitwise equal to the decoder.

    Raises:
        ParityError: The graph differs from the model.
    """
    runner.check_files()
    difference, ratio = structure.check_structure(
        role, runner.path("decoder"), runner.geometry, parts, tolerance
    )
    error_check = ErrorCheck(role, "the exact result", tolerance, ratio=ratio)
    invariance, differing = _run_checks(parts, runner, error_check, advance)
    logits_errors = [_largest_error(p.logits_float32, p.logits) for p in parts]
    caches = [c for p in parts for c in map(_largest_error, p.caches_float32, p.caches)]
    parity = ParityReport(
        structure_error=difference,
        logits_error=error_check.worst["logits"],
        cache_error=error_check.worst["cache"],
        float32_logits_error=max(logits_errors),
        float32_cache_error=max(caches),
        error_ratio=error_check.ratio,
        tolerance=tolerance,
        logits_std=float(parts[0].logits.std(1).mean()),  # mean over rows
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
    tolerance: float | None = None,
    advance: Advance = lambda amount: None,
) -> ParityReport:
    """Verify all layers of a model whose first layers were verified.

    Layers of one kind must have the same nodes, and two passes over each segment through all layers
    are compared with PyTorch in float32, which finds wrong weights.

    Args:
        role: "target" or "draft".
        parts: Reference results of all layers, in float32.
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
    runner.check_files()
    for name in runner.files:
        check_forms(role, runner.path(name), first.path(name), kinds)
    error_check = ErrorCheck(role, "PyTorch's in float32", tolerance, ratio=report.error_ratio)
    depth_checks = [checks.full_depth_check(runner, part, error_check) for part in parts]
    results = iter(runner.run([], advance, [a for actions, _ in depth_checks for a in actions]))
    for actions, decide in depth_checks:
        decide(list(itertools.islice(results, len(actions))))
    caches = [c for p in parts for c in map(_largest_error, p.caches_float32, p.caches)]
    return replace(
        report,
        logits_error=error_check.worst["logits"],
        cache_error=error_check.worst["cache"],
        float32_logits_error=max(_largest_error(p.logits_float32, p.logits) for p in parts),
        float32_cache_error=max(caches),
        error_ratio=error_check.ratio,
        logits_std=float(parts[0].logits.std(1).mean()),
        num_left_out=report.num_left_out + sum(part.left_out for part in parts),
    )


def _largest_error(errors: np.ndarray, values: np.ndarray) -> float:
    """Return the largest error relative to the output's largest value, from relative row errors."""
    return float((errors * row_scales(values)).max()) / max(1e-30, float(np.abs(values).max()))


def _run_checks(
    parts: list[Reference], runner: Runner, error_check: ErrorCheck, advance: Advance
) -> tuple[tuple[int, ...], list[str]]:
    """Run all checks; return the invariant pass lengths, and the files that differ."""
    depth_checks: list[Check] = []
    all_checks: list[Check] = []
    if runner.representatives is not None:
        depth_checks = [checks.full_depth_check(runner, part, error_check) for part in parts]
        parts, all_checks = map(
            list, zip(*(checks.subset_reference(runner, part) for part in parts), strict=True)
        )
    differing: list[str] = []
    invariance: dict[int, bool] = {}
    fixed_shapes = [file for file in runner.files.values() if file.length is not None]
    all_checks += [
        checks.segment_check(runner, part, error_check, fixed_shapes, differing) for part in parts
    ]
    all_checks.append(checks.invariance_check(runner, parts[0].tokens, invariance))
    first = parts[0]

    def rows(start: int) -> FillCaches:
        return FillCaches(lambda i: first.caches[i][:, :start])

    all_checks += [
        checks.fixed_shape_check(file, first.tokens, rows, differing) for file in fixed_shapes
    ]
    # In a single run, because each run loads all subgraphs of a partitioned model.
    partition_actions, depth_actions = (
        [a for actions, _ in c for a in actions] for c in (all_checks, depth_checks)
    )
    results = iter(runner.run(partition_actions, advance, depth_actions))
    for actions, decide in (*depth_checks, *all_checks):
        decide(list(itertools.islice(results, len(actions))))
    return tuple(length for length, same in invariance.items() if same), differing
