"""Quantization of a model's float graphs, with a report."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch

from specedge.bundle.graph_variants import (
    INT8_CACHES,
    attention_ops,
    has_compute_type,
    has_int8_caches,
    is_qdq,
)
from specedge.bundle.manifest import FUSE, FileEntry, ModelEntry
from specedge.bundle.precision import BLOCK_BITS, GPTQ, KEEP
from specedge.bundle.reports import QuantizationReport
from specedge.errors import ExportError, ParityError

from ..checkpoint.quantized_tensors import QuantizedTensor
from ..graph import rewrites
from ..graph.external_data import FILE, LazyWeights
from ..progress import Progress
from ..verification.fused_states import FusedStates
from . import cache_scales, calibration, gptq, rotation_rewriter, schemes
from .calibration import InputStatistics
from .dequantize_rewriter import DequantizeRewriter, QdqRewriter
from .experts import NO_EXCLUSIONS, ExcludedWeights, expert_layers, find_excluded
from .float_model import FloatModel
from .integer_rewriter import IntegerRewriter, num_columns
from .kept_schemes import KeptWeights, rows_to_keep
from .matrices import (
    Matrix,
    MatrixGroup,
    embeddings,
    matrix_groups,
    stored_tensor,
    ungrouped_weights,
)
from .report import measure_variants
from .rounding import BLOCK_SIZE, IntegerMatrix
from .schemes import Scheme
from .texts import CalibrationTexts
from .weights_writer import WeightsWriter

ROTATED_PRECISIONS = ("int8", "int4")  # precisions that a rotation makes more accurate
# KL divergence in nats per token above which a target is refused; SmolLM2-135M has 0.0034 in int8
# and 0.085 in int4.
MAX_DIVERGENCE = {"int8": 0.2, "int8-block": 0.2, KEEP: 0.2, "int4": 2.0}
Schemes = dict[tuple[int, ...], Scheme]


def quantize(
    models: dict[str, ModelEntry],
    folder: Path,
    precision: str,
    texts: CalibrationTexts,
    head: np.ndarray | None,
    progress: Progress,
    suffixes: Sequence[str],
    rounding: str,
    bits: float,
    tensors: Sequence[QuantizedTensor],
    lazy: LazyWeights,
    fused: FusedStates | None = None,
) -> tuple[list[ModelEntry], FileEntry]:
    """Quantize models that share a folder.

    A second model is a self-draft of the first one, with whose layers it shares schemes.

    Args:
        models: Entries by role.
        folder: Folder of the float graphs, which the quantized graphs replace.
        precision: A quantized precision.
        texts: Texts for calibration and report.
        head: Tokens of the last model's logits, if reduced.
        progress: Receives notes and the durations of steps.
        suffixes: Suffixes of further graph variants, which dequantize weights or have caches of 8
            or 16 bits.
        rounding: One of `specedge.bundle.precision.ROUNDINGS`, which is "nearest" for int8-block.
        bits: Average bits per weight of int4 in layers.
        tensors: The checkpoint's quantized weights, for the precision "keep".
        lazy: Weights by offset in the weights file, which lacks those of a large model.
        fused: Hidden states of the texts that a draft model reads.

    Returns:
        The entries, and the entry of the weights file.
    """
    before = folder.with_name(f"{folder.name}.float")
    folder.rename(before)
    folder.mkdir()
    for path in before.iterdir():
        if path.suffix != ".onnx" and path.name != FILE:
            shutil.copy2(path, folder)
    parts = [
        FloatModel(role, model, before, is_self_draft=i > 0, lazy=lazy, fused=fused)
        for i, (role, model) in enumerate(models.items())
    ]
    parts[-1] = replace(parts[-1], head=head)
    first = parts[0].role
    work = folder.with_name(f"{folder.name}.transformed")
    work.mkdir()
    excluded = _find_excluded(parts)
    kept = KeptWeights(tensors, rows_to_keep(lazy)) if precision == KEEP else None
    group_schemes: Schemes = {}
    if kept is not None:
        for part in parts:
            graph = part.load(part.ops[0], excluded).graph
            group_schemes |= kept.select(graph, excluded)
    else:
        parts, excluded, group_schemes = _calibrate(
            parts, work, excluded, precision, texts, rounding, bits, progress
        )
    other_schemes = _other_schemes(parts, precision, texts, kept, progress)
    parts = _with_cache_scales(parts, suffixes, texts, progress)
    with WeightsWriter(folder) as store, progress.step(f"Quantizing the {first}"):
        for part in parts:
            for ops in part.reduced_variants(precision, suffixes):
                quantize_graph = partial(_quantize_graph, ops, precision, kept)
                graph_model = part.load(ops, excluded)
                quantize_graph(store.reading(part.folder), group_schemes, excluded, graph_model)
                part.write(graph_model, folder, ops)
                other_store = store.reading(part.other_folder)
                change = partial(quantize_graph, other_store, other_schemes, NO_EXCLUSIONS)
                part.write_others(folder, ops, change)
    if kept is not None and kept.offset_error:
        progress.note(
            f"{first}: QMoE has no offsets; offsets of experts are rounded to zero points, with a "
            f"relative error of the weights of up to {kept.offset_error:.2%}"
        )
    entries = []
    fields = {"bits_per_weight": 8 * store.file.size / parts[0].model.num_parameters}
    for part in parts:
        with progress.step(f"Comparing the {part.role} in {precision}"):
            choices = {
                ops: {
                    **group_schemes,
                    **_unquantized_schemes(part, ops, excluded),
                    # Their offsets may be those of another weights file.
                    **{(-1, *key): scheme for key, scheme in other_schemes.items()},
                }
                for ops in part.reduced_variants(precision, suffixes)
            }
            types = {} if kept is None else kept.types()
            entry = _compare(
                part, precision, folder, choices, texts, progress, types=types, **fields
            )
        entries.append(entry)
    shutil.rmtree(work)
    shutil.rmtree(before)
    return entries, store.file


def _calibrate(
    parts: list[FloatModel],
    work: Path,
    excluded: ExcludedWeights,
    precision: str,
    texts: CalibrationTexts,
    rounding: str,
    bits: float,
    progress: Progress,
) -> tuple[list[FloatModel], ExcludedWeights, Schemes]:
    """Rotate models and select their schemes; return both, and the weights in no group."""
    first = parts[0].role

    def select(models: list[FloatModel], excluded: ExcludedWeights) -> Schemes:
        with progress.step(f"Calibrating the {first}"):
            selector = SchemeSelector(precision, rounding, bits, texts.calibration, excluded, work)
            selected = Schemes()
            for model in models:
                selected |= selector.select(model, selected)
            return selected

    if precision in ROTATED_PRECISIONS and parts[0].model.num_experts:
        progress.note(f"{first}: it is a mixture of experts, so it is not rotated")
    elif precision in ROTATED_PRECISIONS:
        try:
            with progress.step(f"Rotating the {first}"):
                changed, chosen = rotation_rewriter.write_models(parts, work, excluded)
            still_excluded = _find_excluded(changed) if chosen.reason else excluded
            group_schemes = select(changed, still_excluded)
            if chosen.reason:
                progress.note(
                    f"{first}: its residual stream is not rotated, because {chosen.reason}"
                )
            return changed, still_excluded, group_schemes
        except ParityError as error:
            progress.note(
                f"{first}: it is not rotated, because the rotated graph differs ({error})"
            )
            excluded = _find_excluded(parts)
    return parts, excluded, select(parts, excluded)


def _other_schemes(
    parts: Sequence[FloatModel],
    precision: str,
    texts: CalibrationTexts,
    kept: KeptWeights | None,
    progress: Progress,
) -> Schemes:
    """Return the schemes of graphs without caches: encoders, constant states, fused states."""
    group_schemes = Schemes()

    def visit(part: FloatModel, file: str, group: MatrixGroup, x: InputStatistics) -> None:
        if file == FUSE:
            choice = _fuse_scheme(group, x)
        else:
            choice = _scheme(group, x, precision, part.model, is_tied=False)
        tensors = [matrix.stored.tensor for matrix in group.matrices]
        group_schemes[group.key] = schemes.with_names(choice, tensors)

    for part in parts:
        if kept is not None:
            for file in part.other_files:
                group_schemes |= kept.select(part.load_other(file).graph, NO_EXCLUSIONS)
        elif part.other_files:
            with progress.step(f"Calibrating the {part.role}"):
                calibration.visit_other_inputs(part, texts.calibration, partial(visit, part))
    return group_schemes


def _fuse_scheme(group: MatrixGroup, x: InputStatistics) -> Scheme:
    """Return 8-bit blocks, in any precision, for a matrix that fuses hidden states.

    Blocks separate channels of hidden states that are hundreds of times as large as others.
    """
    if group.matrices[0].stored.shape[0] % BLOCK_SIZE:
        return schemes.unquantized(f"its inputs are not a multiple of {BLOCK_SIZE}")
    return schemes.block_scheme(group, x, 8)


def _with_cache_scales(
    parts: list[FloatModel],
    suffixes: Sequence[str],
    texts: CalibrationTexts,
    progress: Progress,
) -> list[FloatModel]:
    """Return models with scales of int8 caches, if one of the suffixes is theirs."""
    if INT8_CACHES not in suffixes:
        return parts
    with progress.step(f"Calibrating caches of the {parts[0].role}"):
        return [
            replace(part, cache_scales=cache_scales.measure_scales(part, texts.caches))
            for part in parts
        ]


def _find_excluded(parts: Sequence[FloatModel]) -> ExcludedWeights:
    """Return the weights of routers and experts in all graphs of the models."""
    graphs = (part.load(ops).graph for part in parts for ops in part.ops)
    return find_excluded(graphs, parts[0].model.num_experts)


def _compare(
    part: FloatModel,
    precision: str,
    folder: Path,
    choices: Mapping[str, Schemes],
    texts: CalibrationTexts,
    progress: Progress,
    **fields: Any,
) -> ModelEntry:
    """Measure quantized graphs; return the model's entry with reports that have these fields.

    Raises:
        ExportError: The target's KL divergence exceeds the limit of the precision.
    """
    measured = measure_variants(part, folder, choices, texts, progress)
    for ops, (report, _) in measured.items():
        _check_divergence(part, ops, report, precision, "specify another --precision")
    reports = {
        ops: (replace(report, **fields), invariant) for ops, (report, invariant) in measured.items()
    }
    return part.with_reports(reports, precision)


def _check_divergence(
    part: FloatModel, ops: str, report: QuantizationReport, precision: str, advice: str
) -> None:
    """Raise ExportError if the target's KL divergence exceeds the limit of a precision."""
    if part.role == "target" and report.divergence > (limit := MAX_DIVERGENCE[precision]):
        raise ExportError(
            f"target ({ops}): its KL divergence in {precision} is {report.divergence:.2g} nats "
            f"per token, the limit is {limit:g}; {advice}"
        )


