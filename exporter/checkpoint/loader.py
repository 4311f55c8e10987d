"""Loading of a checkpoint's model, with placeholders for large matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from specedge.errors import CheckpointError

from .. import internals
from ..libraries import quiet, translate_errors
from ..progress import Progress
from . import (
    adapters,
    folders,
    gguf_files,
    gguf_header,
    hub,
    quantized_formats,
    text_decoder,
    weight_files,
)
from .checkpoints import Checkpoint
from .eagle import EagleConfig, match_tensors, restore_rotary
from .encoder_decoder import as_decoder
from .lazy_tensors import LazyTensor, as_lazy, cast_lazily, in_stored_type
from .mtp import MTP_LAYERS, MtpConfig, MtpDraft, split_tensors
from .placeholders import WeightSources
from .quantized_tensors import QuantizedTensor

# Masks and tables that old versions of transformers saved.
_OBSOLETE_BUFFERS = (".attn.bias", ".attention.bias", "masked_bias", "inv_freq", "position_ids")


@dataclass
class LoadedCheckpoint:
    """Float32 model whose large matrices are placeholders, with the sources of their values.

    `num_tokens` is the original number of tokens of a model whose LM head was pruned, and
    `token_ids` are those of the columns of a head that was published with a reduced vocabulary.
    """

    model: torch.nn.Module
    dtype: str
    sources: WeightSources
    num_tokens: int | None = None
    token_ids: tuple[int, ...] | None = None


def load(checkpoint: Checkpoint, progress: Progress) -> LoadedCheckpoint:
    """Load the model; its `dtype` is the stored type of most weights. Raises CheckpointError."""
    where, config = f"{checkpoint.role} {checkpoint.name}", checkpoint.config
    for file_owner in (checkpoint, checkpoint.target):
        if file_owner is not None and file_owner.remote is not None:
            hub.fetch_weights(file_owner.remote, progress)
    num_tokens: int | None = None
    token_ids: tuple[int, ...] | None = None
    with quiet(), translate_errors(CheckpointError, f"{where} cannot be loaded: "):
        if isinstance(config, EagleConfig | MtpConfig):
            if isinstance(config, EagleConfig):
                model, tensors, dtype, token_ids = _load_eagle(where, checkpoint, config)
            else:
                model, tensors, dtype = _load_mtp(where, checkpoint, config)
            _set_parameters(model, tensors)
            num_tokens = int(config.layers.vocab_size)
        else:
            model, dtype = _load_model(where, checkpoint, progress)
    weight_files.check_types(where, model.named_parameters())
    _note_format(checkpoint, progress)
    if checkpoint.adapter is not None:
        model = adapters.merge(checkpoint.adapter, model, progress)
        dtype = weight_files.stored_dtype(where, dict(model.named_parameters()))
    if checkpoint.dtype is not None:
        _convert(model, getattr(torch, checkpoint.dtype))
        dtype = checkpoint.dtype
        progress.note(f"{checkpoint.role}: its matrices are converted to {dtype}")
    model.eval().requires_grad_(False)
    sources = WeightSources()
    _insert_placeholders(model, sources)
    _tie(model, sources)
    return LoadedCheckpoint(as_decoder(model), dtype, sources, num_tokens, token_ids)


def quantized_tensors(checkpoint: Checkpoint) -> list[QuantizedTensor]:
    """Return the quantized weights of a checkpoint that can be kept, memory-mapped."""
    if not checkpoint.is_quantized:
        return []
    where = f"{checkpoint.role} {checkpoint.name}"
    files = [checkpoint.folder / name for name in checkpoint.weights]
    if gguf_header.is_gguf(files[0].name):
        return gguf_files.open_files(where, files).quantized_tensors()
    state = weight_files.read_tensors(where, files)
    quantization = quantized_formats.read_format(checkpoint.raw)
    return [] if quantization is None else quantization.quantized_tensors(where, state)


def _load_model(where: str, checkpoint: Checkpoint, progress: Progress) -> tuple[Any, str]:
    """Load the model, and the type of most weights."""
    empty = internals.build_decoder(checkpoint.config)
    state, dtype = _read_state(where, checkpoint, empty, progress)
    if any(tensor.dtype == torch.float64 for tensor in state.values()):
        progress.note(f"{checkpoint.role}: its float64 weights are converted to float32")
    model, info = _load_decoder(empty, state)
    _check_loaded(where, info)
    _note_unused(checkpoint.role, sorted(info["unexpected_keys"]), progress)
    return model, dtype


def _read_state(
    where: str, checkpoint: Checkpoint, empty: Any, progress: Progress | None = None
) -> tuple[dict[str, torch.Tensor], str]:
    """Return the tensors of a decoder by name, and the type of most weights.

    Args:
        where: Role and name of the checkpoint.
        checkpoint: The checkpoint.
        empty: Its model on the meta device.
        progress: Receives a note of a GGUF file's type, if any.
    """
    files = [checkpoint.folder / name for name in checkpoint.weights]
    if gguf_header.is_gguf(files[0].name):
        opened = gguf_files.open_files(where, files)
        state, num_unused = opened.state(empty)
        if progress is not None:
            _note_gguf(checkpoint.role, opened.main_type, num_unused, progress)
        return state, opened.stored_dtype
    transposed = {
        name.rpartition(".")[2]
        for name, module in empty.named_modules()
        if isinstance(module, Conv1D)
    }
    state = weight_files.read_tensors(where, files)
    if quantization := quantized_formats.read_format(checkpoint.raw):
        state = quantization.dequantize(where, state, transposed)
    state = text_decoder.decoder_tensors(checkpoint.published, checkpoint.config, state)
    weight_files.check_names(where, state, empty.state_dict())
    return state, weight_files.stored_dtype(where, state)


def _load_eagle(
    where: str, checkpoint: Checkpoint, config: EagleConfig
) -> tuple[Any, dict[str, torch.Tensor], str, tuple[int, ...] | None]:
    """Build an EAGLE-3 head.

    What its checkpoint shares with the target is read from the target's.

    Returns:
        The model, its tensors by name, the type of most weights, and the tokens of its columns.
    """
    target = checkpoint.target
    assert target is not None
    files = [checkpoint.folder / name for name in checkpoint.weights]
    tensors = weight_files.read_tensors(where, files)
    weight_files.check_names(where, tensors, ())
    num_tokens = max(target.tokenizer.get_vocab().values()) + 1

    def of_target(name: str) -> torch.Tensor:
        empty = internals.build_decoder(target.config)
        shared, _ = _read_state(f"target {target.name}", target, empty)
        modules = {"embedding": empty.get_input_embeddings(), "head": empty.get_output_embeddings()}
        for module in (modules[name], modules["embedding"]):  # a tied head is not stored
            keys = (f"{key}.weight" for key, other in empty.named_modules() if other is module)
            if (key := next(keys, "")) in shared:
                return shared[key]
        raise CheckpointError(f"{where} has no {name}, and that of target {target.name} is unknown")

    config, state, token_ids = match_tensors(where, config, tensors, num_tokens, of_target)
    dtype = weight_files.stored_dtype(where, state)
    model = config.build()
    restore_rotary(model)
    return model, state, dtype, token_ids


def _load_mtp(
    where: str, checkpoint: Checkpoint, config: MtpConfig
) -> tuple[Any, dict[str, torch.Tensor], str]:
    """Load the decoder layer of an MTP layer.

    Returns:
        The model, its other tensors by name, and the type of most weights.
    """
    target = checkpoint.target
    assert target is not None
    whole, dtype = _read_state(where, target, internals.build_decoder(target.config))
    state, head_tensors = split_tensors(where, config, whole)
    decoder, info = _load_decoder(internals.build_decoder(config.layers), state)

    def restore_name(key: object) -> str:
        return str(key).replace("model.layers.0.", config.prefix)

    unknown = list(map(restore_name, info["unexpected_keys"]))
    if unknown:
        raise CheckpointError(
            f"{where}: its MTP layer has tensors of another kind of layer, such as {unknown[0]}; "
            "specify another --draft"
        )
    info["missing_keys"] = {*map(restore_name, info["missing_keys"])}
    info["mismatched_keys"] = {
        (restore_name(key), *sizes) for key, *sizes in info["mismatched_keys"]
    }
    _check_loaded(where, info)
    return MtpDraft(config, decoder), head_tensors, dtype


def _set_parameters(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Set parameters in float32, lazily for matrices."""
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        value = _make_lazy(tensor).to(torch.float32)
        parameter = torch.nn.Parameter(value, requires_grad=False)
        model.get_submodule(module)._parameters[leaf] = parameter


