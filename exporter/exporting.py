"""The story of an export: find, fit, fetch, trace, compare, write."""

from __future__ import annotations

import errno
import gc
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from specedge import store
from specedge.bundle import FORMAT, MANIFEST, Bundle, describe
from specedge.errors import ExportError
from specedge.manifest import OPS, Cache, File, Model, Parity
from specedge.options import MAX_EXPORTED_DRAFT_TOKENS, whole
from specedge.version import __version__

from . import checkpoints, geometry, graphs, hub, licences, pair, parity, tracing, weights, writing
from .attention import Layer
from .checkpoints import Checkpoint
from .geometry import Geometry
from .peephole import straighten
from .playing import Player
from .progress import Progress
from .swaps import fix_rotary, swapped
from .weights import Weights


@dataclass(frozen=True)
class Request:
    """What the caller asked for, the same for both models."""

    num_draft_tokens: int
    max_length: int | None
    ops: str

    def __post_init__(self) -> None:
        if self.ops not in ("auto", *OPS):
            raise ValueError(f"ops must be auto, onnx or gqa, got {self.ops!r}")
        whole("num_draft_tokens", self.num_draft_tokens, 1, MAX_EXPORTED_DRAFT_TOKENS)
        if self.max_length is not None:
            whole("max_length", self.max_length, 2)


def export(
    draft: str | os.PathLike[str],
    target: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    num_draft_tokens: int = 4,
    max_length: int | None = None,
    ops: str = "auto",
    draft_revision: str | None = None,
    target_revision: str | None = None,
    progress: Progress | None = None,
) -> Bundle:
    """Export a draft and a target, each a folder or a hub id, to a bundle in the folder `output`.

    Without `output` the bundle goes to the user's data folder and becomes the default one. `ops`
    is the op set of the graphs: "onnx", "gqa", or "auto" for each that the models can have.

    Raises SpecEdgeError, or ValueError for a bad option.
    """
    progress = progress or Progress()
    request = Request(num_draft_tokens, max_length, ops)
    draft, target = os.fspath(draft), os.fspath(target)
    folder = Path(output) if output is not None else store.default_destination(draft, target)
    try:
        with writing.destination(folder) as work:
            found = [
                checkpoints.find("target", target, target_revision),
                checkpoints.find("draft", draft, draft_revision),
            ]
            _write(found[1], found[0], request, work, progress)
    except OSError as error:
        raise ExportError(_disk_trouble(error, folder)) from error
    bundle = Bundle.read(folder)
    store.remember_export(bundle)
    if output is None:
        store.remember_default(folder)
    return bundle


def _write(
    draft: Checkpoint, target: Checkpoint, request: Request, work: Path, progress: Progress
) -> None:
    text = pair.fit(draft, target, progress)
    pair.write_tokenizer(text, target, work)
    lengths = pair.context_lengths(target, draft, request.max_length, progress)
    remote = [c.remote for c in (target, draft) if c.remote is not None]
    hub.check_space(remote, work)
    models = [
        _export_model(checkpoint, length, text.num_tokens, request, work, progress)
        for checkpoint, length in zip((target, draft), lengths, strict=True)
    ]
    columns = [model.padded_vocab_size for model in models]
    sizes = pair.vocab_sizes(text.num_tokens, columns[0], columns[1], progress)
    models = [replace(m, vocab_size=size) for m, size in zip(models, sizes, strict=True)]
    ends = tuple(t for t in pair.end_tokens(target) if 0 <= t < models[0].vocab_size)
    bundle = Bundle(
        format=FORMAT,
        specedge_version=__version__,
        num_draft_tokens=request.num_draft_tokens,
        end_tokens=ends,
        tokenizer=pair.FILE,
        chat_template=text.chat_template,
        special_tokens=text.special_tokens,
        default_sampling=pair.default_sampling(target),
        target=models[0],
        draft=models[1],
        files=_files(work, progress),
    )
    (work / MANIFEST).write_text(bundle.to_json(), "utf-8")


def _export_model(
    checkpoint: Checkpoint,
    context_length: int,
    num_tokens: int,
    request: Request,
    work: Path,
    progress: Progress,
) -> Model:
    """Write one model's files into its folder and play them against it."""
    role = checkpoint.role
    folder = work / role
    folder.mkdir()
    licences.copy(role, checkpoint.folder, checkpoint.source.licence, folder, progress)
    gc.collect()  # what the model before this one left in cycles
    with progress.step(f"Loading the {role}"):
        model, dtype = checkpoints.load(checkpoint, progress)
    with tracing.refusal(model):
        if fix_rotary(model, context_length):
            progress.note(
                f"{role}: its rotary factors are those of texts of {context_length} tokens at "
                "every position; a smaller --max-length may choose others"
            )
        shape = geometry.measure(model, context_length, request.num_draft_tokens)
        part = Part(
            role=role,
            model=model,
            shape=shape,
            lengths=graphs.lengths(request.num_draft_tokens, context_length),
            layers=tracing.observe(model, shape),
            num_tokens=min(num_tokens, shape.padded_vocab_size),
            dtype=dtype,
            folder=folder,
        )
        reports = _write_op_sets(part, request.ops, progress)
    return Model(
        source=checkpoint.source,
        architecture=checkpoint.kind,
        num_parameters=sum(p.numel() for p in model.parameters()),
        vocab_size=part.num_tokens,
        padded_vocab_size=shape.padded_vocab_size,
        context_length=context_length,
        dtype="float32",
        weights_dtype=dtype,
        cache=Cache("float32", shape.capacity, shape.layers),
        weights=f"{role}/{weights.FILE}",
        graphs=tuple(length.entry(role, ops) for ops in reports for length in part.lengths),
        parity=reports,
    )


