"""Export of a draft and a target model to a bundle."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from specedge import destination
from specedge.bundle import FORMAT, MANIFEST, Bundle, pack_ids, store, unpack_ids
from specedge.bundle.graph_variants import OPS
from specedge.bundle.integrity import file_entry
from specedge.bundle.manifest import DraftTokenizer, FileEntry, MeasuredAcceptance, ModelEntry
from specedge.bundle.precision import HALF_DTYPES, KEEP
from specedge.errors import ExportError
from specedge.version import __version__

from . import cost_estimate, internals, mapped_memory
from .checkpoint import checkpoints, draft_vocabulary, eagle, hub, loader, mtp, self_draft
from .checkpoint.checkpoints import Checkpoint
from .checkpoint.draft_heads import DraftHeadConfig
from .checkpoint.eagle import EagleConfig
from .graph import best_logits, draft_loop
from .graph.external_data import LazyWeights
from .graph.graphs import SOURCE
from .model_export import REJECTION, export_model
from .progress import Progress
from .quantization import draft_acceptance, hidden_state_conventions, texts
from .quantization.float_model import FloatModel
from .quantization.quantizer import add_variants, quantize
from .quantization.target_states import TargetStates
from .request import ExportRequest, PathOrName
from .tokenizers import pair
from .tokenizers.vocabulary_map import VocabularyMap
from .tracing import tracer
from .verification.batched_graphs import add_batched_graphs
from .verification.spectrograms import add_log_mel, load_extractor

READINGS_FILE = "draft-readings.bin"


def export(
    draft: ExportRequest | PathOrName | None,
    target: PathOrName = "",
    output: PathOrName | None = None,
    *,
    progress: Progress | None = None,
    **options: Any,
) -> Bundle:
    """Export a target, and optionally a draft model: find, check, trace, verify, quantize, write.

    `export(request)` and `export(draft, target, output, **options)` are the same, where `options`
    are the other fields of the request.

    Args:
        draft: The request, or its draft model.
        target: Target model, unless `draft` is a request.
        output: Folder of the bundle, unless `draft` is a request.
        progress: Receives notes and the durations of steps.
        options: Other fields of `ExportRequest`, unless `draft` is a request.

    Returns:
        The bundle.

    Raises:
        SpecEdgeError: The models cannot be exported, or are not compatible.
        ValueError: An option is invalid.
    """
    if isinstance(draft, ExportRequest):
        request = draft
    else:
        request = ExportRequest(draft, target, output, **options)
    progress = progress or Progress()
    calibration = texts.read_source(
        None if request.calibrate is None else os.fspath(request.calibrate)
    )
    try:
        with destination.destination(request.folder) as work, _explain_ops(request):
            all_checkpoints = _find(request)
            with mapped_memory.limit_mapped_memory():
                request = _resolve(request, all_checkpoints)
                job = _check(request, all_checkpoints, calibration, work, progress)
                job = _check_head(job)
                entries, hashes = list[ModelEntry](), dict[str, FileEntry]()
                encoders = set[str]()
                for checkpoint, length in job.exports():
                    traced, weights, lazy = _trace_and_verify(job, checkpoint, length, encoders)
                    quantized, weights = _quantize(
                        job, checkpoint, traced, weights, lazy, entries[0] if entries else None
                    )
                    entries += quantized
                    hashes[quantized[0].weights] = weights
                _write(job, entries, hashes)
    except OSError as error:
        raise ExportError(_describe_disk_error(error, request.folder)) from error
    bundle = Bundle.read(request.folder)
    store.record_export(bundle)
    if request.output is None:
        store.set_default(request.folder)
    return bundle


@contextmanager
def _explain_ops(request: ExportRequest) -> Iterator[None]:
    """Explain the error that a model does not support operators which only --cache requires."""
    try:
        yield
    except ExportError as error:
        if request.has_int8_caches and str(error).endswith(f"{REJECTION}gqa"):
            raise type(error)(f"{error}, which --cache int8 requires") from error
        raise


@dataclass(frozen=True)
class _Job:
    """Validated export, before its models are loaded.

    `checkpoints` are those with separate weights, the target first. `draft_ids` are the target's
    tokens that the draft's LM head is reduced to, ascending.
    """

    request: ExportRequest
    checkpoints: list[Checkpoint]
    calibration: texts.TextSource
    work: Path
    progress: Progress
    text: pair.TextMetadata
    lengths: tuple[int, int]
    draft_ids: Sequence[int] | None

    def exports(self) -> Iterator[tuple[Checkpoint, int]]:
        """Yield each checkpoint with its context length."""
        return zip(self.checkpoints, self.lengths, strict=False)

    def is_translated(self, checkpoint: Checkpoint) -> bool:
        """Return True for a draft model with another tokenizer."""
        return checkpoint.role == "draft" and self.text.vocabulary is not None

    def head_of(self, checkpoint: Checkpoint) -> Sequence[int] | None:
        """Return the ids of a model's pruned LM head, by its own tokenizer; None for all."""
        if self.is_translated(checkpoint) and self.text.vocabulary is not None:
            return self.text.vocabulary.draft_ids
        drafts = checkpoint.role == "draft" or self.request.num_draft_layers is not None
        return self.draft_ids if drafts else None

    def num_tokens(self, checkpoint: Checkpoint) -> int:
        """Return the number of ids of a model's tokenizer."""
        if self.is_translated(checkpoint):
            return pair.num_tokens_of(checkpoint)
        return self.text.num_tokens

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layers of the target whose hidden states the draft reads."""
        config = self.checkpoints[-1].config
        return config.hidden.layers if isinstance(config, DraftHeadConfig) else ()

    def calibration_texts(
        self, checkpoint: Checkpoint, model: ModelEntry
    ) -> texts.CalibrationTexts:
        """Tokenize the calibration set for a model."""
        is_translated = self.is_translated(checkpoint)
        file = pair.DRAFT_TOKENIZER_FILE if is_translated else pair.TOKENIZER_FILE
        author = checkpoint if is_translated else self.checkpoints[0]
        windows = texts.tokenize(
            self.calibration, self.work / file, model.vocab_size, model.context_length,
            pair.chat_writer(author, self.progress),
        )  # fmt: skip
        rounding = self.request.rounding_of(checkpoint.role)
        return windows.select(rounding, self.request.has_int8_caches)


def _find(request: ExportRequest) -> list[Checkpoint]:
    """Find the checkpoints with separate weights, and check that their configs can be exported."""

    def find(
        role: str, name: str, revision: str | None, target: Checkpoint | None = None
    ) -> Checkpoint:
        if target is not None and name == mtp.NAME:
            checkpoint = _mtp_layer(request, target)
        else:
            checkpoint = checkpoints.find(role, name, revision, request.adapter_of(role))
        if target is not None and isinstance(checkpoint.config, EagleConfig):
            checkpoint = _pair_head(request, checkpoint, checkpoint.config, target)
        length = request.max_length or pair.DEFAULT_CONTEXT
        try:
            tracer.check_config(
                checkpoint.config, length, request.num_draft_tokens, request.required_ops
            )
        except ExportError as error:
            raise ExportError(
                f"{role} {name} ({checkpoint.model_type}) cannot be exported: {error}"
            ) from error
        return replace(checkpoint, dtype=HALF_DTYPES.get(request.precision_of(role)))

    target = find("target", os.fspath(request.target), request.target_revision)
    if request.num_draft_layers is not None:
        self_draft.check_num_layers(request.num_draft_layers, target)
    elif request.draft_name is not None:
        return [target, find("draft", request.draft_name, request.draft_revision, target)]
    return [target]


def _pair_head(
    request: ExportRequest, draft: Checkpoint, config: EagleConfig, target: Checkpoint
) -> Checkpoint:
    """Return an EAGLE-3 head that reads the hidden states of its target. Raises ExportError."""
    options = {"--draft-vocab": request.draft_vocab, "--draft-adapter": request.draft_adapter}
    for option, value in options.items():
        if value is not None:
            raise ExportError(
                f"{option} does not apply to draft {draft.name}, which is an EAGLE-3 head with "
                f"{config.columns} tokens; omit it"
            )
    paired = eagle.pair_with(config, draft.name, target.name, target.config)
    return replace(draft, config=paired, published=paired, target=target)


def _mtp_layer(request: ExportRequest, target: Checkpoint) -> Checkpoint:
    """Return the target's MTP layer as a draft. Raises ExportError."""
    options = {"--draft-revision": request.draft_revision, "--draft-adapter": request.draft_adapter}
    for option, value in options.items():
        if value is not None:
            raise ExportError(f"{option} does not apply to --draft mtp; omit it")
    config = mtp.read_config(f"target {target.name}", target.config)
    source = replace(target.source, id=f"{target.source.id[:480]} {mtp.NAME}")
    return replace(
        target, role="draft", name=mtp.NAME, source=source, published=config, config=config,
        tokenizer=None, generation={}, adapter=None, remote=None, is_quantized=False, target=target,
    )  # fmt: skip


