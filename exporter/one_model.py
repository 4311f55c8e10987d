"""One model into its folder of a bundle: traced, written, and compared with PyTorch."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import torch

from specedge.manifest import OPS, Cache, File, Model, Parity, Source, signatures
from specedge.precision import FLOAT32

from . import model_files
from .checkpoint import licences, loading, self_draft
from .checkpoint.checkpoints import Checkpoint
from .checkpoint.lazy_weights import Sources
from .checkpoint.loading import Loaded
from .compare import checks, parity, reference
from .compare.reference import Reference
from .compare.runner import Runner
from .graph import weights
from .model_files import ModelExport
from .progress import Progress
from .tracing import tracing
from .tracing.module_patches import fix_rotary


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
) -> tuple[list[Model], File]:
    """Write one model's files into a new folder and compare them with it; its weights' hash, too.

    With `draft_layers` the model's first layers become a draft, the second of two: its graphs lie
    beside the model's and read the same weights. `ops` is "auto" or the op set wanted. Raises
    ExportError.
    """
    role = checkpoint.role
    folder.mkdir()
    licences.copy(role, checkpoint.folder, checkpoint.source.licence, folder, progress)
    gc.collect()  # what the model before this one left in cycles
    with progress.step(f"Loading the {role}"):
        loaded = loading.load(checkpoint, progress)
    sources = [checkpoint.source]
    with tracing.refusal(checkpoint):
        _note_rotary(loaded.model, context_length, role, progress)
        parts = [
            model_files.measured(
                role, loaded, context_length, num_draft_tokens, num_tokens, folder, progress
            )
        ]
        if draft_layers is not None:
            parts.append(model_files.own_draft(parts[0], draft_layers, num_draft_tokens))
            sources.append(self_draft.source(checkpoint.source, draft_layers))
        sizes = [reference.num_parameters(part.model) for part in parts]
        written, file = model_files.write(parts, ops)
        references = [_references(part) for part in parts]
        loaded.sources.close()  # from here on ONNX Runtime reads the weights
        gone = Loaded(torch.nn.Module(), loaded.dtype, Sources())
        parts = [replace(part, loaded=gone) for part in parts]
        del loaded
        gc.collect()
        reports = [
            _compare(part, wanted, found, tolerance)
            for part, wanted, found in zip(parts, written, references, strict=True)
        ]
    for part, report in zip(parts, reports, strict=True):
        for path in (
            folder / x.file(one) for x in part.lengths for one in OPS if one not in report
        ):
            path.unlink(missing_ok=True)
    experts = [found[0].num_experts for found in references]
    kinds = [checkpoint.kind] * len(parts)
    return list(map(_described, parts, sources, kinds, sizes, experts, reports)), file


def _described(
    part: ModelExport,
    source: Source,
    kind: str,
    num_parameters: int,
    num_experts: int,
    reports: dict[str, Parity],
) -> Model:
    place = part.folder.name
    cache = Cache(FLOAT32.cache, part.shape.capacity, part.shape.layers)
    return Model(
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
        weights=f"{place}/{weights.FILE}",
        signatures=signatures(cache, part.shape.padded_vocab_size),
        graphs=tuple(length.entry(place, one) for one in reports for length in part.lengths),
        parity=reports,
    )


def _note_rotary(
    model: torch.nn.Module, context_length: int, role: str, progress: Progress
) -> None:
    if fix_rotary(model, context_length):
        progress.note(
            f"{role}: its rotary factors are those of texts of {context_length} tokens at "
            "every position; a smaller --max-length may choose others"
        )


def _references(part: ModelExport) -> list[Reference]:
    stretches = reference.positions_compared(part.shape, reference.num_parameters(part.model))
    total = sum(end - start for start, end in stretches)
    with part.progress.step(f"Running the {part.role} in PyTorch", total) as advance:
        sources = part.loaded.sources
        return reference.references(
            part.role, part.model, sources, part.shape, part.num_tokens, advance
        )


def _compare(
    part: ModelExport, wanted: list[str], references: list[Reference], tolerance: float | None
) -> dict[str, Parity]:
    """Compare each op set that can be."""
    return model_files.each(
        part, wanted, lambda ops: _compare_one(part, ops, references, tolerance)
    )


def _compare_one(
    part: ModelExport, ops: str, references: list[Reference], tolerance: float | None
) -> Parity:
    """Hold an op set's files against what PyTorch computed; note what is not as it should be."""
    who, progress = f"{part.role} ({ops})", part.progress
    runner = Runner(part.folder, part.lengths, part.shape, ops)
    with progress.step(f"Comparing the {who}", runner.num_stages) as advance:
        found = parity.measure(part.role, references, runner, tolerance, advance)
    if found.differing:
        progress.note(f"{who}: {', '.join(found.differing)} give other last bits than decoder")
    expected = checks.lengths_to_compare(runner)
    if missing := sorted({*expected} - {*found.parity.row_independent_lengths}):
        progress.note(
            f"{who}: passes of {', '.join(map(str, missing))} tokens give other last bits than "
            "wider ones, so near-ties may be decided otherwise than by the target alone"
        )
    return found.parity
