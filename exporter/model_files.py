"""The graph files of a model and the weights beside them: measured, traced and written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from specedge.errors import ExportError
from specedge.manifest import OPS, File

from .checkpoint import self_draft
from .checkpoint.loading import Loaded
from .graph import graphs, sigmoids
from .graph.peephole import straighten
from .graph.weights import Weights
from .progress import Progress
from .quiet import one_line
from .tracing import geometry, repeating, tracing
from .tracing.geometry import Geometry
from .tracing.layers import Layer
from .tracing.module_patches import swapped

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
    num_tokens = min(num_tokens, shape.padded_vocab_size)
    return ModelExport(role, loaded, shape, lengths, layers, num_tokens, folder, progress)


def own_draft(target: ModelExport, num_layers: int, num_draft_tokens: int) -> ModelExport:
    """The target's first layers as a model in the same folder."""
    try:
        loaded = self_draft.cut(target.loaded, num_layers)
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


def write(parts: list[ModelExport], ops: str) -> tuple[list[list[str]], File]:
    """Trace and write the op sets asked for, of models that share one folder and its weights.

    Which could be of each model, and the weights file's hash.
    """
    wanted = OPS if ops == "auto" else (ops,)
    first = parts[0]
    with Weights(first.folder, first.loaded.dtype, first.loaded.sources) as stored:
        written = [list(each(p, wanted, partial(write_graphs, p, stored))) for p in parts]
        finish(first, stored)
    return written, stored.file


def each(
    part: ModelExport, wanted: tuple[str, ...] | list[str], do: Callable[[str], T]
) -> dict[str, T]:
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


def write_graphs(part: ModelExport, stored: Weights, ops: str) -> None:
    """Trace a model in an op set and write its files. Raises ExportError where it cannot be."""
    if ops == "gqa":
        for layer in part.layers:
            if reason := layer.obstacle():
                raise ExportError(reason)
    with part.progress.step(f"Tracing the {part.role}"):
        with swapped(part.model, part.shape.context_length):
            traced = repeating.trace(part.model, part.shape, ops, part.layers)
        straighten(traced.graph)
        sigmoids.spell_out(traced)
        graphs.fill_without_shapes(traced)
        graphs.tidy(traced)
        graphs.widen_biases(traced.graph)
    with part.progress.step(f"Writing the {part.role}"):
        stored.attach(traced)
        graphs.write(traced, part.folder, part.lengths, ops)


def finish(part: ModelExport, stored: Weights) -> None:
    """Wait for the weights to be in their file."""
    with part.progress.step(f"Writing the {part.role}", stored.size) as advance:
        stored.finish(advance)
