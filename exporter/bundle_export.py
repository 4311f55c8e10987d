"""The story of an export: find, fit, fetch, trace, compare, write."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

from specedge.bundle import MANIFEST, Bundle, oldest_format, pack_ids, store
from specedge.bundle.integrity import file_entry
from specedge.bundle.manifest import FileEntry, ModelEntry
from specedge.bundle.precision import GPTQ, HALF_DTYPES, QUANTIZED_DTYPES
from specedge.errors import ExportError
from specedge.version import __version__

from . import cost_estimate, destination, mapped_memory
from .checkpoint import checkpoints, draft_vocabulary, hub, self_draft
from .checkpoint.checkpoints import Checkpoint
from .graph import best_logits, draft_loop
from .graph.graphs import SOURCE
from .model_export import export_model
from .progress import Progress
from .quantization import drafting, texts
from .quantization.computing import add_kinds
from .quantization.quantising import quantise
from .quantization.written import Written
from .request import ExportRequest
from .tokenizers import pair
from .tracing import tracer

ID_MAP_FILE = "ids.bin"
NO_DRAFT = "none"  # in place of a draft: the target alone


def export(
    draft: str | os.PathLike[str] | None,
    target: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    num_draft_tokens: int = 4,
    max_length: int | None = None,
    ops: str = "auto",
    tolerance: float | None = None,
    precision: str = "fp32",
    draft_precision: str | None = None,
    draft_vocab: int | None = None,
    compute: str | None = None,
    cache: str | None = None,
    calibrate: str | os.PathLike[str] | None = None,
    rounding: str = GPTQ,
    bits: float | None = None,
    draft_revision: str | None = None,
    target_revision: str | None = None,
    adapter: str | os.PathLike[str] | None = None,
    draft_adapter: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Bundle:
    """Export a draft and a target, each a folder or a hub id, to a bundle in the folder `output`.

    A draft "self:N" is the target's own first N layers, out of the target's weights file; with None
    or "none" the bundle has no draft model and drafts by suffix decoding. An
    `adapter` is a LoRA adapter, merged into the target, a `draft_adapter` one into the draft.

    Without `output` the bundle goes to the user's data folder and becomes the default one. `ops`
    is the op set of the graphs: "onnx", "gqa", or "auto" for each that the models can have. With
    `tolerance` float32 errors may be that share of the largest value, however far PyTorch's own is.

    `precision` is the target's: "fp32" stores weights in the checkpoint's own type and computes in
    float32; "fp16" and "bf16" round matrices to that first; "int8", "int8-block" and "int4" round
    weights, and what they are multiplied with to 8 bits, as a text says is best: the one that comes
    with specedge, or a file to `calibrate` with. "int8" has one scale a column, which verifies
    fastest, the last two one for 32 numbers. "int8" and "int4" are rounded by GPTQ, or with
    `rounding` "nearest" to the nearest, which takes less time. With more than 4 `bits` on average
    "int4" has the last matrices of MLPs in 8. The draft's, unless
    `draft_precision` says it, is the fastest measured here that keeps nine tenths of its
    acceptance; a tiny draft has the target's.

    With `draft_vocab` the draft's head is cut to that many tokens, the most frequent ones of the
    same text: it drafts no others, reads them all, and its passes are cheaper.

    With `compute`, "fp16" or "bf16" or of rounded weights "fp32" or "fp16", there are op sets, too,
    that compute in this type, for devices that do: "onnx-fp16" beside "onnx". They read the same
    weights, and are functions of their own. "qdq" is fp16 with rounded weights as TensorRT takes
    them; those in blocks are stored once more for it. A draft then has the target's precision.

    With `cache` "fp16" there are op sets, too, that compute as those without a type do, over caches
    of half the size: "gqa-kv16" beside "gqa". These are functions of their own as well.

    Raises SpecEdgeError, or ValueError for a bad option.
    """
    progress = progress or Progress()
    file = None if calibrate is None else os.fspath(calibrate)
    request = ExportRequest(
        num_draft_tokens, max_length, ops, tolerance, precision, draft_precision, file, draft_vocab,
        compute, cache, rounding, bits,
    )  # fmt: skip
    draft, target = _draft_name(draft), os.fspath(target)
    if draft is None:
        _check_no_draft_options(draft_precision, draft_vocab, draft_revision, draft_adapter)
    adapters = [None if a is None else os.fspath(a) for a in (adapter, draft_adapter)]
    num_layers = (
        draft if draft is None else self_draft.parse_num_layers(draft, draft_revision, adapters[1])
    )
    if num_layers is not None and draft_precision not in (None, precision):
        raise ExportError("a draft of the target's own layers has its precision; leave that out")
    text = texts.read(file)
    if output is not None and not os.fspath(output):
        raise ExportError("--output is empty; name a folder")
    folder = Path(output) if output is not None else store.default_destination(draft, target)
    try:
        with destination.destination(folder) as work:
            found = _find("target", target, target_revision, adapters[0], request)
            other: Checkpoint | None
            if draft is None:
                other = None
            elif num_layers is None:
                other = _find("draft", draft, draft_revision, adapters[1], request)
            else:
                self_draft.check_num_layers(num_layers, found)
                other = found
            with mapped_memory.limit_mapped_memory():
                _write(other, found, num_layers, request, text, work, progress)
    except OSError as error:
        raise ExportError(_disk_trouble(error, folder)) from error
    bundle = Bundle.read(folder)
    store.record_export(bundle)
    if output is None:
        store.set_default(folder)
    return bundle


def _draft_name(draft: str | os.PathLike[str] | None) -> str | None:
    """Return the draft's name, or None for a bundle without a draft model."""
    name = NO_DRAFT if draft is None else os.fspath(draft)
    return None if name == NO_DRAFT else name


