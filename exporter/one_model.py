"""One model into its folder of a bundle: traced, written, and played against PyTorch."""

from __future__ import annotations

import gc
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from specedge.errors import ExportError
from specedge.manifest import OPS, Cache, File, Model, Parity

from . import checkpoints, geometry, graphs, licences, parity, reference, tracing, weights
from .checkpoints import Checkpoint, Loaded
from .geometry import Geometry
from .layers import Layer
from .peephole import straighten
from .playing import Player
from .progress import Progress
from .reference import Reference
from .sources import Sources
from .swaps import fix_rotary, swapped
from .weights import Weights

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
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
        """The PyTorch model, whose large matrices may be stand-ins."""
        return self.loaded.model


def export_model(
    checkpoint: Checkpoint,
    context_length: int,
    num_tokens: int,
    num_draft_tokens: int,
    ops: str,
    folder: Path,
    progress: Progress,
) -> tuple[Model, File]:
    """Write one model's files into a new folder and compare them with it; its weights' hash, too.

    `ops` is "auto" or the op set wanted. Raises ExportError.
    """
    role = checkpoint.role
    folder.mkdir()
    licences.copy(role, checkpoint.folder, checkpoint.source.licence, folder, progress)
    gc.collect()  # what the model before this one left in cycles
    with progress.step(f"Loading the {role}"):
        loaded = checkpoints.load(checkpoint, progress)
    with tracing.refusal(checkpoint):
        _note_rotary(loaded.model, context_length, role, progress)
        part = measured(
            role, loaded, context_length, num_draft_tokens, num_tokens, folder, progress
        )
        num_parameters = reference.num_parameters(part.model)
        written, file = write(part, ops)
        references = _references(part)
        sharp = _sharpened(part, references, folder.parent.parent / f"{role}-sharpened")
        loaded.sources.close()  # from here on ONNX Runtime reads the weights
        part = replace(part, loaded=Loaded(torch.nn.Module(), loaded.dtype, Sources()))
        dtype = loaded.dtype
        del loaded
        gc.collect()
        reports = _compare(part, written, references)
        if sharp is not None:
            reports = _compare_sharpened(sharp, reports)
    for path in (folder / x.file(one) for x in part.lengths for one in OPS if one not in reports):
        path.unlink(missing_ok=True)
    described = Model(
        source=checkpoint.source,
        architecture=checkpoint.kind,
        num_parameters=num_parameters,
        vocab_size=part.num_tokens,
        padded_vocab_size=part.shape.padded_vocab_size,
        context_length=context_length,
        dtype="float32",
        weights_dtype=dtype,
        cache=Cache("float32", part.shape.capacity, part.shape.layers),
        weights=f"{role}/{weights.FILE}",
        graphs=tuple(length.entry(role, one) for one in reports for length in part.lengths),
        parity=reports,
    )
    return described, file


def measured(
    role: str,
    loaded: Loaded,
    context_length: int,
    num_draft_tokens: int,
    num_tokens: int,
    folder: Path,
    progress: Progress,
) -> Part:
    """Run the model to see what it keeps and what each of its layers does."""
    unread = loaded.sources.reading(loaded.model, only_shapes=True)
    with progress.step(f"Loading the {role}"), unread:
        shape = geometry.measure(loaded.model, context_length, num_draft_tokens)
        layers = tracing.observe(loaded.model, shape)
    lengths = graphs.lengths(num_draft_tokens, context_length)
    num_tokens = min(num_tokens, shape.padded_vocab_size)
    return Part(role, loaded, shape, lengths, layers, num_tokens, folder, progress)


def write(part: Part, ops: str) -> tuple[list[str], File]:
    """Trace and write the op sets asked for; which could be, and the weights file's hash."""
    wanted = OPS if ops == "auto" else (ops,)
    with Weights(part.folder, part.loaded.dtype, part.loaded.sources) as stored:
        written = _each(part, wanted, lambda one: _write_graphs(part, one, stored))
        _finish(part, stored)
    return list(written), stored.file


def _each(part: Part, wanted: tuple[str, ...] | list[str], do: Callable[[str], T]) -> dict[str, T]:
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


def _write_graphs(part: Part, ops: str, stored: Weights) -> None:
    if ops == "gqa":
        for layer in part.layers:
            if reason := layer.obstacle():
                raise ExportError(reason)
    with part.progress.step(f"Tracing the {part.role}"):
        with swapped(part.model, part.shape.context_length):
            traced = tracing.trace(part.model, part.shape, ops, part.layers)
        straighten(traced.graph)
        graphs.fill_without_shapes(traced)
        graphs.tidy(traced)
        graphs.widen_biases(traced.graph)
    with part.progress.step(f"Writing the {part.role}"):
        stored.attach(traced)
        graphs.write(traced, part.folder, part.lengths, ops)


def _finish(part: Part, stored: Weights) -> None:
    with part.progress.step(f"Writing the {part.role}", stored.size) as advance:
        stored.finish(advance)


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
    """Play each op set's files against what PyTorch computed, all op sets at a time.

    While ONNX Runtime loads one, which takes it one core, the other is running.
    """
    players = {ops: Player(part.folder, part.lengths, part.shape, ops) for ops in wanted}
    total = sum(player.num_stages for player in players.values())
    stopped = threading.Event()
    with (
        part.progress.step(f"Comparing the {part.role}", total) as advance,
        ThreadPoolExecutor(len(players)) as threads,
    ):

        def go_on(amount: int) -> None:
            if stopped.is_set():
                raise KeyboardInterrupt
            advance(amount)

        def played(ops: str) -> parity.Findings:
            return parity.measure(part.role, references, players[ops], go_on)

        try:
            found = {ops: threads.submit(played, ops) for ops in wanted}
            return _each(part, wanted, lambda ops: _judge(part, players[ops], found[ops].result()))
        except BaseException:
            stopped.set()
            raise


def _judge(part: Part, player: Player, found: parity.Findings) -> Parity:
    """Note what is not as it should be."""
    who, progress = f"{part.role} ({player.ops})", part.progress
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


def _compare_sharpened(sharp: Part, plain: dict[str, Parity]) -> dict[str, Parity]:
    """Compare again, in a folder that goes when that is done."""
    sharp.folder.mkdir()
    with Weights(sharp.folder, "float32") as stored:
        for ops in plain:
            _write_graphs(sharp, ops, stored)
        _finish(sharp, stored)
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
