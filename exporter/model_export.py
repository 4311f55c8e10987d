"""Export of one model: load, trace, write, and verify against PyTorch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import onnx_ir as ir
import torch

from specedge.bundle import pack_ids
from specedge.bundle.graph_variants import OPS
from specedge.bundle.manifest import (
    ENCODER,
    FUSE,
    OPEN,
    CheckpointSource,
    FileEntry,
    ModelEntry,
    signatures,
)
from specedge.bundle.precision import DTYPE, KEEP, QUANTIZED_DTYPES
from specedge.bundle.reports import ParityReport
from specedge.errors import ExportError

from .checkpoint import draft_vocabulary, licenses, loader, self_draft
from .checkpoint.checkpoints import Checkpoint
from .checkpoint.decoder_layers import truncate
from .checkpoint.draft_heads import DraftHeadModule
from .checkpoint.encoder_decoder import SourceConditionedDecoder
from .checkpoint.loader import LoadedCheckpoint
from .checkpoint.placeholders import WeightSources
from .graph import graphs, rewrites
from .graph.external_data import FILE, LazyWeights, WeightsFile, WeightTensor
from .graph.joined_products import join_attention_products
from .graph.lm_head import add_logits_from
from .graph.opset import save_graph
from .graph.rewrites import remove_transposes
from .libraries import first_line
from .progress import Progress
from .request import FULL, ExportRequest
from .tracing import geometry, tracer, uncached_graphs
from .tracing.geometry import Geometry
from .tracing.module_patches import freeze_rotary, patched_modules
from .tracing.tracer import ObservedLayers
from .verification import checks, parity, reference, runner
from .verification.fused_states import FusedStates, sample_states
from .verification.reference import Reference
from .verification.runner import Runner
from .verification.source_states import SourceStates, compute_source_states, encoder_digest
from .verification.uncached_parity import verify_uncached

T = TypeVar("T")
REJECTION = "; it cannot be exported in "
IDS_FILE = "ids.bin"


@dataclass(frozen=True)
class ModelExport:
    """Model that is being exported; rows of its vocabulary from `num_tokens` on are padding.

    `lazy` are the weights of a model that is quantized later, by offset in the weights file, which
    lacks those of a large one; None for another model, of which attention's products become one.
    An encoder-decoder that `shares_encoder` has that of the target.
    """

    role: str
    loaded: LoadedCheckpoint
    shape: Geometry
    files: list[graphs.GraphFile]
    layers: ObservedLayers
    num_tokens: int
    folder: Path
    progress: Progress
    lazy: dict[int, WeightTensor] | None = None
    shares_encoder: bool = False

    @property
    def first_layers(self) -> ModelExport:
        """The first layers, whose graphs are verified in float64 and then removed."""
        count = self.layers.num_representative
        return replace(
            self,
            shape=self.shape.first_layers(count),
            files=[replace(file, prefix=f"first-{file.prefix}") for file in self.files],
            layers=ObservedLayers(self.layers.attention[:count], self.layers.kinds[:count]),
        )

    @property
    def other_files(self) -> list[graphs.GraphFile]:
        """Graphs without caches: those of an encoder-decoder's source, or of hidden states."""
        has_source = self.shape.encoder is not None
        names = {ENCODER: has_source and not self.shares_encoder, OPEN: has_source}
        names[FUSE] = self.shape.has_fuse
        prefix = self.files[0].prefix
        return [graphs.GraphFile(name, None, prefix=prefix) for name in names if names[name]]

    @property
    def model(self) -> torch.nn.Module:
        """The PyTorch model, whose large matrices may be placeholders."""
        return self.loaded.model


