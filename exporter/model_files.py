"""One model into its folder of a bundle: measured, traced, written, and compared with PyTorch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import onnx_ir as ir
import torch

from specedge.bundle.manifest import (
    CacheLayout,
    CheckpointSource,
    FileEntry,
    ModelEntry,
    signatures,
)
from specedge.bundle.op_sets import OPS
from specedge.bundle.precision import FLOAT32
from specedge.bundle.reports import ParityReport
from specedge.errors import ExportError

from .checkpoint import heads, licenses, loading, self_draft
from .checkpoint.checkpoints import Checkpoint
from .checkpoint.lazy_weights import Sources
from .checkpoint.loading import Loaded
from .graph import graphs, sigmoids
from .graph.head import choose_rows
from .graph.peephole import straighten
from .graph.weights import FILE, Weights
from .progress import Progress
from .quiet import one_line
from .tracing import geometry, repeating, tracing
from .tracing.geometry import Geometry
from .tracing.layers import Layer
from .tracing.module_patches import fix_rotary, swapped
from .verification import checks, parity, reference
from .verification.reference import Reference
from .verification.runner import Runner

T = TypeVar("T")


@dataclass(frozen=True)
class ModelExport:
    """A model on its way into a folder; `num_tokens` ids are real."""

    role: str
    loaded: Loaded
    shape: Geometry
    lengths: list[graphs.Length]
    layers: list[Layer]
    num_tokens: int
    folder: Path
    progress: Progress

    @property
    def model(self) -> torch.nn.Module:
        """The PyTorch model, whose large matrices may be placeholders."""
        return self.loaded.model


def export_model(
    checkpoint: Checkpoint,
    context_length: int,
    num_tokens: int,
    num_draft_tokens: int,
    ops: str,
    folder: Path,
    progress: Progress,
    draft_layers: int | None = None,
    tolerance: float | None = None,
    head: Sequence[int] | None = None,
) -> tuple[list[ModelEntry], FileEntry]:
    """Write one model's files into a new folder and compare them with it; its weights' hash, too.

    With `draft_layers` the model's first layers become a draft, the second of two: its graphs lie
    beside the model's and read the same weights. `ops` is "auto" or the op set wanted. The last
    model's logits are of the tokens `head` alone, if it is given. Raises ExportError.
    """
    role = checkpoint.role
    folder.mkdir()
    licenses.copy(role, checkpoint.folder, checkpoint.source.license, folder, progress)
    gc.collect()  # what the model before this one left in cycles
    with progress.step(f"Loading the {role}"):
        loaded = loading.load(checkpoint, progress)
    sources = [checkpoint.source]
    with tracing.refusal(checkpoint):
        if draft_layers is None and head is not None:
            loaded = heads.cut(loaded, head)
        _note_rotary(role, loaded, context_length, progress)
        parts = [
            measured(role, loaded, context_length, num_draft_tokens, num_tokens, folder, progress)
        ]
        if draft_layers is not None:
            parts.append(own_draft(parts[0], draft_layers, num_draft_tokens, head))
            sources.append(self_draft.source(checkpoint.source, draft_layers))
        sizes = [reference.num_parameters(part.model) for part in parts]
        written, file = write(parts, ops)
        references = [_references(part) for part in parts]
        loaded.sources.close()  # from here on ONNX Runtime reads the weights
        gone = Loaded(torch.nn.Module(), loaded.dtype, Sources())
        parts = [replace(part, loaded=gone) for part in parts]
        del loaded
        gc.collect()
        reports = [
            _compared(part, wanted, found, tolerance)
            for part, wanted, found in zip(parts, written, references, strict=True)
        ]
    experts = [found[0].num_experts for found in references]
    kinds = [checkpoint.kind] * len(parts)
    return list(map(_described, parts, sources, kinds, sizes, experts, reports)), file


def measured(
    role: str,
    loaded: Loaded,
    context_length: int,
    num_draft_tokens: int,
    num_tokens: int,
    folder: Path,
    progress: Progress,
    prefix: str = "",
) -> ModelExport:
    """Run the model to see what it keeps and what each of its layers does.

    `prefix` is what its files begin with where another model has the same folder.
    """
    unread = loaded.sources.reading(loaded.model, only_shapes=True)
    with progress.step(f"Loading the {role}"), unread:
        shape = geometry.measure(loaded.model, context_length, num_draft_tokens)
        layers = tracing.observe(loaded.model, shape)
    lengths = graphs.lengths(num_draft_tokens, context_length, prefix)
    num_tokens = min(num_tokens, loaded.num_tokens or shape.padded_vocab_size)
    return ModelExport(role, loaded, shape, lengths, layers, num_tokens, folder, progress)


def own_draft(
    target: ModelExport,
    num_layers: int,
    num_draft_tokens: int,
    head: Sequence[int] | None = None,
) -> ModelExport:
    """The target's first layers as a model in the same folder, perhaps with a cut head."""
    try:
        loaded = self_draft.cut(target.loaded, num_layers)
        loaded = loaded if head is None else heads.cut(loaded, head)
        draft = measured(
            "draft", loaded, target.shape.context_length, num_draft_tokens, target.num_tokens,
            target.folder, target.progress, "draft-",
        )  # fmt: skip
        if draft.shape.layers != target.shape.layers[:num_layers]:
            raise ExportError(f"that leaves caches of {len(draft.shape.layers)} layers")
    except Exception as error:
        raise ExportError(
            f"the target cannot be cut to {self_draft.PREFIX}{num_layers}: {one_line(error)}; "
            "give another --draft"
        ) from error
    return draft