def _check_no_draft_options(
    precision: str | None,
    vocab: int | None,
    revision: str | None,
    adapter: str | os.PathLike[str] | None,
) -> None:
    """Refuse options of a draft model where there is none."""
    options = {
        "--draft-precision": precision,
        "--draft-vocab": vocab,
        "--draft-revision": revision,
        "--draft-adapter": adapter,
    }
    for option, value in options.items():
        if value is not None:
            raise ExportError(f"{option} needs a draft model; give --draft, or leave {option} out")


def _find(
    role: str, name: str, revision: str | None, adapter: str | None, request: ExportRequest
) -> Checkpoint:
    """A checkpoint that can be exported, as far as that can be known without its weights."""
    found = checkpoints.find(role, name, revision, adapter)
    length = request.max_length or pair.DEFAULT_CONTEXT
    try:
        tracer.check_config(found.config, length, request.num_draft_tokens, request.ops)
    except ExportError as error:
        raise ExportError(f"{role} {name} ({found.kind}) cannot be exported: {error}") from error
    return replace(found, dtype=HALF_DTYPES.get(request.of(role)))


def _write(
    draft: Checkpoint | None,
    target: Checkpoint,
    num_layers: int | None,
    request: ExportRequest,
    calibration: texts.Source,
    work: Path,
    progress: Progress,
) -> None:
    """Fill a bundle's folder; with `num_layers` the draft is as many layers of the target.

    Without a `draft` the bundle has the target alone.
    """
    text = pair.check_pair(draft, target, progress)
    pair.write_tokenizer(text, target, work)
    lengths = pair.context_lengths(target, draft, request.max_length, progress)
    found = [target] if draft is None or num_layers is not None else [target, draft]
    for checkpoint, length in zip(found, lengths, strict=False):
        cost_estimate.check_costs(
            checkpoint, length, request.num_draft_tokens, request.ops, progress
        )
    head = _head(draft, target, text, request, calibration, work, progress)
    hub.check_space([remote for c in found for remote in c.remotes], work)
    models: list[ModelEntry] = []
    hashed: dict[str, FileEntry] = {}
    for checkpoint, length in zip(found, lengths, strict=False):
        drafts = checkpoint.role == "draft" or num_layers is not None
        own = head if drafts else None
        exported, weights = export_model(
            checkpoint, length, text.num_tokens, request.num_draft_tokens, request.ops,
            work / checkpoint.role, progress, num_layers, request.tolerance, own,
        )  # fmt: skip
        precision = request.of(checkpoint.role)
        roles = dict(zip((checkpoint.role, "draft"), exported, strict=False))
        if models and request.chooses and drafting.matters(exported[0]):
            pieces = _pieces(exported[0], calibration, target, work, progress)
            first = Written("target", models[0], work / "target")
            one, weights = drafting.fastest(
                first, exported[0], weights, work / "draft", pieces, own, progress, request.kinds,
                request.rounding,
            )  # fmt: skip
            exported = [one]
        elif precision in QUANTIZED_DTYPES:
            pieces = _pieces(exported[0], calibration, target, work, progress)
            exported, weights = quantise(
                roles, work / checkpoint.role, precision, pieces, own, progress, request.kinds,
                request.rounding, request.average_bits,
            )  # fmt: skip
        elif request.kinds:
            pieces = _pieces(exported[0], calibration, target, work, progress)
            folder = work / checkpoint.role
            exported = add_kinds(request.kinds, roles, folder, pieces, own, progress)
        models += exported
        hashed[exported[0].weights] = weights
    sizes = pair.vocab_sizes(text.num_tokens, [model.vocab_size for model in models], progress)
    models = [replace(m, vocab_size=size) for m, size in zip(models, sizes, strict=True)]
    with progress.step("Writing graphs for GPUs"):
        models = [best_logits.add_best_logits(model, work) for model in models]
        if draft is not None:
            models[1] = draft_loop.add_draft_loops(models[1], work, request.num_draft_tokens, head)
    for path in work.rglob(f"*{SOURCE}-*.onnx"):
        path.unlink()
    ends = tuple(t for t in pair.end_tokens(target) if 0 <= t < models[0].vocab_size)
    own_draft = models[1] if draft is not None else None
    bundle = Bundle(
        format=oldest_format(models[0], own_draft),
        specedge_version=__version__,
        num_draft_tokens=request.num_draft_tokens,
        end_tokens=ends,
        tokenizer=pair.TOKENIZER_FILE,
        chat_template=text.chat_template,
        special_tokens=text.special_tokens,
        default_sampling=pair.default_sampling(target),
        target=models[0],
        draft=own_draft,
        id_map=_write_ids(head, models[-1], work),
        hosts=None,
        files=_files(work, hashed, progress),
    )
    (work / MANIFEST).write_text(bundle.to_json(), "utf-8")