def export_model(
    checkpoint: Checkpoint,
    context_length: int,
    num_tokens: int,
    request: ExportRequest,
    folder: Path,
    progress: Progress,
    draft_ids: Sequence[int] | None,
    encoders: set[str],
    hidden_layers: tuple[int, ...],
    graph_variants: Sequence[str],
    requires_invariance: bool = False,
) -> tuple[list[ModelEntry], FileEntry, LazyWeights | None]:
    """Write one checkpoint's graphs and weights to a new folder and verify them against PyTorch.

    A self-draft becomes a second model in the folder, whose graphs read the same weights.

    Args:
        checkpoint: Target or draft model.
        context_length: Context length of the graphs.
        num_tokens: Number of the tokenizer's ids.
        request: Options of the export.
        folder: Folder of the model in the bundle.
        progress: Receives notes and the durations of steps.
        draft_ids: Tokens of the draft model's pruned LM head; None for all.
        encoders: Digests of the encoders of other models, which are not written again; receives
            this model's.
        hidden_layers: Layers of a target whose hidden states the graphs return for a draft model,
            see `HiddenStates`.
        graph_variants: Graph variants without a type suffix.
        requires_invariance: Reject a graph variant if passes of several tokens are not
            batch-invariant.

    Returns:
        The models' manifest entries, the entry of the weights file, and for models that are to be
        quantized their weights, by offset in that file, which lacks those of a large model.

    Raises:
        ExportError: The model cannot be exported, or its graphs differ from it.
    """
    role, num_draft_layers = checkpoint.role, request.num_draft_layers
    folder.mkdir()
    licenses.copy_licenses(role, checkpoint.folder, checkpoint.source.license, folder, progress)
    gc.collect()  # frees reference cycles of the previous model
    with progress.step(f"Loading the {role}"):
        loaded = loader.load(checkpoint, progress)
    token_ids = draft_ids if loaded.token_ids is None else loaded.token_ids
    sources = [checkpoint.source]
    with tracer.explain_refusal(checkpoint):
        if num_draft_layers is None and draft_ids is not None:
            loaded = draft_vocabulary.prune_head(loaded, draft_ids)
        _note_rotary(role, loaded, context_length, progress)
        k = request.num_draft_tokens
        parts = [
            measure_model(
                role, loaded, context_length, k, num_tokens, folder, progress,
                hidden_layers=hidden_layers,
            )
        ]  # fmt: skip
        if num_draft_layers is not None:
            parts.append(cut_draft(parts[0], num_draft_layers, k, draft_ids))
            sources.append(self_draft.source(checkpoint.source, num_draft_layers))
        precision = request.precision_of(role)
        is_kept_as_float = precision == KEEP and not loader.quantized_tensors(checkpoint)
        if precision in QUANTIZED_DTYPES and not is_kept_as_float:
            lazy = dict[int, WeightTensor]()
            parts = [replace(part, lazy=lazy) for part in parts]
        digest = None
        if isinstance(loaded.model, SourceConditionedDecoder):
            shape = parts[0].shape
            digest = encoder_digest(loaded.model, loaded.sources, shape, parts[0].num_tokens)
            parts[0] = replace(parts[0], shares_encoder=digest in encoders)
        if parts[0].shares_encoder:
            progress.note(f"{role}: its encoder is the target's")
        sizes = [reference.num_parameters(part.model) for part in parts]
        written, file = write_models(parts, graph_variants)
        in_full = request.verification == FULL
        references = [
            compute_references(part, all(has_first.values()), in_full)
            for part, has_first in zip(parts, written, strict=True)
        ]
        for part, variants in zip(parts, written, strict=True):
            _verify_others(part, variants, request.tolerance)
        loaded.sources.close()  # verification reads the exported weights
        released = LoadedCheckpoint(torch.nn.Module(), loaded.dtype, WeightSources())
        parts = [replace(part, loaded=released) for part in parts]
        del loaded
        gc.collect()
        reports = [
            _verify_all(part, list(variants), results, request, requires_invariance)
            for part, variants, results in zip(parts, written, references, strict=True)
        ]
    if digest is not None:
        encoders.add(digest)
    experts = [results.num_experts for results in references]
    model_types = [checkpoint.model_type] * len(parts)
    entries = list(map(_model_entry, parts, sources, model_types, sizes, experts, reports))
    if token_ids is not None:
        name = f"{parts[-1].files[0].prefix}{IDS_FILE}"
        (folder / name).write_bytes(pack_ids(token_ids))
        entries[-1] = replace(entries[-1], token_ids=f"{folder.name}/{name}")
    return entries, file, parts[0].lazy