def _resolve(request: ExportRequest, all_checkpoints: list[Checkpoint]) -> ExportRequest:
    """Return the request with the precisions of both models. Raises ExportError."""
    precisions = (request.precision, request.draft_precision)
    for checkpoint, precision in zip(all_checkpoints, precisions, strict=False):
        if precision == KEEP and not checkpoint.is_quantized:
            option = "--draft-precision" if checkpoint.role == "draft" else "--precision"
            raise ExportError(
                f"{checkpoint.role} {checkpoint.name} has no quantized weights to keep; "
                f"omit {option}, or specify another precision"
            )
    target, *drafts = all_checkpoints
    try:
        return request.with_precisions(
            target.is_quantized, drafts[0].is_quantized if drafts else None
        )
    except ValueError as error:
        raise ExportError(str(error)) from error


def _check(
    request: ExportRequest,
    all_checkpoints: list[Checkpoint],
    calibration: texts.TextSource,
    work: Path,
    progress: Progress,
) -> _Job:
    """Check compatibility of the models, memory and disk space; write the tokenizer."""
    target, draft = all_checkpoints[0], None if request.draft_name is None else all_checkpoints[-1]
    text = pair.check_pair(draft, target, progress)
    if target.config.is_encoder_decoder and internals.reads_speech(target.config):
        load_extractor(target)  # before anything takes time
    pair.write_tokenizer(text, target, work)
    lengths = pair.context_lengths(target, draft, request.max_length, progress)
    for checkpoint, length in zip(all_checkpoints, lengths, strict=False):
        cost_estimate.check_costs(
            checkpoint, length, request.num_draft_tokens, request.required_ops, progress
        )
    ids: Sequence[int] | None = None
    if text.vocabulary is not None:
        ids = text.vocabulary.target_ids
        tokenizer = Tokenizer.from_file(str(work / pair.TOKENIZER_FILE))
        tokens = tokenizer.encode(calibration.text, add_special_tokens=False).ids
        progress.note(text.vocabulary.describe_coverage(tokens, calibration.name))
    if (mask_token := all_checkpoints[-1].mask_token) is not None:
        progress.note(f"draft: drafts all tokens of a round in one pass, by token {mask_token}")
    if draft is not None and request.draft_vocab is not None:
        rows = draft_vocabulary.lm_head(tracer.meta_model(draft.config)).out_features
        ids = draft_vocabulary.most_frequent_tokens(
            request.draft_vocab, (calibration.name, calibration.text), work / pair.TOKENIZER_FILE,
            pair.end_tokens(target), ids or range(min(text.num_tokens, rows)), progress,
        )  # fmt: skip
        if text.vocabulary is not None:
            text = replace(text, vocabulary=text.vocabulary.restricted(ids))
    hub.check_space([remote for c in all_checkpoints for remote in c.remotes], work)
    job = _Job(request, all_checkpoints, calibration, work, progress, text, lengths, ids)
    progress.predicted = cost_estimate.predict_seconds(all_checkpoints, request)
    return job


