"""Which files hold a checkpoint's weights, and the tensors in them, mapped and not read."""

from __future__ import annotations

import json
import pickle
import re
from collections import Counter
from pathlib import Path

import safetensors
import torch

from specedge.errors import CheckpointError

from ..quiet import one_line
from .lazy_tensors import LazyTensor

SAFE = ("model.safetensors", "model.safetensors.index.json")
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_DTYPES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float32",
}


def held(where: str, folder: Path, names: set[str]) -> list[str]:
    """The files with the weights, of all that a folder or a repository has; none without any.

    An index is read in `folder`. Raises CheckpointError where it cannot be, or GGUF files abound.
    """
    for single, index in (SAFE, PICKLED):
        if single in names:
            return [single]
        if index in names:
            return shards(folder / index)
    found = sorted(name for name in names if name.endswith(".gguf"))
    if len(found) > 1:
        name = where.partition(" ")[2]
        shown = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
        raise CheckpointError(
            f"{where} has {len(found)} GGUF files ({shown}); give one, as {name}/{found[0]}"
        )
    return found


def check_gguf(where: str, name: str) -> None:
    """Refuse one piece of a GGUF file that was split. Raises CheckpointError."""
    if re.search(r"-\d{5}-of-\d{5}\.gguf$", name):
        raise CheckpointError(
            f"{where}: {name} is a part of a split GGUF file, which transformers does not read; "
            "join the parts with 'llama-gguf-split --merge'"
        )


def shards(index: Path) -> list[str]:
    """The files that a checkpoint's index names."""
    try:
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{index} cannot be read ({one_line(error)}); download it again"
        ) from error
    if any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise CheckpointError(f"{index} names files outside its folder")
    return names


def read(where: str, files: list[Path]) -> dict[str, torch.Tensor]:
    """Every tensor by its name; of a truncated file an error. Raises CheckpointError."""
    state: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            state |= _pickled(file) if file.suffix == ".bin" else _safe(file)
        except (EOFError, OSError, RuntimeError, ValueError, safetensors.SafetensorError) as error:
            raise CheckpointError(
                f"{where}: {file.name} cannot be read ({one_line(error)}); download it again"
            ) from error
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{where}: {file.name} holds more than tensors, which specedge does not load; "
                "give a checkpoint with model.safetensors"
            ) from error
    return state


def stored_dtype(where: str, state: dict[str, torch.Tensor]) -> str:
    """The type of most weights."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in state.values():
        kind = tensor.stored if isinstance(tensor, LazyTensor) else tensor.dtype
        sizes[kind] += tensor.numel()
    kind = sizes.most_common(1)[0][0] if sizes else None
    if kind not in _DTYPES:
        raise CheckpointError(
            f"{where} stores {str(kind).removeprefix('torch.')} weights; "
            "give one in float32, float16 or bfloat16"
        )
    return _DTYPES[kind]


def _safe(file: Path) -> dict[str, torch.Tensor]:
    with safetensors.safe_open(file, "pt") as tensors:
        return {key: tensors.get_tensor(key) for key in tensors.keys()}  # noqa: SIM118


def _pickled(file: Path) -> dict[str, torch.Tensor]:
    """What torch's weights-only loader reads, which runs no code."""
    try:
        state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except RuntimeError as error:
        if "mmap can only be used" not in str(error):
            raise
        # torch.save of before version 1.6 wrote no file that can be mapped.
        state = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or not all(map(torch.is_tensor, state.values())):
        raise ValueError("it is not a dictionary of tensors")
    return state