def measure_model(
    role: str,
    loaded: LoadedCheckpoint,
    context_length: int,
    num_draft_tokens: int,
    num_tokens: int,
    folder: Path,
    progress: Progress,
    prefix: str = "",
    hidden_layers: Sequence[int] = (),
) -> ModelExport:
    """Measure a model's cache layout and observe its attention layers.

    `prefix` starts its file names if it shares the folder with another model. Its graphs return the
    hidden states of `hidden_layers`.
    """
    unread = loaded.sources.materialized(loaded.model, only_shapes=True)
    with progress.step(f"Loading the {role}"), unread:
        shape = geometry.measure_geometry(
            loaded.model, context_length, num_draft_tokens, hidden_layers
        )
        layers = tracer.observe(loaded.model, shape)
    files = graphs.graph_files(num_draft_tokens, context_length, prefix)
    num_tokens = min(num_tokens, loaded.num_tokens or shape.padded_vocab_size)
    return ModelExport(role, loaded, shape, files, layers, num_tokens, folder, progress)


def cut_draft(
    target: ModelExport,
    num_layers: int,
    num_draft_tokens: int,
    head: Sequence[int] | None = None,
) -> ModelExport:
    """Return the target's first layers as a second model in the same folder. Raises ExportError."""
    try:
        loaded = self_draft.keep_layers(target.loaded, num_layers)
        loaded = loaded if head is None else draft_vocabulary.prune_head(loaded, head)
        draft = measure_model(
            "draft", loaded, target.shape.context_length, num_draft_tokens, target.num_tokens,
            target.folder, target.progress, "draft-",
        )  # fmt: skip
        if draft.shape.layers != target.shape.layers[:num_layers]:
            raise ExportError(
                f"the truncated model has caches for {len(draft.shape.layers)} layers"
            )
    except Exception as error:
        raise ExportError(
            f"the target cannot be truncated to {self_draft.PREFIX}{num_layers}: "
            f"{first_line(error)}; specify another --draft"
        ) from error
    return draft


def write_models(
    parts: list[ModelExport], graph_variants: Sequence[str]
) -> tuple[list[dict[str, bool]], FileEntry]:
    """Trace and write models that share a folder.

    Returns:
        For each model its graph variants, and whether graphs of its first layers were written; and
        the entry of the weights file.
    """
    first = parts[0]
    with WeightsFile(first.folder, first.loaded.dtype, first.lazy) as stored:
        written = [
            _for_each_variant(p, graph_variants, partial(_write_graphs, p, stored)) for p in parts
        ]
        is_sparse = stored.size > runner.WHOLE_BYTES and first.shape.encoder is None
        with first.progress.step(f"Writing the {first.role}", stored.size) as advance:
            stored.finish(advance, is_sparse=is_sparse)
    return written, stored.file


def _for_each_variant(
    part: ModelExport, graph_variants: Sequence[str], do: Callable[[str], T]
) -> dict[str, T]:
    """Call `do` for each graph variant; note those that fail, and raise if all do."""
    done: dict[str, T] = {}
    rejections: dict[str, ExportError] = {}
    for ops in graph_variants:
        try:
            done[ops] = do(ops)
        except ExportError as error:
            rejections[ops] = error
    reasons = {ops: str(error).removeprefix(f"{part.role}: ") for ops, error in rejections.items()}
    if not done:
        ops, first = next(iter(rejections.items()))
        raise type(first)(f"{part.role}: {reasons[ops]}{REJECTION}{ops}")
    for ops, reason in reasons.items():
        part.progress.note(f"{part.role}: no {ops} graphs, because {reason}")
    return done


def _write_graphs(part: ModelExport, stored: WeightsFile, ops: str) -> bool:
    """Trace a model in a graph variant and write its files.

    Returns:
        True if graphs of its first layers were written as well.

    Raises:
        ExportError: The model cannot be traced.
    """
    if ops == "gqa":
        for layer in part.layers.attention:
            if reason := layer.gqa_obstacle():
                raise ExportError(reason)
    patched = patched_modules(part.model, part.shape.context_length, part.shape.capacity)
    with part.progress.step(f"Tracing the {part.role}"), patched:
        sources = part.loaded.sources
        traced = tracer.trace(part.model, part.shape, ops, part.layers, sources)
        names = [file.name for file in part.other_files]
        others = uncached_graphs.trace_uncached(part.model, part.shape, sources, names)
    with part.progress.step(f"Writing the {part.role}"):
        for whole, files in ((traced.model, part.files), (traced.first, part.first_layers.files)):
            if whole is not None:
                _rewrite(whole, stored, joins_products=part.lazy is None)
                add_logits_from(whole.graph)
                stored.attach(whole)
                ir.save(whole, stored.folder / files[0].source.file_name(ops))
                graphs.write_graphs(whole, stored.folder, files, ops)
        for file in part.other_files:
            _rewrite(others[file.name], stored, joins_products=False)
            # ONNX Runtime reads the weights of graphs without caches from the file.
            stored.attach(others[file.name], is_required=True)
            save_graph(others[file.name], stored.folder / file.file_name(ops))
    return traced.first is not None


