"""Accuracy of quantized graphs on texts, relative to their float graphs."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specedge.bundle.graph_variants import attention_ops, cache_dtype, has_int8_caches
from specedge.bundle.reports import QuantizationReport
from specedge.errors import ExportError

from ..progress import Progress
from ..verification import checks
from ..verification.runner import Action, FillNoise, PassAction, ReadRows, RepeatRows, Runner
from .cache_scales import check_scales
from .float_model import FloatModel, VariantReport
from .schemes import Scheme
from .texts import CalibrationTexts

MAX_OUTPUTS = 1 << 28  # logits and cache values of the float model that are in memory at once
STRIP_SIZE = 1 << 20  # logits per comparison of distributions, to stay in the CPU's cache
NUM_SAMPLE_TOKENS = 96  # tokens of graph variants that share integers with a fully measured one
NUM_LATE_TOKENS = 64  # tokens of the window at the end of the context
MAX_LATE_RATIO = 3.0  # maximum divergence of the late window relative to the texts,
MIN_LATE_DIVERGENCE = 0.0001  # plus this many nats; 16-bit ALiBi had 0.0003

SchemeMap = Mapping[tuple[int, ...], Scheme]


def measure_variants(
    model: FloatModel,
    folder: Path,
    graph_variants: Mapping[str, SchemeMap],
    texts: CalibrationTexts,
    progress: Progress,
) -> dict[str, VariantReport]:
    """Compare quantized graph variants with the float graph, and check their batch invariance.

    One graph variant of each compute and cache type, with GroupQueryAttention if possible, is
    measured on all texts, others on `NUM_SAMPLE_TOKENS` tokens, since they share the integers.
    Graph variants without kernels on this machine are only loaded.

    Args:
        model: Float model.
        folder: Folder of the quantized graphs.
        graph_variants: Schemes of all groups, by graph variant.
        texts: Texts to compare on.
        progress: Receives notes.

    Raises:
        ExportError: Values overflow a graph variant's type, or the scales of its caches are wrong.
    """
    graphs: dict[str, MeasuredGraph] = {}
    for ops in graph_variants:
        runner = model.runner(folder, ops)
        if runner.can_run():
            graphs[ops] = MeasuredGraph(runner)
            if has_int8_caches(ops):
                _check_int8_caches(model, graphs[ops], texts.evaluation[0][:NUM_SAMPLE_TOKENS])
                graphs[ops].factors = model.cache_scales
        else:
            progress.note(
                f"{model.role} ({ops}): not run, as ONNX Runtime has no {cache_dtype(ops)} "
                "kernels on this machine"
            )
    by_preference = sorted(graphs, key=lambda ops: attention_ops(ops) == "gqa")
    primary = {_type_suffix(ops): graphs[ops] for ops in by_preference}
    others = [graph for ops, graph in graphs.items() if graph is not primary[_type_suffix(ops)]]
    reference = (model.original or model).decoder_runner(model.ops[-1])
    measure_distances(reference, [*primary.values()], texts.evaluation, model.head)
    measure_distances(reference, others, [texts.evaluation[0][:NUM_SAMPLE_TOKENS]], model.head)
    described: dict[str, VariantReport] = {}
    for ops, choices in graph_variants.items():
        if ops in graphs:
            graph, near = graphs[ops], primary[_type_suffix(ops)].near
            graph.near.error = max(graph.near.error, near.error)
            described[ops] = _build_report(model, ops, graph, texts, choices, progress)
        else:
            described[ops] = _quantization_report(LogitDistance(), texts, choices), ()
    return described


def _check_int8_caches(model: FloatModel, graph: MeasuredGraph, text: np.ndarray) -> None:
    """Compare int8 caches with those of the same weights in float32. Raises ExportError."""
    runner = graph.runner
    plain = model.runner(runner.folder, attention_ops(runner.ops))
    name = f"{model.role} ({runner.ops})"
    check_scales(name, runner, model.cache_scales, plain, text)


def _type_suffix(ops: str) -> str:
    """Return the type suffix of a graph variant's name."""
    return ops.removeprefix(attention_ops(ops))


def _build_report(
    model: FloatModel,
    ops: str,
    graph: MeasuredGraph,
    texts: CalibrationTexts,
    choices: SchemeMap,
    progress: Progress,
) -> VariantReport:
    """Build the report of a measured graph variant, and check its batch invariance."""
    name, near, late = f"{model.role} ({ops})", graph.near, graph.late
    numbers = (distance.loss + distance.divergence + distance.error for distance in (near, late))
    if not math.isfinite(sum(numbers)):
        raise ExportError(
            f"{name}: some values exceed the range of {cache_dtype(ops)}; omit --compute and "
            "--cache, or compute in another type"
        )
    invariant, differing = checks.check_standalone(graph.runner, np.concatenate(texts.evaluation))
    if differing:
        progress.note(f"{name}: {', '.join(differing)} are not bitwise equal to the decoder")
    described = _quantization_report(near, texts, choices)
    if model.is_self_draft:  # the perplexity of an early exit is not meaningful
        described = replace(described, perplexity=0.0, original_perplexity=0.0)
    if late_note := _describe_late(near, late, graph.runner.geometry.context_length):
        described = replace(described, exceptions=(*described.exceptions, late_note))
        progress.note(f"{name}: {late_note}")
    return described, invariant