def _load_decoder(empty: Any, state: dict[str, torch.Tensor]) -> tuple[Any, Any]:
    """Load tensors into a decoder; return it and transformers' loading report."""
    loaded: tuple[Any, Any] = type(empty).from_pretrained(
        None,
        config=empty.config,
        state_dict={key: _make_lazy(tensor) for key, tensor in state.items()},
        dtype=torch.float32,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # `_check_loaded` rejects them
    )
    return loaded


def _check_loaded(where: str, info: Any) -> None:
    if other := sorted(info["mismatched_keys"]):
        key, stored_shape, expected_shape = other[0]
        raise CheckpointError(
            f"{where}: {key} is {list(stored_shape)} in its files and {list(expected_shape)} by "
            "its config; use files and config of the same model"
        )
    if lacking := sorted(map(str, info["missing_keys"])):
        raise CheckpointError(f"{where} lacks weights, such as {lacking[0]}; download it again")


def _note_unused(role: str, names: list[str], progress: Progress) -> None:
    """Note tensors that the model does not use, except MTP layers and buffers of old versions."""
    names = [name for name in names if not name.startswith(MTP_LAYERS)]
    if names := [name for name in names if not name.endswith(_OBSOLETE_BUFFERS)]:
        progress.note(
            f"{role}: the model does not use {len(names)} of its tensors, such as "
            f"{folders.printable_line(names[0])}, which are ignored"
        )