def _rewrite(model: ir.Model, stored: WeightsFile, joins_products: bool) -> None:
    """Rewrite a traced graph."""
    rewrites.merge_slices(model.graph)
    remove_transposes(model.graph)
    rewrites.expand_sigmoids(model)
    graphs.replace_shape_fills(model)
    graphs.strip_metadata(model)
    graphs.expand_biases(model.graph)
    if joins_products:
        join_attention_products(model, stored)


def _model_entry(
    part: ModelExport,
    source: CheckpointSource,
    model_type: str,
    num_parameters: int,
    num_experts: int,
    reports: dict[str, ParityReport],
) -> ModelEntry:
    folder = part.folder.name
    shape = part.shape
    states = (*shape.states, *shape.constants)
    return ModelEntry(
        source=source,
        architecture=model_type,
        num_parameters=num_parameters,
        num_experts=num_experts,
        vocab_size=part.num_tokens,
        padded_vocab_size=shape.padded_vocab_size,
        context_length=shape.context_length,
        dtype=DTYPE,
        weights_dtype=part.loaded.dtype,
        capacity=shape.capacity,
        states=states,
        weights=f"{folder}/{FILE}",
        token_ids=None,
        signatures=signatures(
            states, shape.capacity, shape.padded_vocab_size, shape.encoder, shape.hidden
        ),
        graphs=tuple(
            file.entry(folder, ops) for ops in reports for file in (*part.files, *part.other_files)
        ),
        parity=reports,
        quantization={},
        encoder=shape.encoder,
        hidden=shape.hidden,
    )


@dataclass(frozen=True)
class References:
    """Results of PyTorch for a model.

    Attributes:
        segments: Results in float64, of the whole model or of its first layers.
        depth: Results of all layers, if `segments` are those of the first layers.
        source: Source of an encoder-decoder.
        fused: Hidden states that passes of a draft read.
    """

    segments: list[Reference]
    depth: Sequence[Reference] = ()
    source: SourceStates | None = None
    fused: FusedStates | None = None

    @property
    def num_experts(self) -> int:
        """Number of experts per layer."""
        return max(x.num_experts for x in (*self.segments, *self.depth))


def compute_references(
    part: ModelExport, has_first_layers: bool, in_full: bool = False
) -> References:
    """Run a model in PyTorch.

    Args:
        part: The model.
        has_first_layers: Run its first layers in float64 and all layers in float32 at the end of
            the context, instead of all layers in float64.
        in_full: Run all layers in float64 in any case.
    """
    source = fused = None
    if isinstance(part.model, DraftHeadModule):
        fused = sample_states(part.model, part.loaded.sources)
    if isinstance(part.model, SourceConditionedDecoder):
        sizes = part.model, part.loaded.sources, part.shape, part.num_tokens
        source = compute_source_states(*sizes)
        part.model.constants = source.rows
    segments = reference.compared_positions(part.shape, reference.num_parameters(part.model))
    total = (1 + has_first_layers) * sum(end - start for start, end in segments)
    with part.progress.step(f"Running the {part.role} in PyTorch", total) as advance:
        run = partial(
            reference.compute_references,
            part.role, part.model, part.loaded.sources, num_tokens=part.num_tokens,
            segments=segments, advance=advance, fused=fused,
        )  # fmt: skip
        if not has_first_layers:
            return References(run(geometry=part.shape), source=source, fused=fused)
        first = part.first_layers
        restore = truncate(part.model, len(first.shape.layers))
        try:
            results = run(geometry=first.shape)
        finally:
            restore()
        if in_full:
            return References(results, run(geometry=part.shape), source, fused)
        caches = [results[0].caches[2 * i + j] for i in part.layers.kinds for j in (0, 1)]
        last = reference.last_positions(segments)
        if not results[0].num_experts:  # most experts get no token of a short segment
            advance(segments[-1][0] - last[0][0])
            last = segments[-1:]
        depth = run(geometry=part.shape, segments=last, exact=False, earlier=caches)
        return References(results, depth, source, fused)