def _describe_late(near: LogitDistance, late: LogitDistance, context_length: int) -> str | None:
    """Return a note if late positions are much less accurate than the texts, else None."""
    of_near, of_late = (
        distance.divergence / max(1, distance.num_tokens) for distance in (near, late)
    )
    if not late.num_tokens or of_late <= MAX_LATE_RATIO * of_near + MIN_LATE_DIVERGENCE:
        return None
    return (
        f"near position {context_length} the KL divergence is {of_late:.2g}, near the beginning "
        f"{of_near:.2g}: position-dependent values are inaccurate"
    )


def _quantization_report(
    distance: LogitDistance, texts: CalibrationTexts, choices: Mapping[tuple[int, ...], Scheme]
) -> QuantizationReport:
    schemes = choices.values()
    count, scored = max(1, distance.num_tokens), max(1, distance.num_scored)
    return QuantizationReport(
        text=texts.name,
        num_tokens=distance.num_tokens,
        perplexity=_perplexity(distance.loss / scored),
        original_perplexity=_perplexity(distance.original_loss / scored),
        agreement=distance.num_same / count,
        divergence=max(0.0, distance.divergence / count),
        error=distance.error,
        num_cut=sum(scheme.num_parts > 1 for scheme in schemes),
        num_left=sum(scheme.num_parts == 0 for scheme in schemes),
        num_in_blocks=sum(scheme.bits > 0 for scheme in schemes),
        product_error=max((scheme.error for scheme in schemes), default=0.0),
        plain_product_error=max((scheme.plain_error for scheme in schemes), default=0.0),
        exceptions=tuple(scheme.reason for scheme in schemes if scheme.reason),
    )


def _perplexity(loss: float) -> float:
    """Return the perplexity of a mean loss in nats, at most the largest float."""
    return math.exp(min(loss, math.log(sys.float_info.max)))