def _pieces(
    model: ModelEntry, source: texts.Source, target: Checkpoint, work: Path, progress: Progress
) -> texts.Texts:
    """A calibration text's tokens, as many as are good for a model."""
    sizes = model.vocab_size, model.context_length
    template, ends = pair.chat_writer(target, progress), pair.end_tokens(target)
    return texts.cut(source, work / pair.TOKENIZER_FILE, *sizes, template, ends)


def _head(
    draft: Checkpoint | None,
    target: Checkpoint,
    text: pair.TextMetadata,
    request: ExportRequest,
    calibration: texts.Source,
    work: Path,
    progress: Progress,
) -> list[int] | None:
    """The tokens that the draft's head is cut to, ascending; None where it stays whole."""
    if draft is None or request.draft_vocab is None:
        return None
    rows = draft_vocabulary.lm_head(tracer.meta_model(draft.config)).out_features
    return draft_vocabulary.most_frequent_tokens(
        request.draft_vocab, (calibration.name, calibration.text), work / pair.TOKENIZER_FILE,
        pair.end_tokens(target), min(text.num_tokens, rows), progress,
    )  # fmt: skip


def _write_ids(head: list[int] | None, draft: ModelEntry, work: Path) -> str | None:
    """Write which tokens a cut head has, beside the draft's first graph; the file's name."""
    if head is None:
        return None
    name = draft.graph("decoder", next(iter(draft.parity))).file
    name = f"{name.partition('decoder')[0]}{ID_MAP_FILE}"
    (work / name).write_bytes(pack_ids(head))
    return name


def _files(work: Path, hashed: dict[str, FileEntry], progress: Progress) -> dict[str, FileEntry]:
    """Every file's size and hash; those that were hashed as they were written are known."""
    paths = sorted(p for p in work.rglob("*") if p.is_file())
    names = [path.relative_to(work).as_posix() for path in paths]
    with progress.step("Hashing"):
        return {n: hashed.get(n) or file_entry(p) for n, p in zip(names, paths, strict=True)}


def _disk_trouble(error: OSError, folder: Path) -> str:
    if error.errno == errno.ENOSPC:
        return f"no space left for {folder}; free some, or name another disk with --output"
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror or error}"