def write(parts: list[ModelExport], ops: str) -> tuple[list[list[str]], FileEntry]:
    """Trace and write models that share one folder: the op sets each has, and the weights' hash."""
    wanted, first = OPS if ops == "auto" else (ops,), parts[0]
    with Weights(first.folder, first.loaded.dtype, first.loaded.sources) as stored:
        written = [list(_each(p, wanted, partial(_write_graphs, p, stored))) for p in parts]
        with first.progress.step(f"Writing the {first.role}", stored.size) as advance:
            stored.finish(advance)
    return written, stored.file


def _each(part: ModelExport, wanted: Sequence[str], do: Callable[[str], T]) -> dict[str, T]:
    """Do something for each op set; one that cannot be is left out with a note, if any can."""
    done: dict[str, T] = {}
    refused: dict[str, ExportError] = {}
    for ops in wanted:
        try:
            done[ops] = do(ops)
        except ExportError as error:
            refused[ops] = error
    reasons = {ops: str(error).removeprefix(f"{part.role}: ") for ops, error in refused.items()}
    if not done:
        ops, first = next(iter(refused.items()))
        raise type(first)(f"{part.role}: {reasons[ops]}; it cannot be exported in {ops}")
    for ops, reason in reasons.items():
        part.progress.note(f"{part.role}: no {ops} graphs, because {reason}")
    return done


def _write_graphs(part: ModelExport, stored: Weights, ops: str) -> None:
    """Trace a model in an op set and write its files. Raises ExportError where it cannot be."""
    if ops == "gqa":
        for layer in part.layers:
            if reason := layer.obstacle():
                raise ExportError(reason)
    with part.progress.step(f"Tracing the {part.role}"):
        with swapped(part.model, part.shape.context_length, part.shape.capacity):
            traced = repeating.trace(part.model, part.shape, ops, part.layers)
        straighten(traced.graph)
        sigmoids.spell_out(traced)
        graphs.fill_without_shapes(traced)
        graphs.tidy(traced)
        graphs.widen_biases(traced.graph)
        choose_rows(traced.graph)
    with part.progress.step(f"Writing the {part.role}"):
        stored.attach(traced)
        ir.save(traced, part.folder / part.lengths[0].source.file(ops))
        graphs.write(traced, part.folder, part.lengths, ops)


def _described(
    part: ModelExport,
    source: CheckpointSource,
    kind: str,
    num_parameters: int,
    num_experts: int,
    reports: dict[str, ParityReport],
) -> ModelEntry:
    place = part.folder.name
    cache = CacheLayout(FLOAT32.cache, part.shape.capacity, part.shape.layers)
    return ModelEntry(
        source=source,
        architecture=kind,
        num_parameters=num_parameters,
        num_experts=num_experts,
        vocab_size=part.num_tokens,
        padded_vocab_size=part.shape.padded_vocab_size,
        context_length=part.shape.context_length,
        dtype=FLOAT32.compute,
        weights_dtype=part.loaded.dtype,
        cache=cache,
        weights=f"{place}/{FILE}",
        signatures=signatures(cache, part.shape.padded_vocab_size),
        graphs=tuple(length.entry(place, one) for one in reports for length in part.lengths),
        parity=reports,
        quantization={},
    )


def _references(part: ModelExport) -> list[Reference]:
    stretches = reference.positions_compared(part.shape, reference.num_parameters(part.model))
    total = sum(end - start for start, end in stretches)
    with part.progress.step(f"Running the {part.role} in PyTorch", total) as advance:
        return reference.references(
            part.role, part.model, part.loaded.sources, part.shape, part.num_tokens, advance
        )


def _note_rotary(role: str, loaded: Loaded, context_length: int, progress: Progress) -> None:
    if fix_rotary(loaded.model, context_length):
        progress.note(
            f"{role}: its rotary factors are those of texts of {context_length} tokens at "
            "every position; a smaller --max-length may choose others"
        )


def _compared(
    part: ModelExport, written: list[str], references: list[Reference], tolerance: float | None
) -> dict[str, ParityReport]:
    """Compare each op set that was written; the files of others go."""
    reports = _each(part, written, partial(_compare, part, references, tolerance))
    for ops in {*OPS} - reports.keys():
        for length in part.lengths:
            for file in (length.file(ops), length.source.file(ops)):
                (part.folder / file).unlink(missing_ok=True)
    return reports


def _compare(
    part: ModelExport, references: list[Reference], tolerance: float | None, ops: str
) -> ParityReport:
    who, progress = f"{part.role} ({ops})", part.progress
    runner = Runner(part.folder, part.lengths, part.shape, ops)
    with progress.step(f"Comparing the {who}", runner.num_stages) as advance:
        report, differing = parity.measure(part.role, references, runner, tolerance, advance)
    if differing:
        progress.note(f"{who}: {', '.join(differing)} give other last bits than decoder")
    expected = checks.lengths_to_compare(runner)
    missing = sorted({*expected} - {*report.invariant_lengths})
    if missing == [1]:
        progress.note(
            f"{who}: passes of one token are not bitwise equal to longer ones, so single tokens "
            "are run in passes of two"
        )
    elif missing:
        progress.note(
            f"{who}: passes of {', '.join(map(str, missing))} tokens give other last bits than "
            "wider ones, so near-ties may be decided otherwise than by the target alone"
        )
    return report
