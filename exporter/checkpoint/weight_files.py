"""Weight files of a checkpoint, and their tensors, memory-mapped."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import safetensors
import torch

from specedge.errors import CheckpointError

from ..libraries import first_line, translate_errors
from ..mapped_memory import register
from . import gguf_files, gguf_header
from .lazy_tensors import LazyTensor
from .placeholders import FLOATS

SAFE = ("model.safetensors", "model.safetensors.index.json")
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
# Parts of names of quantized weights and adapters; $ marks the end of a name.
_QUANTIZED_NAMES = (
    "_scale_inv$", "_scales$", ".scales$", ".qweight$", ".qzeros$", ".g_idx$", "weight_packed$",
    ".weight_scale$", ".weight_zero_point$", ".weight_shape$", ".weight_g_idx$", ".absmax$",
    ".SCB$", "lora_",
)  # fmt: skip
_DTYPES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float32",
}


def select_files(where: str, folder: Path, names: set[str]) -> list[str]:
    """Select the weight files among all file names of a folder or a repository.

    Raises CheckpointError for a damaged index in `folder`, or for several GGUF files.
    """
    for single, index in (SAFE, PICKLED):
        if single in names:
            return [single]
        if index in names:
            return shards(folder / index)
    files = sorted(filter(gguf_header.is_gguf, names))
    if not files or {*(parts := gguf_files.parts_of(where, files[0], names))} == {*files}:
        return parts if files else []
    name = where.partition(" ")[2]
    shown = ", ".join(files[:3]) + (", ..." if len(files) > 3 else "")
    raise CheckpointError(
        f"{where} has {len(files)} GGUF files ({shown}); specify one of them, such as "
        f"{name}/{files[0]}"
    )


def shards(index: Path) -> list[str]:
    """Return the files that a checkpoint's index lists. Raises CheckpointError."""
    damaged = (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError)
    with translate_errors(
        CheckpointError, f"{index} cannot be read (", "); download it again", catch=damaged
    ):
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    if any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise CheckpointError(f"{index} names files outside its folder")
    if not names:
        raise CheckpointError(f"{index} names no files; download it again")
    return names


def read_tensors(where: str, files: list[Path]) -> dict[str, torch.Tensor]:
    """Return the memory-mapped tensors of files by name. Raises CheckpointError."""
    state: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            state |= _read_pickled(file) if file.suffix == ".bin" else _read_safetensors(file)
        except (EOFError, OSError, RuntimeError, ValueError, safetensors.SafetensorError) as error:
            raise CheckpointError(
                f"{where}: {file.name} cannot be read ({first_line(error)}); download it again"
            ) from error
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{where}: {file.name} contains objects other than tensors, which specedge does "
                "not load; specify a checkpoint with model.safetensors"
            ) from error
    return state


def stored_dtype(where: str, state: dict[str, torch.Tensor]) -> str:
    """Return the type of most weights. Raises CheckpointError if it is not supported."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in state.values():
        dtype = tensor.stored if isinstance(tensor, LazyTensor) else tensor.dtype
        sizes[dtype] += tensor.numel()
    if not sizes:
        raise CheckpointError(f"{where}: its files contain no tensors; download it again")
    dtype = sizes.most_common(1)[0][0]
    if dtype not in _DTYPES:
        raise CheckpointError(
            f"{where} stores {str(dtype).removeprefix('torch.')} weights; "
            "specify one in float32, float16 or bfloat16"
        )
    return _DTYPES[dtype]


def check_names(where: str, state: dict[str, torch.Tensor], model_names: Iterable[str]) -> None:
    """Reject tensors of an unknown quantized format. Raises CheckpointError.

    `model_names` are the names of the model's tensors, which may include scales.
    """
    forms = [
        form for form in _QUANTIZED_NAMES if not any(form in f"{name}$" for name in model_names)
    ]
    for key, tensor in state.items():
        if any(form in f"{key}$" for form in forms):
            raise CheckpointError(
                f"{where}: {key} is a part of a weight in an unsupported format; "
                "specify the original checkpoint"
            )
        if tensor.is_floating_point() and tensor.dtype not in FLOATS:
            raise _unsupported_type(where, key, tensor.dtype)


def check_types(where: str, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Reject parameters that were stored in an unsupported type. Raises CheckpointError."""
    for name, parameter in parameters:
        dtype = parameter.stored if isinstance(parameter, LazyTensor) else parameter.dtype
        if dtype not in FLOATS:
            raise _unsupported_type(where, name, dtype)


def _unsupported_type(where: str, name: str, dtype: torch.dtype) -> CheckpointError:
    return CheckpointError(
        f"{where}: {name} is stored in {str(dtype).removeprefix('torch.')}, and its config.json "
        "does not specify how to dequantize it; specify the original checkpoint"
    )


def _read_safetensors(file: Path) -> dict[str, torch.Tensor]:
    with safetensors.safe_open(file, "pt") as tensors:
        return {key: register(tensors.get_tensor(key)) for key in tensors.keys()}  # noqa: SIM118


def _read_pickled(file: Path) -> dict[str, torch.Tensor]:
    """Read tensors with torch's weights-only loader, which runs no code."""
    try:
        state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        is_mapped = True
    except RuntimeError as error:
        if "mmap can only be used" not in str(error):
            raise
        # Files of torch.save before PyTorch 1.6 cannot be memory-mapped.
        state = torch.load(file, map_location="cpu", weights_only=True)
        is_mapped = False
    if not isinstance(state, dict) or not all(map(torch.is_tensor, state.values())):
        raise ValueError("it is not a dictionary of tensors")
    if is_mapped:
        for tensor in state.values():
            register(tensor)
    return state