def add_variants(
    suffixes: Sequence[str],
    models: dict[str, ModelEntry],
    folder: Path,
    texts: CalibrationTexts,
    head: np.ndarray | None,
    progress: Progress,
    fused: FusedStates | None = None,
) -> list[ModelEntry]:
    """Add graph variants of other types, named by suffix, to models that share a folder.

    `head` are the tokens of the last model's logits, if reduced, and `fused` hidden states of the
    texts that a draft model reads.
    """
    parts = [FloatModel(role, model, folder, fused=fused) for role, model in models.items()]
    parts[-1] = replace(parts[-1], head=head)
    entries = []
    for part in _with_cache_scales(parts, suffixes, texts, progress):
        dtype = part.model.weights_dtype
        graph_variants = part.reduced_variants(dtype, suffixes)
        with progress.step(f"Adding graph variants of the {part.role}"):
            for ops in graph_variants:
                part.write(ir.load(part.decoder(ops)), folder, ops)
                part.write_others(folder, ops)
        with progress.step(f"Comparing graph variants of the {part.role}"):
            measured = measure_variants(
                part, folder, {ops: {} for ops in graph_variants}, texts, progress
            )
        for ops, (report, _) in measured.items():
            if has_int8_caches(ops):
                _check_divergence(part, ops, report, "int8", "omit --cache")
        entries.append(part.with_reports(measured, dtype))
    return entries