def _verify_others(
    part: ModelExport, graph_variants: Iterable[str], tolerance: float | None
) -> None:
    """Compare the graphs without caches with PyTorch. Raises ParityError."""
    if not part.other_files:
        return
    with part.progress.step(f"Comparing the {part.role} with PyTorch"):
        for ops in graph_variants:
            paths = {file.name: part.folder / file.file_name(ops) for file in part.other_files}
            sizes = part.loaded.sources, part.shape, part.num_tokens
            verify_uncached(part.role, part.model, *sizes, paths, tolerance)


def _note_rotary(
    role: str, loaded: LoadedCheckpoint, context_length: int, progress: Progress
) -> None:
    if freeze_rotary(loaded.model, context_length):
        progress.note(
            f"{role}: its rotary frequencies are fixed to those of a context of {context_length} "
            "tokens; a smaller --max-length may select others"
        )


def _verify_all(
    part: ModelExport,
    written: list[str],
    references: References,
    request: ExportRequest,
    requires_invariance: bool,
) -> dict[str, ParityReport]:
    """Verify each graph variant that was written, and remove the files of those that fail."""
    verify_variant = partial(
        verify,
        part,
        references,
        request.tolerance,
        requires_invariance,
        is_final=part.lazy is None,
    )
    reports = _for_each_variant(part, written, verify_variant)
    unused = [(file, ops) for ops in {*OPS} - reports.keys() for file in part.files]
    unused += [(file, ops) for ops in OPS for file in part.first_layers.files]
    for file, ops in unused:
        for name in (file.file_name(ops), file.source.file_name(ops)):
            (part.folder / name).unlink(missing_ok=True)
    return reports


def verify(
    part: ModelExport,
    references: References,
    tolerance: float | None,
    requires_invariance: bool,
    ops: str,
    is_final: bool = True,
) -> ParityReport:
    """Verify a graph variant.

    Args:
        part: The model.
        references: Results of PyTorch.
        tolerance: Maximum float32 error relative to the largest value of an output, if any.
        requires_invariance: Reject passes of several tokens that are not batch-invariant.
        ops: The graph variant.
        is_final: False if the graphs are quantized afterwards.

    Raises:
        ExportError: The graphs differ from the model, or are rejected.
    """
    name, progress, depth = f"{part.role} ({ops})", part.progress, references.depth
    runner_of = partial(
        Runner, ops=ops, lazy=part.lazy, source=references.source, fused=references.fused
    )
    whole = first = runner_of(part.folder, part.files, part.shape)
    if depth:
        layers = part.first_layers
        first = runner_of(layers.folder, layers.files, layers.shape)
    num_stages = 2 * first.num_stages + (whole.num_stages if depth else 0)
    with progress.step(f"Comparing the {part.role} with PyTorch", num_stages) as advance:
        report, differing = parity.verify(
            part.role, references.segments, first, tolerance, advance, is_final
        )
        if depth:
            report = parity.verify_depth(
                part.role, depth, whole, first, part.layers.kinds, report, tolerance, advance
            )
    if differing:
        progress.note(f"{name}: {', '.join(differing)} are not bitwise equal to the decoder")
    expected = checks.compared_lengths(first)
    missing = sorted({*expected} - {*report.invariant_lengths})
    if missing == [1]:
        progress.note(
            f"{name}: single-token passes are not bitwise equal to longer ones, so a single token "
            "is padded to two"
        )
    elif missing:
        lengths = ", ".join(map(str, missing))
        reason = f"passes of {lengths} tokens are not bitwise equal to longer ones"
        if requires_invariance:
            raise ExportError(reason)
        progress.note(f"{name}: {reason}, so text may differ from plain decoding at near-ties")
    return report
