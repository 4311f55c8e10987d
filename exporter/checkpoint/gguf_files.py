"""GGUF files, which transformers' own loader reads: it widens all of a model in memory."""

from __future__ import annotations

import contextlib
import io
import math
from pathlib import Path
from typing import Any

import torch

from specedge.errors import CheckpointError, MissingExtraError

from ..quiet import one_line, quiet

ROOM = (
    3e9  # bytes beside the model: 0.7 GB were measured at 215 M parameters, wide layers take more
)
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def check(where: str, file: Path) -> None:
    """Refuse a file whose model in float32 this machine's memory cannot hold. Raises SpecEdgeError.

    The file may end after its header.
    """
    import psutil  # type: ignore[import-untyped]

    need, free = 4 * sum(_tensors(where, file).values()) + ROOM, psutil.virtual_memory().available
    if need > free:
        raise CheckpointError(
            f"{where} takes {need / 1e9:.1f} GB of memory, as a GGUF file is widened to float32 "
            f"whole, and {free / 1e9:.1f} GB are free; give the checkpoint with safetensors that "
            "it was made from, which is read piece by piece"
        )


def stored_dtype(where: str, file: Path) -> str:
    """The type to keep the weights in: their own where it is no quantised one."""
    sizes = _tensors(where, file)
    kind = max(sizes, key=lambda name: sizes[name])
    return _FLOATS.get(kind, "float32")


def kind(where: str, file: Path) -> str | None:
    """The type of most weights, if it is a quantised one."""
    sizes = _tensors(where, file)
    name = max(sizes, key=lambda name: sizes[name])
    return None if name in _FLOATS else name


def header_ends(file: Path) -> float:
    """Where the header ends of a file that may have holes; infinity where those cut it."""
    import gguf

    try:
        return int(gguf.GGUFReader(file).data_offset)
    except Exception:  # whatever the reader makes of zeros
        return math.inf


def load(folder: Path, name: str) -> tuple[Any, dict[str, Any]]:
    """The model in float32, and what transformers says of its loading."""
    from transformers import AutoModelForCausalLM

    with contextlib.redirect_stderr(io.StringIO()):  # a bar that no setting turns off
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=name,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    return model, info


def _tensors(where: str, file: Path) -> dict[str, int]:
    """How many numbers are stored in each type."""
    try:
        import gguf
    except ImportError as error:
        raise MissingExtraError(
            f"{where} is a GGUF file, which takes another package: pip install gguf accelerate"
        ) from error
    sizes: dict[str, int] = {}
    try:
        with quiet():
            for tensor in gguf.GGUFReader(file).tensors:
                name = tensor.tensor_type.name
                sizes[name] = sizes.get(name, 0) + math.prod(map(int, tensor.shape))
    except Exception as error:
        raise CheckpointError(
            f"{where}: {file.name} is no GGUF file that can be read ({one_line(error)})"
        ) from error
    if not sizes:
        raise CheckpointError(f"{where}: {file.name} holds no tensors; download it again")
    return sizes