def _make_lazy(tensor: torch.Tensor) -> torch.Tensor:
    """Make a matrix lazy, so that it is renamed and joined without being read; copy vectors.

    Integers become lazy as well, to keep their stored type for `weight_files.check_types`.
    """
    if isinstance(tensor, LazyTensor):
        return tensor
    return as_lazy(tensor) if tensor.ndim > 1 or not tensor.is_floating_point() else tensor.clone()


def _convert(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast matrices to a type lazily; tied matrices stay tied."""
    replacements: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, LazyTensor) and parameter.stored != dtype:
                if id(parameter) not in replacements:
                    tensor = cast_lazily(parameter, dtype)
                    replacements[id(parameter)] = torch.nn.Parameter(tensor, requires_grad=False)
                module._parameters[name] = replacements[id(parameter)]


def _insert_placeholders(model: torch.nn.Module, sources: WeightSources) -> None:
    """Replace large matrices by placeholders and small ones by their values; keep ties."""
    replacements: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, LazyTensor):
                if id(parameter) not in replacements:
                    replacements[id(parameter)] = sources.parameter(in_stored_type(parameter))
                module._parameters[name] = replacements[id(parameter)]
        for name, buffer in module._buffers.items():
            if isinstance(buffer, LazyTensor):
                module._buffers[name] = buffer.read().to(buffer.dtype, copy=True)


def _note_format(checkpoint: Checkpoint, progress: Progress) -> None:
    """Note a quantized or pickled weight format."""
    role, file = checkpoint.role, checkpoint.folder / checkpoint.weights[0]
    if quantization := quantized_formats.read_format(checkpoint.raw):
        suffix = "" if quantization.can_be_kept else " and dequantized"
        progress.note(
            f"{role}: its weights are stored in {quantization.name}{suffix}; "
            f"the {role} is the quantized model"
        )
    if file.suffix == ".bin":
        progress.note(
            f"{role}: its weights are pickled, and were read with torch's weights-only loader, "
            "which does not run code"
        )


def _note_gguf(role: str, main_type: str, num_unused: int, progress: Progress) -> None:
    if num_unused:
        progress.note(
            f"{role}: the model does not use {num_unused} weights of its GGUF file, which are "
            "ignored"
        )
    if main_type not in gguf_files.FLOATS:
        progress.note(
            f"{role}: its weights are stored in {main_type}; the {role} is the quantized model"
        )


def _tie(model: Any, sources: WeightSources) -> None:
    """Tie an LM head that equals the embedding but is stored separately."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    a, b = (getattr(module, "weight", None) for module in (table, head))
    if a is None or b is None or a is b:
        return
    a, b = (x if (y := sources.stored_matrix(x)) is None else y for x in (a, b))
    if a.dtype == b.dtype and torch.equal(a, b):
        head.weight = table.weight