@dataclass
class LogitDistance:
    """Distance of two models' outputs, summed over tokens.

    Losses are in nats over the `num_scored` tokens that the logits have a column for. `error` is
    the largest difference of a logit or cache value, relative to the largest value.
    """

    loss: float = 0.0  # cross-entropy of the measured model in nats
    original_loss: float = 0.0
    divergence: float = 0.0  # KL divergence of the measured model from the original in nats
    num_same: int = 0  # tokens with equal most likely tokens
    num_tokens: int = 0
    num_scored: int = 0
    error: float = 0.0

    def add(
        self, logits: np.ndarray, expected: np.ndarray, tokens: np.ndarray, head: np.ndarray | None
    ) -> None:
        """Add a text's logits, 2 * [T, n], and its tokens, [T].

        Column j is token head[j], or token j.
        """
        step = max(1, STRIP_SIZE // logits.shape[1])
        for at in range(0, len(tokens) - 1, step):
            rows = slice(at, min(at + step, len(tokens) - 1))
            self._add(logits[rows], expected[rows], tokens[rows.start + 1 : rows.stop + 1], head)
        self.compare(logits, expected)

    def _add(
        self, logits: np.ndarray, expected: np.ndarray, columns: np.ndarray, head: np.ndarray | None
    ) -> None:
        """Add some rows of logits, 2 * [t, n], and the next tokens, [t]."""
        x, exact_x = torch.from_numpy(logits), torch.from_numpy(expected)
        _, normalizers = _exponentials(x)
        weights, exact_normalizers = _exponentials(exact_x)
        differences = (weights * (exact_x - x)).sum(1, dtype=torch.float64)
        differences /= weights.sum(1, dtype=torch.float64)
        self.divergence += float((differences - exact_normalizers + normalizers).sum())
        rows = np.arange(len(columns))
        self.num_tokens += len(columns)
        if head is not None:
            rows = np.flatnonzero(np.isin(columns, head))
            order = head.argsort()
            columns = order[head.searchsorted(columns[rows], sorter=order)]
        targets = rows, columns
        self.loss += float((normalizers[rows] - x[targets]).sum())
        self.original_loss += float((exact_normalizers[rows] - exact_x[targets]).sum())
        self.num_same += int((logits.argmax(1) == expected.argmax(1)).sum())
        self.num_scored += len(rows)

    def compare(self, values: np.ndarray, expected: np.ndarray) -> None:
        """Update the largest difference of an output, relative to its largest value."""
        exact = torch.from_numpy(expected)
        largest = (torch.from_numpy(values) - exact).abs().max() / exact.abs().max().clamp(1e-30)
        # Not `max`, which may ignore NaN.
        self.error = float(np.maximum(self.error, float(largest)))


def _exponentials(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return exponentials relative to a row's largest, [T, V], and normalizers in float64, [T]."""
    largest = logits.max(1, keepdim=True).values
    weights = (logits - largest).exp()
    return weights, largest[:, 0].double() + weights.sum(1, dtype=torch.float64).log()


@dataclass
class MeasuredGraph:
    """Quantized graph, and its distances from the float graph.

    Attributes:
        runner: Runner of the graph.
        factors: Scales [H, 1, D] of int8 caches, by name.
        near: Distance on the texts.
        late: Distance at the end of the context.
    """

    runner: Runner
    factors: Mapping[str, np.ndarray] = field(default_factory=dict)
    near: LogitDistance = field(default_factory=LogitDistance)
    late: LogitDistance = field(default_factory=LogitDistance)


def measure_distances(
    original: Runner,
    graphs: Sequence[MeasuredGraph],
    texts: Sequence[np.ndarray],
    head: np.ndarray | None = None,
) -> None:
    """Compare graphs with a float graph on independent texts, [T] each.

    Late positions are compared if the texts do not reach the end of the context. `head` [n] are the
    tokens of the logits' columns.
    """
    if not graphs:
        return
    names = original.geometry.cache_names()
    text = texts[-1][:NUM_LATE_TOKENS]
    start = original.geometry.context_length - len(text)
    window = LateWindow(text, start) if start >= max(map(len, texts)) else None
    size = max(1, MAX_OUTPUTS // (original.geometry.num_outputs * max(map(len, texts))))
    for at in range(0, len(texts), size):
        part = texts[at : at + size]
        late = window if at + size >= len(texts) else None
        expected, expected_caches = _run(original, part, late, packed=False)
        for graph in graphs:
            distances = [*[graph.near] * len(part), graph.late]
            tokens = [*part, text]  # the window's are last
            add = partial(_add_logits, distances, expected, tokens, head)
            _, all_caches = _run(graph.runner, part, late, then=add)
            for caches, exact_caches in zip(all_caches, expected_caches, strict=True):
                for cache, rows, exact_rows in zip(names, caches, exact_caches, strict=True):
                    graph.near.compare(rows * graph.factors.get(cache, 1), exact_rows)


def _add_logits(
    distances: Sequence[LogitDistance],
    expected: Sequence[np.ndarray],
    texts: Sequence[np.ndarray],
    head: np.ndarray | None,
    i: int,
    logits: np.ndarray,
) -> None:
    """Add the logits of text i, [T, V], to its distance."""
    distances[i].add(logits, expected[i], texts[i], head)


@dataclass(frozen=True)
class LateWindow:
    """Tokens [T] at a late position, after repeated cache rows of a text."""

    text: np.ndarray
    start: int


def compute_logits(
    runner: Runner, texts: Sequence[np.ndarray], sources: Sequence[np.ndarray] | None = None
) -> list[np.ndarray]:
    """Return the logits of independent texts. [T] each -> [T, V] each

    `sources` [N] are those of an encoder-decoder, by default the texts themselves.
    """
    logits, _ = _run(runner, texts, sources=sources)
    return logits


def _run(
    runner: Runner,
    texts: Sequence[np.ndarray],
    late: LateWindow | None = None,
    packed: bool = True,
    then: Callable[[int, np.ndarray], Any] = lambda i, logits: logits,
    sources: Sequence[np.ndarray] | None = None,
) -> tuple[list[Any], list[list[np.ndarray]]]:
    """Return `then(i, logits)` of each text, and last of a late window, and caches of each text.

    Logits are [T, V], caches [H, T, D]. Cache rows before the window are each model's own. Weights
    are prepacked, without which ONNX Runtime does not quantize the inputs of MatMulNBits; those of
    a float graph need not be.
    """
    actions: list[Action] = []
    for i, (text, source) in enumerate(zip(texts, sources or texts, strict=True)):
        after = partial(then, i)
        actions += [
            FillNoise(0, runner.geometry.capacity),
            PassAction("decoder", text, 0, packed=packed, then=after, source=source),
            ReadRows(0, len(text)),
        ]
    if late is not None:
        after, source = partial(then, len(texts)), sources[-1] if sources else late.text
        actions += [
            RepeatRows(len(texts[-1]), late.start),
            PassAction("decoder", late.text, late.start, packed=packed, then=after, source=source),
        ]
    _, *results = runner.run(actions)
    return results[::3], results[1::3]
