"""A checkpoint's model, with placeholders for large matrices and what is said of its weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from specedge.errors import CheckpointError

from ..progress import Progress
from ..quiet import explained, quiet
from . import adapters, folders, gguf_files, hub, quantised, text_part, weight_files
from .checkpoints import Checkpoint
from .lazy_tensors import LazyTensor, lazy, rounded, stored
from .lazy_weights import Sources

# Masks and tables of old versions; transformers knows those of some families.
_NEEDLESS = (".attn.bias", ".attention.bias", "masked_bias", "inv_freq", "position_ids")


@dataclass
class Loaded:
    """A model in float32 whose large matrices are placeholders, and where their numbers are.

    Of one whose head was cut, `num_tokens` are those that it had.
    """

    model: torch.nn.Module
    dtype: str
    sources: Sources
    num_tokens: int | None = None


def load(checkpoint: Checkpoint, progress: Progress) -> Loaded:
    """The model, with `dtype` the type that most of its weights are stored in."""
    where = f"{checkpoint.role} {checkpoint.name}"
    if checkpoint.remote is not None:
        hub.fetch_weights(checkpoint.remote, progress)
    with quiet(), explained(CheckpointError, f"{where} cannot be loaded: "):
        model, info, dtype = _model(where, checkpoint, progress)
    _check_loaded(where, model, info)
    _note_left_out(checkpoint.role, sorted(info["unexpected_keys"]), progress)
    _note_format(where, checkpoint, model, progress)
    if checkpoint.adapter is not None:
        model = adapters.merged(checkpoint.adapter, model, progress)
        dtype = weight_files.stored_dtype(where, dict(model.named_parameters()))
    if checkpoint.dtype is not None:
        _round(model, getattr(torch, checkpoint.dtype))
        dtype = checkpoint.dtype
        progress.note(f"{checkpoint.role}: its matrices are rounded to {dtype}")
    model.eval().requires_grad_(False)
    sources = Sources()
    _put_placeholders(model, sources)
    _tie(model, sources)
    return Loaded(model, dtype, sources)


def _model(where: str, checkpoint: Checkpoint, progress: Progress) -> tuple[Any, Any, str]:
    """The model, what transformers says of its loading, and the type of most weights."""
    files = [checkpoint.folder / name for name in checkpoint.weights]
    if files[0].suffix == ".gguf":
        model, info = gguf_files.load(files[0], checkpoint.config)
        return model, info, gguf_files.stored_dtype(where, files[0])
    state = quantised.widened(where, checkpoint.raw, weight_files.read(where, files))
    state = text_part.named(checkpoint.published, checkpoint.config, state)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(
            copy.deepcopy(checkpoint.config), trust_remote_code=False
        )
    weight_files.check_forms(where, state, empty.state_dict())
    dtype = weight_files.stored_dtype(where, state)
    if any(tensor.dtype == torch.float64 for tensor in state.values()):
        progress.note(f"{checkpoint.role}: its weights in float64 are rounded to float32")
    model, info = type(empty).from_pretrained(
        None,
        config=empty.config,
        state_dict={key: _lazy(tensor) for key, tensor in state.items()},
        dtype=torch.float32,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused with their names
    )
    return model, info, dtype


def _check_loaded(where: str, model: torch.nn.Module, info: Any) -> None:
    if other := sorted(info["mismatched_keys"]):
        key, found, wanted = other[0]
        raise CheckpointError(
            f"{where}: {key} is {list(found)} in its files and {list(wanted)} by its config; "
            "give the files and the config of one model"
        )
    if lacking := sorted(map(str, info["missing_keys"])):
        raise CheckpointError(f"{where} lacks weights, such as {lacking[0]}; download it again")
    weight_files.check_types(where, model.named_parameters())


def _note_left_out(role: str, names: list[str], progress: Progress) -> None:
    """Say what has no place in the model, apart from buffers of old versions."""
    if names := [name for name in names if not name.endswith(_NEEDLESS)]:
        progress.note(
            f"{role}: the model has no place for {len(names)} of its tensors, such as "
            f"{folders.line(names[0])}, which are left out"
        )


def _lazy(tensor: torch.Tensor) -> torch.Tensor:
    """A matrix that is renamed and joined without being read; what is small is read at once."""
    if isinstance(tensor, LazyTensor):
        return tensor
    # Of what is no float it is remembered what it was.
    return lazy(tensor) if tensor.ndim > 1 or not tensor.is_floating_point() else tensor.clone()


def _round(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Have matrices rounded to a type when they are read; what is tied stays so."""
    known: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, LazyTensor) and parameter.stored != dtype:
                if id(parameter) not in known:
                    tensor = rounded(parameter, dtype)
                    known[id(parameter)] = torch.nn.Parameter(tensor, requires_grad=False)
                module._parameters[name] = known[id(parameter)]


def _put_placeholders(model: torch.nn.Module, sources: Sources) -> None:
    """Large matrices get placeholders, smaller ones their numbers; what is tied stays so."""
    known: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, LazyTensor):
                if id(parameter) not in known:
                    tensor = sources.placeholder(stored(parameter))
                    known[id(parameter)] = torch.nn.Parameter(tensor, requires_grad=False)
                module._parameters[name] = known[id(parameter)]
        for name, buffer in module._buffers.items():
            if isinstance(buffer, LazyTensor):
                module._buffers[name] = buffer.read().to(buffer.dtype, copy=True)


def _note_format(where: str, checkpoint: Checkpoint, model: Any, progress: Progress) -> None:
    """Say what is special about how the weights are stored."""
    role, file = checkpoint.role, checkpoint.folder / checkpoint.weights[0]
    how = quantised.method(checkpoint.raw)
    if file.suffix == ".gguf":
        kind = gguf_files.kind(where, file)
        how = None if kind in gguf_files.FLOATS else kind
        if count := gguf_files.left_out(where, file, model):
            progress.note(
                f"{role}: the model has no place for {count} numbers of its GGUF file, which are "
                "left out"
            )
    if how is not None:
        progress.note(
            f"{role}: its weights are stored in {how} and widened to what they stand for; "
            f"the {role} is this quantised model"
        )
    if file.suffix == ".bin":
        progress.note(
            f"{role}: its weights are pickled, and were read with torch's weights-only loader, "
            "which runs no code"
        )


def _tie(model: Any, sources: Sources) -> None:
    """An output matrix that is stored twice but equals the embedding is the embedding."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    a, b = (sources.behind(getattr(module, "weight", None)) for module in (table, head))
    if a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b):
        head.weight = table.weight