def _check_head(job: _Job) -> _Job:
    """Check a draft head's tensors, and choose the hidden states that it reads.

    Faults of its files thus show before the target is exported.
    """
    (target, *_), draft, progress = job.checkpoints, job.checkpoints[-1], job.progress
    config = draft.config
    if not isinstance(config, DraftHeadConfig):
        return job
    measured: list[hidden_state_conventions.MeasuredConvention] = []
    with progress.step("Checking the draft's weights"):
        head = loader.load(draft, progress)
        if len(config.conventions) > 1:
            measured = hidden_state_conventions.measure_conventions(
                loader.load(target, progress), head, config.conventions, job.calibration,
                job.work / pair.TOKENIZER_FILE, job.text.num_tokens, min(job.lengths),
            )  # fmt: skip
    if measured:
        rates = "; ".join(convention.describe() for convention in measured)
        progress.note(
            "draft: acceptance rates of its first and second tokens, by the hidden states that it "
            f"reads: {rates}"
        )
        config = max(measured, key=lambda convention: convention.num_accepted).config
    elif len(config.conventions) > 1:
        progress.note(
            "draft: the texts are too short to compare the hidden states that it may read"
        )
    progress.note(config.describe())
    draft = replace(draft, config=config, published=config)
    return replace(job, checkpoints=[target, draft])


