"""GGUF files, which transformers' own loader reads: it widens all of a model in memory."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from specedge.errors import CheckpointError, MissingExtraError

from ..quiet import explained, quiet
from ..resident import memory

# Bytes beside the model: 0.7 GB were measured at 215 M parameters, and wide layers take more.
ROOM = 3e9
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def check(where: str, file: Path) -> None:
    """Refuse a file whose float32 model this machine's memory cannot hold. Raises SpecEdgeError."""
    need, free = 4 * sum(_tensors(where, file).values()) + ROOM, memory().available
    if need > free:
        raise CheckpointError(
            f"{where} takes {need / 1e9:.1f} GB of memory, as a GGUF file is widened to float32 "
            f"whole, and {free / 1e9:.1f} GB are free; give the checkpoint with safetensors that "
            "it was made from, which is read piece by piece"
        )


def scale_positions(where: str, file: Path, config: Any) -> None:
    """Put Llama 3.1's scaled frequencies into a config; refuse other scaling. Raises SpecEdgeError.

    transformers 5.17 to 5.23 reads none of it: of gpt-oss it takes the lengths of the keys for the
    values. The file may end after its header, as `header_ends` has it.
    """
    reader = _reader(where, file)
    scales = [tensor for tensor in reader.tensors if _is_scale(tensor)]
    names = [tensor.name for tensor in scales]
    found = [*_scaling_fields(reader), *(f"it has {name}" for name in names)]
    if names == ["rope_freqs.weight"] and len(found) == 1 and config.model_type == "llama":
        factors = np.array(scales[0].data, np.float64).reshape(-1)
        config.rope_parameters, unscaled = _llama3(config, factors.max()), config.rope_parameters
        if _are(factors, config.rope_parameters):
            return
        config.rope_parameters = unscaled
    if found:
        raise CheckpointError(
            f"{where}: {file.name} scales its positions in a way that transformers does not read "
            f"({found[0]}); give the checkpoint it was made from"
        )


def stored_dtype(where: str, file: Path) -> str:
    """The type to keep the weights in: their own where it is no quantised one."""
    return FLOATS.get(kind(where, file), "float32")


def kind(where: str, file: Path) -> str:
    """The type of most weights."""
    return _tensors(where, file).most_common(1)[0][0]


def header_ends(file: Path) -> float:
    """Where header and factors of positions end in a file that may have holes; infinite if cut."""
    import gguf

    try:
        reader = gguf.GGUFReader(file)
        ends = [int(t.data_offset) + int(t.n_bytes) for t in reader.tensors if _is_scale(t)]
        return max(int(reader.data_offset), *ends) if ends else int(reader.data_offset)
    except Exception:  # whatever the reader makes of zeros
        return math.inf


def growth(where: str, file: Path) -> float:
    """How many bytes of a bundle a byte of the file becomes."""
    width = 4 if stored_dtype(where, file) == "float32" else 2
    stored = sum(int(tensor.n_bytes) for tensor in _reader(where, file).tensors)
    return width * sum(_tensors(where, file).values()) / max(stored, 1)


def load(file: Path, config: Any) -> tuple[Any, dict[str, Any]]:
    """The model in float32, and what transformers says of its loading."""
    # An empty folder, as an adapter beside the file would be taken for the file's.
    with tempfile.TemporaryDirectory() as alone, contextlib.redirect_stderr(io.StringIO()):
        model, info = AutoModelForCausalLM.from_pretrained(
            alone,
            gguf_file=str(file.absolute()),
            config=copy.deepcopy(config),
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    return model, info


def left_out(where: str, file: Path, model: torch.nn.Module) -> int:
    """How many of a file's numbers have no place in the model: transformers does not tell."""
    own = {id(tensor): tensor.numel() for tensor in model.state_dict(keep_vars=True).values()}
    scales = [tensor for tensor in _reader(where, file).tensors if _is_scale(tensor)]
    told = sum(int(tensor.n_elements) for tensor in scales)
    return max(0, sum(_tensors(where, file).values()) - told - sum(own.values()))


def _is_scale(tensor: Any) -> bool:
    return "rope_freqs" in tensor.name or "rope_factors" in tensor.name


def _scaling_fields(reader: Any) -> list[str]:
    """What a header says of positions that are scaled, by its names."""
    plain = {
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1,
        "rope.scaling.attn_factor": 1,
        "rope.scale_linear": 1,
    }
    found = []
    for key, field in reader.fields.items():
        name, value = key.partition(".")[2], field.contents()
        if name in plain and value != plain[name]:
            found.append(f"its {key} is {value if isinstance(value, str) else f'{value:.4g}'}")
    return found


def _llama3(config: Any, factor: float) -> dict[str, Any]:
    """How Llama 3.1 and 3.2 scale, which published one set of numbers but for the factor."""
    return {
        "rope_type": "llama3",
        "rope_theta": config.rope_parameters["rope_theta"],
        "factor": float(factor),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _are(factors: np.ndarray, rope: dict[str, Any]) -> bool:
    """Whether frequencies are divided by what such parameters mean. [D/2]"""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    lengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(len(factors)) / len(factors))
    turns = rope["original_max_position_embeddings"] / lengths
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return np.allclose(factors, 1 / ((1 - kept) / rope["factor"] + kept), rtol=1e-5, atol=0)


def _tensors(where: str, file: Path) -> Counter[str]:
    """How many numbers are stored in each type."""
    sizes: Counter[str] = Counter()
    for tensor in _reader(where, file).tensors:
        sizes[tensor.tensor_type.name] += math.prod(map(int, tensor.shape))
    if not sizes:
        raise CheckpointError(f"{where}: {file.name} holds no tensors; download it again")
    return sizes


def _reader(where: str, file: Path) -> Any:
    """A file's header, with its tensors mapped. Raises SpecEdgeError."""
    try:
        import gguf
    except ImportError as error:
        raise MissingExtraError(
            f"{where} is a GGUF file, which takes another package: pip install gguf accelerate"
        ) from error
    what = f"{where}: {file.name} is no GGUF file that can be read ("
    with explained(CheckpointError, what, ")"), quiet():
        return gguf.GGUFReader(file)