@dataclass(frozen=True)
class SchemeSelector:
    """Selector of the schemes of groups, equal in all graph variants, by calibration.

    Experts of MoE nodes are block-wise in every precision; other stacked matrices and tied LM heads
    are per-channel; an untied head is in 4-bit blocks if that is accurate. Matrices are rounded as
    soon as their scheme is selected, and stored in `folder`.
    """

    precision: str
    rounding: str
    bits: float
    texts: Sequence[np.ndarray]
    excluded: ExcludedWeights
    folder: Path

    def select(self, model: FloatModel, selected: Container[tuple[int, ...]]) -> Schemes:
        """Return the schemes of a model's groups that are not `selected` yet.

        Raises:
            ParityError: A model in another basis differs from its original.
        """
        ops, excluded = model.ops[0], self.excluded.offsets
        graph = model.load(ops, self.excluded).graph
        new = {
            group.key: group
            for group in matrix_groups(graph, excluded)
            if group.key not in selected
        }
        layers = {
            layer.experts.key: layer.experts
            for layer in expert_layers(graph, self.excluded)
            if layer.experts.key not in selected
        }
        checks = [] if model.original is None else rotation_rewriter.equivalence_actions(model)
        for name in model.ops if not new and not layers else model.ops[1:]:
            if checks:
                results = model.decoder_runner(name).run(checks)
                rotation_rewriter.check_outputs(model, name, results)
        if not new and not layers:
            return {}
        tables = {stored.offset for _, stored in embeddings(graph)}
        group_schemes: Schemes = {key: schemes.unquantized("it reads a cache") for key in new}
        in_eight_bits = self._eight_bit_groups(list(new.values()), model.model)

        def visit(key: tuple[int, ...], x: InputStatistics) -> None:
            if key in layers:
                choice = schemes.expert_scheme(layers[key], x, BLOCK_BITS.get(self.precision, 8))
                group_schemes[key] = schemes.with_names(choice, layers[key].names)
                return
            group = new[key]
            is_tied = bool(tables & {*key})
            precision = "int8-block" if key in in_eight_bits else self.precision
            choice = _scheme(group, x, precision, model.model, is_tied)
            if not is_tied:
                choice = replace(choice, integers=self._round(group, x.hessian, choice))
            group_schemes[key] = schemes.with_names(
                choice, [matrix.stored.tensor for matrix in group.matrices]
            )

        results = calibration.visit_inputs(
            model, ops, self.texts, visit, self.excluded, self.rounding == GPTQ,
            new.keys() | layers.keys(), checks,
        )  # fmt: skip
        if checks:
            rotation_rewriter.check_outputs(model, ops, results)
        return group_schemes

    def _eight_bit_groups(
        self, all_groups: list[MatrixGroup], model: ModelEntry
    ) -> set[tuple[int, ...]]:
        """Return the groups that int4 quantizes to 8 bits.

        Attention's input projections first, then MLPs' down projections, of as many evenly spaced
        layers as keep the weights in layers at `bits` on average. Per additional bit, the former
        reduce the KL divergence of SmolLM2-135M 1.6 times as much.
        """
        if self.precision != "int4":
            return set()
        in_layers = [
            group
            for group in all_groups
            if all(num_columns(matrix) != model.padded_vocab_size for matrix in group.matrices)
        ]
        budget = (self.bits - 4) / 4 * sum(map(_num_weights, in_layers))
        selected: set[tuple[int, ...]] = set()
        for is_of_type in (_projects_to_attention, rotation_rewriter.reads_nonlinearity):
            groups = [group for group in in_layers if is_of_type(group)]
            largest = max(map(_num_weights, groups), default=1)
            count = int(min(len(groups), budget / largest))
            selected |= {groups[i * len(groups) // count].key for i in range(count)}
            budget -= count * largest
        return selected

    def _round(
        self, group: MatrixGroup, hessian: torch.Tensor | None, choice: Scheme
    ) -> dict[int, IntegerMatrix]:
        """Round a group's matrices, unless they are stacked or split along K.

        With a Hessian, they are rounded together by GPTQ if per-channel or in 4-bit blocks.
        """
        matrices = [matrix for matrix in group.matrices if len(matrix.stored.order) == 2]
        if choice.num_parts != 1 or not matrices:
            return {}
        rounded: Iterator[IntegerMatrix]
        if hessian is None or choice.bits == 8:
            rounded = (schemes.round_to_nearest(m.stored.data(), choice) for m in matrices)
        else:
            rounded = _round_by_gptq(matrices, hessian, choice)
        integers: dict[int, IntegerMatrix] = {}
        for matrix, part in zip(matrices, rounded, strict=True):
            path = self.folder / f"{matrix.offset}.npy"
            np.save(path, part.values)
            integers[matrix.offset] = IntegerMatrix(np.load(path, mmap_mode="c"), part.scales)
        return integers


def _round_by_gptq(
    matrices: Sequence[Matrix], hessian: torch.Tensor, choice: Scheme
) -> Iterator[IntegerMatrix]:
    """Yield matrices that are rounded together by GPTQ."""
    factor = gptq.inverse_factor(hessian)
    weights = torch.cat([matrix.stored.data().float() for matrix in matrices], 1)
    ends = np.cumsum([matrix.stored.shape[1] for matrix in matrices])[:-1]
    if choice.bits:
        rounded = gptq.quantize_blocks(weights, factor, choice.bits)
    else:
        rounded = gptq.quantize_columns(weights, factor)
    arrays = (np.split(x, ends, 0 if choice.bits else 1) for x in (rounded.values, rounded.scales))
    return itertools.starmap(IntegerMatrix, zip(*arrays, strict=True))


def _num_weights(group: MatrixGroup) -> int:
    return sum(matrix.stored.tensor.size for matrix in group.matrices)


def _projects_to_attention(group: MatrixGroup) -> bool:
    """Return True if an attention node reads a product of the group."""
    pending = [matrix.node for matrix in group.matrices]
    seen = set(pending)
    while pending:
        for output in pending.pop().outputs:
            for user, _ in output.uses():
                if user.op_type in ("Attention", "GroupQueryAttention"):
                    return True
                is_product = user.op_type == "MatMul" and stored_tensor(user.inputs[1]) is not None
                if user not in seen and not is_product:
                    seen.add(user)
                    pending.append(user)
    return False


def _unquantized_schemes(model: FloatModel, ops: str, excluded: ExcludedWeights) -> Schemes:
    """Return schemes of weights that belong to no group, and so are not quantized.

    Only the first scheme of each kind has a reason, which names all of its weights.
    """
    group_schemes: Schemes = {}
    rounded = {offset for experts in excluded.experts for offset in experts.key}
    graph = model.load(attention_ops(ops), excluded).graph
    for op_type, tensors in ungrouped_weights(graph, excluded.offsets, rounded).items():
        for is_router, reason in (
            (True, "it is a router"),
            (False, f"{op_type} nodes read it in another layout"),
        ):
            some = [t for t in tensors if (t.offset in excluded.routers) == is_router]
            scheme = schemes.with_names(schemes.unquantized(reason), some)
            for tensor in some:
                group_schemes[tensor.offset or 0,] = scheme
                scheme = replace(scheme, reason="")
    return group_schemes


def _scheme(
    group: MatrixGroup,
    x: InputStatistics,
    precision: str,
    model: ModelEntry,
    is_tied: bool,
) -> Scheme:
    """Return the scheme of a group with input x in a precision."""
    shapes = [matrix.stored.shape for matrix in group.matrices]
    is_plain = all(len(shape) == 2 for shape in shapes)
    in_layers = is_plain and all(shape[-1] != model.padded_vocab_size for shape in shapes)
    if precision in BLOCK_BITS and in_layers:
        return schemes.block_scheme(group, x, BLOCK_BITS[precision])
    if precision == "int8-block" and is_plain and shapes[0][0] % BLOCK_SIZE == 0:
        return schemes.block_scheme(group, x, 8)
    if precision == "int4" and not is_tied and len(shapes) == 1 and len(shapes[0]) == 2:
        return schemes.head_scheme(group, x)
    return schemes.per_channel_scheme(group, x, is_tied)


def _quantize_graph(
    ops: str,
    precision: str,
    kept: KeptWeights | None,
    store: WeightsWriter,
    group_schemes: Schemes,
    excluded: ExcludedWeights,
    graph_model: ir.Model,
) -> None:
    """Quantize a float graph for a graph variant, in place; its weights go to `store`."""
    graph = graph_model.graph
    tables = dict(embeddings(graph))
    all_groups = matrix_groups(graph, excluded.offsets)
    rounded = {offset for g in all_groups if group_schemes[g.key].num_parts for offset in g.key}
    table_offsets = {table.offset for table in tables.values()}
    rewriter_class = DequantizeRewriter if has_compute_type(ops) else IntegerRewriter
    rewriter_class = QdqRewriter if is_qdq(ops) else rewriter_class
    blocks = {p for g in all_groups if group_schemes[g.key].bits == 8 for p in g.key}
    if precision == "int8-block":
        blocks |= {
            table.offset
            for table in tables.values()
            if table.tensor.shape.numpy()[1] % BLOCK_SIZE == 0
        }
    kept_tables = None if kept is None else kept.tables(graph)
    rewriter = rewriter_class(graph, store, table_offsets, blocks & table_offsets, kept_tables)
    for group in all_groups:
        rewriter.group(group, group_schemes[group.key])
    for mixture in expert_layers(graph, excluded):
        rewriter.experts(mixture, group_schemes[mixture.experts.key])
    heads = {offset for g in all_groups for offset in g.key}
    for node, stored in tables.items():
        if stored.offset in rounded or stored.offset not in heads:
            rewriter.embedding(node, stored)
    rewrites.fuse_sigmoids(graph_model)
    passes.RemoveUnusedNodesPass()(graph_model)
    store.adopt(graph)