def _trace_and_verify(
    job: _Job, checkpoint: Checkpoint, length: int, encoders: set[str]
) -> tuple[list[ModelEntry], FileEntry, LazyWeights | None]:
    """Write a checkpoint's graphs in float32, compare them with PyTorch, and hash its weights.

    The result is that of `export_model`.

    The attention operators "auto" are GroupQueryAttention if all models support it and its passes
    are batch-invariant, else standard ONNX.
    """
    folder, ops = job.work / checkpoint.role, job.request.required_ops
    export_in = partial(
        export_model, checkpoint, length, job.num_tokens(checkpoint), job.request, folder,
        job.progress, job.head_of(checkpoint), encoders,
        job.hidden_layers if checkpoint.role == "target" else (),
    )  # fmt: skip
    if ops != "auto":
        traced = export_in(OPS if ops == "all" else (ops,))
        if job.request.has_int8_caches and any("gqa" not in entry.parity for entry in traced[0]):
            raise ExportError(
                f"{checkpoint.role}: --cache int8 requires GroupQueryAttention, which it does not "
                "support; omit --cache, or specify fp16"
            )
        return traced
    try:
        return export_in(("gqa",), requires_invariance=True)
    except ExportError as error:
        reason = str(error).removeprefix(f"{checkpoint.role}: ").removesuffix(f"{REJECTION}gqa")
    job.progress.note(f"{checkpoint.role}: no gqa graphs, because {reason}")
    shutil.rmtree(folder)
    return export_in(("onnx",))


def _quantize(
    job: _Job,
    checkpoint: Checkpoint,
    traced: list[ModelEntry],
    weights: FileEntry,
    lazy: LazyWeights | None,
    target: ModelEntry | None,
) -> tuple[list[ModelEntry], FileEntry]:
    """Convert a checkpoint's models to the requested precision, and add further graph variants.

    `target` is that of a separate draft model.
    """
    request, progress, ids = job.request, job.progress, _read_ids(job.work, traced[-1])
    folder, suffixes = job.work / checkpoint.role, job.request.variant_suffixes
    precision, tensors = request.precision_of(checkpoint.role), loader.quantized_tensors(checkpoint)
    roles = dict(zip((checkpoint.role, "draft"), traced, strict=False))
    if lazy is None and not suffixes:
        return traced, weights
    pieces, fused = job.calibration_texts(checkpoint, traced[0]), None
    if target is not None and traced[0].reads_hidden:
        states = TargetStates(
            FloatModel("target", target, job.work / "target"),
            FloatModel("draft", traced[0], folder),
        )
        with progress.step("Running the target over the draft's texts"):
            fused, pieces = states.of_texts(pieces)
        if fused is None:
            progress.note(
                "draft: it is calibrated with random hidden states, because ONNX Runtime has no "
                "kernels for the target on this machine"
            )
    if lazy is not None:  # not an unquantized draft model of a quantized target
        return quantize(
            roles, folder, precision, pieces, ids, progress, suffixes,
            request.rounding_of(checkpoint.role), request.average_bits, tensors, lazy, fused,
        )  # fmt: skip
    return add_variants(suffixes, roles, folder, pieces, ids, progress, fused), weights


