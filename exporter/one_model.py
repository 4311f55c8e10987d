"""One model into its folder of a bundle: traced, written, and played against PyTorch."""

from __future__ import annotations

import gc
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from specedge.manifest import OPS, Cache, File, Model, Parity, Source

from . import checkpoints, licences, model_files, parity, reference, self_draft, tracing, weights
from .checkpoints import Checkpoint, Loaded
from .model_files import Part
from .playing import Player
from .progress import Progress
from .reference import Reference
from .sources import Sources
from .swaps import fix_rotary
from .weights import Weights


def export_model(
    checkpoint: Checkpoint,
    context_length: int,
    num_tokens: int,
    num_draft_tokens: int,
    ops: str,
    folder: Path,
    progress: Progress,
    draft_layers: int | None = None,
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
        loaded = checkpoints.load(checkpoint, progress)
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
        sharp = [
            _sharpened(part, found, folder.parent.parent / f"{part.role}-sharpened")
            for part, found in zip(parts, references, strict=True)
        ]
        loaded.sources.close()  # from here on ONNX Runtime reads the weights
        gone = Loaded(torch.nn.Module(), loaded.dtype, Sources())
        parts = [replace(part, loaded=gone) for part in parts]
        del loaded
        gc.collect()
        reports = list(map(_compare, parts, written, references))
        reports = list(map(_compare_sharpened, sharp, reports))
    for part, report in zip(parts, reports, strict=True):
        for path in (
            folder / x.file(one) for x in part.lengths for one in OPS if one not in report
        ):
            path.unlink(missing_ok=True)
    described = map(_described, parts, sources, [checkpoint.kind] * len(parts), sizes, reports)
    return list(described), file


def _described(
    part: Part, source: Source, kind: str, num_parameters: int, reports: dict[str, Parity]
) -> Model:
    place = part.folder.name
    return Model(
        source=source,
        architecture=kind,
        num_parameters=num_parameters,
        vocab_size=part.num_tokens,
        padded_vocab_size=part.shape.padded_vocab_size,
        context_length=part.shape.context_length,
        dtype="float32",
        weights_dtype=part.loaded.dtype,
        cache=Cache("float32", part.shape.capacity, part.shape.layers),
        weights=f"{place}/{weights.FILE}",
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


def _references(part: Part) -> list[Reference]:
    played = reference.positions_played(part.shape, reference.num_parameters(part.model))
    total = sum(end - start for start, end in played)
    with part.progress.step(f"Running the {part.role} in PyTorch", total) as advance:
        sources = part.loaded.sources
        return reference.references(part.model, sources, part.shape, part.num_tokens, advance)


def _compare(part: Part, wanted: list[str], references: list[Reference]) -> dict[str, Parity]:
    """Compare each op set that can be."""
    return model_files.each(part, wanted, lambda ops: _played(part, ops, references))


def _played(part: Part, ops: str, references: list[Reference]) -> Parity:
    """Play an op set's files against what PyTorch computed; note what is not as it should be."""
    who, progress = f"{part.role} ({ops})", part.progress
    player = Player(part.folder, part.lengths, part.shape, ops)
    with progress.step(f"Comparing the {who}", player.num_stages) as advance:
        found = parity.measure(part.role, references, player, advance)
    if found.differing:
        progress.note(f"{who}: {', '.join(found.differing)} give other last bits than decoder")
    expected = parity.lengths_to_compare(player)
    if missing := sorted({*expected} - {*found.parity.row_independent_lengths}):
        progress.note(
            f"{who}: passes of {', '.join(map(str, missing))} tokens give other last bits than "
            "wider ones, so near-ties may be decided otherwise than by the target alone"
        )
    return found.parity


def _sharpened(part: Part, references: list[Reference], folder: Path) -> Part | None:
    """The model with larger weights, where an untrained model's say little."""
    if (found := reference.spread(references[0])) >= reference.SPREAD:
        return None
    about = f"{part.role}: its logits have a standard deviation of {found:.2g}, which hides errors"
    if reference.num_parameters(part.model) > reference.SHARPENED:
        part.progress.note(f"{about}; the comparison says less than it would of a trained model")
        return None
    part.progress.note(f"{about}; it is compared with larger weights, too")
    model = reference.sharpened(part.model, part.loaded.sources, part.num_tokens)
    return replace(part, loaded=Loaded(model, "float32", Sources()), folder=folder)


def _compare_sharpened(sharp: Part | None, plain: dict[str, Parity]) -> dict[str, Parity]:
    """Compare again, in a folder that goes when that is done, where there is cause to."""
    if sharp is None:
        return plain
    sharp.folder.mkdir()
    with Weights(sharp.folder, "float32") as stored:
        for ops in plain:
            model_files.write_graphs(sharp, stored, ops)
        model_files.finish(sharp, stored)
    references = _references(sharp)
    again = _compare(sharp, list(plain), references)
    shutil.rmtree(sharp.folder)
    return {ops: _worse(plain[ops], found) for ops, found in again.items()}


def _worse(plain: Parity, sharp: Parity) -> Parity:
    held = {*plain.row_independent_lengths} & {*sharp.row_independent_lengths}
    return replace(
        sharp,
        logits_error=max(plain.logits_error, sharp.logits_error),
        cache_error=max(plain.cache_error, sharp.cache_error),
        row_independent_lengths=tuple(sorted(held)),
    )