@dataclass(frozen=True)
class Part:
    """A model on its way into its folder of the bundle."""

    role: str
    model: torch.nn.Module
    shape: Geometry
    lengths: list[graphs.Length]
    layers: list[Layer]
    num_tokens: int
    dtype: str
    folder: Path


def _write_op_sets(part: Part, ops: str, progress: Progress) -> dict[str, Parity]:
    """Write and compare the graphs of each op set asked for; `auto` leaves out what cannot be."""
    file = Weights(part.folder, part.dtype)
    reports: dict[str, Parity] = {}
    refused: ExportError | None = None
    for one in OPS if ops == "auto" else (ops,):
        try:
            with progress.step(f"Tracing the {part.role} ({one})"):
                write_graphs(part, one, file)
            reports[one] = _compare(part, one, progress)
        except ExportError as error:
            refused = refused or error
            for length in part.lengths:
                (part.folder / length.file(one)).unlink(missing_ok=True)
            progress.note(f"{part.role}: no {one} graphs, because {error}")
    if not reports:
        assert refused is not None
        raise refused
    return reports


def write_graphs(part: Part, ops: str, file: Weights) -> None:
    """Trace one op set and write its files."""
    if ops == "gqa":
        for layer in part.layers:
            if reason := layer.obstacle():
                raise ExportError(reason)
    with swapped(part.model, part.shape.context_length):
        traced = tracing.trace(part.model, part.shape, ops, part.layers)
    straighten(traced.graph)
    graphs.fill_without_shapes(traced)
    graphs.tidy(traced)
    graphs.widen_biases(traced.graph)
    file.attach(traced)
    graphs.write(traced, part.folder, part.lengths, ops)


def _compare(part: Part, ops: str, progress: Progress) -> Parity:
    """Play an op set's files against the model; note what is not as it should be."""
    role, model, shape = part.role, part.model, part.shape
    title = f"Comparing the {role} ({ops})"
    with progress.step(title, _num_compared(model, shape)) as advance:
        player = Player(part.folder, part.lengths, shape, ops)
        measured = parity.measure(role, model, player, part.num_tokens, advance)
        if differing := parity.differing_files(player, parity.tokens(part.num_tokens, shape)):
            progress.note(f"{role}: {', '.join(differing)} give other last bits than decoder")
    if measured.logits_std < parity.SPREAD:
        measured = _measure_sharpened(part, ops, measured, progress)
    _note_lengths(measured, parity.lengths_to_compare(player), f"{role} ({ops})", progress)
    return measured


def _measure_sharpened(part: Part, ops: str, plain: Parity, progress: Progress) -> Parity:
    """Compare again with larger weights where an untrained model's say little."""
    progress.note(
        f"{part.role}: its logits have a standard deviation of {plain.logits_std:.2g}, as an "
        "untrained model's; the comparison was repeated with larger weights"
    )
    model = parity.sharpened(part.model, part.num_tokens)
    folder = part.folder.parent.parent / f"{part.role}-sharpened"
    sharp = replace(part, model=model, dtype="float32", folder=folder)
    total = _num_compared(model, part.shape)
    with progress.step(f"Comparing the {part.role} with larger weights", total) as advance:
        folder.mkdir()
        write_graphs(sharp, ops, Weights(folder, "float32"))
        player = Player(folder, part.lengths, part.shape, ops)
        again = parity.measure(part.role, model, player, part.num_tokens, advance)
    shutil.rmtree(folder)
    return replace(
        again,
        logits_error=max(plain.logits_error, again.logits_error),
        cache_error=max(plain.cache_error, again.cache_error),
        row_independent_lengths=tuple(
            t for t in plain.row_independent_lengths if t in again.row_independent_lengths
        ),
    )


def _note_lengths(measured: Parity, expected: list[int], role: str, progress: Progress) -> None:
    if missing := sorted({*expected} - {*measured.row_independent_lengths}):
        progress.note(
            f"{role}: passes of {', '.join(map(str, missing))} tokens give other last bits than "
            "wider ones, so near-ties may be decided otherwise than by the target alone"
        )


def _num_compared(model: torch.nn.Module, shape: Geometry) -> int:
    num_parameters = sum(p.numel() for p in model.parameters())
    return 2 * sum(b - a for a, b in parity.positions_played(shape, num_parameters))


def _files(work: Path, progress: Progress) -> dict[str, File]:
    paths = sorted(p for p in work.rglob("*") if p.is_file())
    total = sum(p.stat().st_size for p in paths)
    files = {}
    with progress.step("Hashing", total) as advance:
        for path in paths:
            files[path.relative_to(work).as_posix()] = describe(path)
            advance(path.stat().st_size)
    return files


def _disk_trouble(error: OSError, folder: Path) -> str:
    if error.errno == errno.ENOSPC:
        return f"no space left for {folder}; free some, or name another disk with --output"
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror or error}"