def _write(job: _Job, models: list[ModelEntry], hashes: dict[str, FileEntry]) -> None:
    """Write the GPU graphs and the manifest."""
    request, work, progress = job.request, job.work, job.progress
    has_draft, target = request.draft_name is not None, job.checkpoints[0]
    vocabulary = job.text.vocabulary
    same = models if vocabulary is None else models[:1]
    sizes = pair.vocab_sizes(job.text.num_tokens, [m.vocab_size for m in same], progress)
    models[: len(same)] = [replace(m, vocab_size=n) for m, n in zip(same, sizes, strict=True)]
    if has_draft:
        models[1] = replace(models[1], mask_token=job.checkpoints[-1].mask_token)
        if vocabulary is not None:
            models[1] = _write_translation(vocabulary, models[1], work)
        models[1] = replace(models[1], acceptance=_measure_acceptance(job, *models))
    models = [
        model if model.reads_hidden else add_batched_graphs(role, model, work, progress)
        for role, model in zip(("target", "draft"), models, strict=False)
    ]
    models[0] = add_log_mel(models[0], target, work)
    with progress.step("Writing graphs for GPUs"):
        models = [best_logits.add_best_logits(model, work) for model in models]
        # Each step reads the token that was drafted before, by its id.
        if has_draft and models[1].mask_token is None and vocabulary is None:
            models[1] = draft_loop.add_draft_loops(
                models[1], work, request.num_draft_tokens, _read_ids(work, models[1])
            )
    for path in work.rglob(f"*{SOURCE}-*.onnx"):
        path.unlink()
    ends = tuple(t for t in pair.end_tokens(target) if 0 <= t < models[0].vocab_size)
    pair.note_end_tokens(target, ends, progress)
    decoder_start, decoder_prefix = pair.decoder_tokens(target)
    bundle = Bundle(
        format=FORMAT,
        specedge_version=__version__,
        num_draft_tokens=request.num_draft_tokens,
        end_tokens=ends,
        tokenizer=pair.TOKENIZER_FILE,
        chat_template=job.text.chat_template,
        special_tokens=job.text.special_tokens,
        default_sampling=pair.default_sampling(target),
        models=dict(zip(("target", "draft"), models, strict=False)),
        hosts=None,
        files=_describe_files(work, hashes, progress),
        decoder_start=decoder_start,
        decoder_prefix=decoder_prefix,
        decoding_defaults=pair.decoding_defaults(target, models[0].vocab_size, progress),
    )
    (work / MANIFEST).write_text(bundle.to_json(), "utf-8")


def _measure_acceptance(
    job: _Job, target: ModelEntry, draft: ModelEntry
) -> MeasuredAcceptance | None:
    """Measure the draft's acceptance rates, for the planner."""
    folder = job.work / job.checkpoints[-1].role
    return draft_acceptance.measure_acceptance(
        FloatModel("target", target, job.work / "target"),
        FloatModel("draft", draft, folder, _read_ids(job.work, draft)),
        job.calibration,
        job.work / pair.TOKENIZER_FILE,
        pair.end_tokens(job.checkpoints[0]),
        job.progress,
        job.request.num_draft_tokens,
        sum(pair.decoder_tokens(job.checkpoints[0]), ()),
        None if job.text.vocabulary is None else job.text.vocabulary.readings,
    )


def _write_translation(vocabulary: VocabularyMap, draft: ModelEntry, work: Path) -> ModelEntry:
    """Write the map of a draft with another tokenizer; return its entry."""
    assert draft.token_ids is not None
    (work / draft.token_ids).write_bytes(pack_ids(vocabulary.target_ids))
    (work / READINGS_FILE).write_bytes(vocabulary.readings.pack())
    files = pair.DRAFT_TOKENIZER_FILE, READINGS_FILE
    return replace(draft, tokenizer=DraftTokenizer(*files, vocabulary.readings.prefix))


def _read_ids(work: Path, model: ModelEntry) -> np.ndarray | None:
    """Return the tokens of a model's reduced vocabulary, [n]; None for all."""
    name = model.token_ids
    return None if name is None else np.array(unpack_ids((work / name).read_bytes()))


def _describe_files(
    work: Path, hashes: dict[str, FileEntry], progress: Progress
) -> dict[str, FileEntry]:
    """Return the size and hash of every file; `hashes` has those computed while writing."""
    paths = sorted(p for p in work.rglob("*") if p.is_file())
    names = [path.relative_to(work).as_posix() for path in paths]
    with progress.step("Hashing"):
        return {n: hashes.get(n) or file_entry(p) for n, p in zip(names, paths, strict=True)}


def _describe_disk_error(error: OSError, folder: Path) -> str:
    if error.errno == errno.ENOSPC:
        return f"no space left for {folder}; free disk space, or specify another disk with --output"
    file = f"{error.filename}: " if error.filename else ""
    return f"{file}{error.strerror or error}"
