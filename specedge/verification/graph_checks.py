"""Checks of a bundle's files and graphs.

The errors against PyTorch are those recorded at export, since they require PyTorch and the
checkpoint. Measured here: pass-length invariance, and the agreement of graph variants with each
other and of fixed-shape graphs with the decoder.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specedge.bundle import Bundle
from specedge.bundle.graph_variants import has_int8_caches
from specedge.bundle.manifest import PREFILL_LENGTH, GraphEntry, ModelEntry, chunk_length
from specedge.errors import BundleError, DeviceError
from specedge.runtime.backend.onnx_model import OrtModel

from .budget import Budget
from .noise import Array, RowDifference, distance, row_differences, size
from .report import FAILED, PASSED, SHORT, CheckResult

Open = Callable[[ModelEntry, str, str], OrtModel]
Outputs = tuple[Array | None, list[Array]]  # logits, and the rows of each state

_ERRORS = (
    "structure_error",
    "logits_error",
    "cache_error",
    "float32_logits_error",
    "float32_cache_error",
)


def files(bundle: Bundle, budget: Budget) -> CheckResult:
    """Hash every file, without a time limit."""
    total = sum(file.size for file in bundle.files.values())
    problems: list[str] = []

    def show_progress(num_bytes: int) -> None:
        _ = budget.left  # reading the clock reports the progress

    for name in bundle.files:
        try:
            bundle.check_hash(name, show_progress)
        except BundleError as error:
            problems.append(str(error))
    total_text = f"{len(bundle.files)} files, {total / 1e6:.1f} MB"
    figures = {"num_files": len(bundle.files), "bytes": total, "num_bad": len(problems)}
    if problems:
        summary = f"{len(problems)} of {total_text}, differ from the manifest"
        return CheckResult("files", FAILED, summary, tuple(problems), figures)
    return CheckResult(
        "files", PASSED, f"{total_text}: every SHA-256 matches the manifest", (), figures
    )


def graphs(
    bundle: Bundle, graph_variant: Callable[[ModelEntry], str], open_: Open, budget: Budget
) -> CheckResult:
    """Compare the graphs of the bundle, those of the selected graph variant first."""
    comparison = _Comparison(open_, budget)
    expected = {}
    for role, model in bundle.models.items():
        main_ops = graph_variant(model)
        graph = open_(model, main_ops, "decoder")
        comparison.rows(role, model, main_ops, graph)
        expected[role] = _run(graph, model, main_ops)
        del graph
    for role, model in bundle.models.items():
        main_ops = graph_variant(model)
        comparison.fixed(role, model, main_ops, expected[role])
        for other in (name for name in model.parity if name != main_ops):
            comparison.other_ops(role, model, (main_ops, other), expected[role])
    if comparison.missing:
        comparison.lines.append(f"too little time to compare {', '.join(comparison.missing)}")
        comparison.figures["not_compared"] = comparison.missing
    lines = tuple(comparison.problems + comparison.lines)
    if comparison.problems:
        return CheckResult("graphs", FAILED, comparison.problems[0], lines[1:], comparison.figures)
    if comparison.short:
        return CheckResult(
            "graphs", SHORT, "not all pass lengths were run", lines, comparison.figures
        )
    summary = "they agree with each other" + (
        ", and passes are batch-invariant as recorded"
        if comparison.as_recorded
        else ", but fewer pass lengths are batch-invariant than recorded: near-ties may differ"
    )
    return CheckResult("graphs", PASSED, summary, lines, comparison.figures)


@dataclass
class _Comparison:
    """Accumulated results of the graph check of one bundle."""

    open_: Open
    budget: Budget
    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    short: bool = False
    as_recorded: bool = True

    def rows(self, role: str, model: ModelEntry, ops: str, graph: OrtModel) -> None:
        """Compare pass-length invariance on this machine with the recorded one."""
        tokens, parity = _tokens(model), model.parity[ops]
        recorded = [t for t in parity.invariant_lengths if t <= len(tokens)]
        verify = next((g.length for g in model.graphs if g.name == "verify" and g.length), 1)
        lengths = sorted({*recorded, *range(1, min(verify, len(tokens)) + 1)})
        differences = row_differences(graph, tokens, lengths, self.budget.share(0.5))
        same = [t for t, difference in differences.items() if difference.relative == 0]
        worst = max((d.relative for d in differences.values()), default=0.0)
        self.short |= len(differences) < len(lengths)
        self.as_recorded &= set(recorded) <= set(same)
        self.figures[role] = {
            "ops": ops,
            "recorded_invariant_lengths": recorded,
            "invariant_lengths": same,
            "relative_difference": worst,
            **{f"recorded_{name}": getattr(parity, name) for name in _ERRORS},
        }
        passes = sum(difference.num_passes for difference in differences.values())
        self.lines.append(
            f"{role} ({ops}): bitwise equal for passes of {_list(same)} tokens ({passes} passes; "
            f"recorded {_list(recorded)}){_differing(differences)}"
        )
        self.lines.append(
            f"{role} ({ops}): recorded at export, not measured here: {model.describe_parity(ops)}"
        )
        if not worst <= allowed(model, ops):
            self.problems.append(
                f"{role} ({ops}): rows differ by {worst:.1e} of the largest value between passes "
                f"of different lengths, the limit is {allowed(model, ops):.0e}"
            )

    def other_ops(
        self, role: str, model: ModelEntry, ops: tuple[str, str], expected: dict[str, Outputs]
    ) -> None:
        """Compare another graph variant with the selected one."""
        main_ops, other = ops
        if self.budget.over:
            self.missing.append(f"{role}'s {other} graphs")
            return
        try:
            graph = self.open_(model, other, "decoder")
        except DeviceError as error:
            self.lines.append(f"{role}: not compared: {error}")
            return
        outputs = _run(graph, model, other)
        del graph
        if has_int8_caches(main_ops) is has_int8_caches(other):
            relative = _relative(outputs["decoder"], expected["decoder"])
            compared = "by up to {:.1e} of the largest value of logits or cache"
        else:  # caches are in other units, and values of random tokens may be clipped
            relative = _relative_square(outputs["decoder"], expected["decoder"])
            compared = "by {:.1e} of the root mean square of logits"
        self.figures[role][f"relative_difference_to_{other}"] = relative
        line = (
            f"{role}: {other} differs from {main_ops} {compared.format(relative)}, the limit is "
            f"{allowed(model, *ops):.0e}"
        )
        (self.lines if relative <= allowed(model, *ops) else self.problems).append(line)
        self.fixed(role, model, other, outputs)

    def fixed(self, role: str, model: ModelEntry, ops: str, expected: dict[str, Outputs]) -> None:
        """Compare the fixed-shape graphs with the decoder for any pass length."""
        differences: dict[str, float] = {}
        for entry in _fixed_shapes(model, ops):
            if self.budget.over:
                self.missing.append(f"{role}'s {entry.name} ({ops})")
                continue
            outputs = _passes(self.open_(model, ops, entry.name), model, entry, _tokens(model))
            differences[entry.name] = _relative(outputs, expected[entry.name])
            gc.collect()  # a session holds its weights
        if not differences:
            return
        self.figures[role][f"fixed_shapes_{ops}"] = differences
        same = ", ".join(name for name, relative in differences.items() if relative == 0)
        line = f"{role} ({ops}): fixed-shape graphs bitwise equal to the decoder: {same or 'none'}"
        if others := {name: relative for name, relative in differences.items() if relative != 0}:
            line += "; others, with the difference relative to the largest value: " + ", ".join(
                f"{name} {relative:.1e}" for name, relative in others.items()
            )
        is_close = all(relative <= allowed(model, ops) for relative in differences.values())
        (self.lines if is_close else self.problems).append(line)


def allowed(model: ModelEntry, *ops: str) -> float:
    """Return the allowed difference of two graphs: the sum of their relative error bounds."""
    return sum(model.bound(name) for name in (ops * 2)[:2])


def _tokens(model: ModelEntry) -> list[int]:
    """Return random tokens for the longest pass, and for two passes of each fixed shape."""
    longest = max(2 * PREFILL_LENGTH, chunk_length(model.capacity))
    count = min(longest, model.context_length)
    return [int(t) for t in np.random.default_rng(0).integers(model.vocab_size, size=count)]


def _differing(differences: dict[int, RowDifference]) -> str:
    others = {t: d for t, d in differences.items() if d.relative != 0}
    if not others:
        return ""
    worst = max(d.relative for d in others.values())
    return f"; for {_list(list(others))} they differ by up to {worst:.1e} of the largest value"


def _fixed_shapes(model: ModelEntry, ops: str) -> list[GraphEntry]:
    return [g for g in model.graphs if g.ops == ops and g.length is not None]


def _run(graph: OrtModel, model: ModelEntry, ops: str) -> dict[str, Outputs]:
    """Return the outputs of `decoder` for all tokens, and for the passes of each fixed shape."""
    tokens = _tokens(model)
    graph.truncate(0)
    outputs: dict[str, Outputs] = {
        "decoder": (graph.forward(tokens).array().copy(), graph.cache_rows(0, len(tokens)))
    }
    for entry in _fixed_shapes(model, ops):
        outputs[entry.name] = _passes(graph, model, entry, tokens)
    return outputs


def _passes(graph: OrtModel, model: ModelEntry, entry: GraphEntry, tokens: list[int]) -> Outputs:
    """Run two consecutive passes of a fixed length."""
    assert entry.length is not None
    count = max(1, min(2, len(tokens) // entry.length)) * entry.length
    fed = (tokens * entry.length)[:count]
    logits = []
    graph.truncate(0)
    for start in range(0, count, entry.length):
        part = fed[start : start + entry.length]
        if model.signatures[entry.signature].logits:
            logits.append(graph.forward(part).array().copy())
        else:
            graph.prefill(part)
    return np.concatenate(logits) if logits else None, graph.cache_rows(0, count)


def _relative(outputs: Outputs, expected: Outputs) -> float:
    """Return the largest difference relative to the largest value of its output."""
    pairs = [*zip(outputs[1], expected[1], strict=True)]
    if outputs[0] is not None and expected[0] is not None:
        pairs.append((outputs[0], expected[0]))
    return max(distance(a, b) / size(b) for a, b in pairs)


def _relative_square(outputs: Outputs, expected: Outputs) -> float:
    """Return the root mean square of the differences of logits relative to that of the logits."""
    actual, values = outputs[0], expected[0]
    assert actual is not None
    assert values is not None
    return float(np.linalg.norm(actual - values) / np.linalg.norm(values))


def _list(lengths: list[int]) -> str:
    return ", ".join(map(str, lengths)) or "no"
