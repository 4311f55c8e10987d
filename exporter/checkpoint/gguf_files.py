"""GGUF files, read by transformers' own loader, which dequantizes the whole model in memory."""

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

from ..libraries import quiet, translate_errors
from ..mapped_memory import system_memory
from . import ggml_types
from .quantized_tensors import QuantizedTensor

# Bytes beside the model: 0.7 GB were measured at 215 M parameters, and wide layers take more.
OVERHEAD = 3e9
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def check_memory(where: str, file: Path) -> None:
    """Refuse a file whose float32 model exceeds this machine's memory. Raises SpecEdgeError."""
    need, free = 4 * sum(_count_by_type(where, file).values()) + OVERHEAD, system_memory().available
    if need > free:
        raise CheckpointError(
            f"{where} takes {need / 1e9:.1f} GB of memory, as a GGUF file is dequantized as a "
            f"whole, and {free / 1e9:.1f} GB are free; give the checkpoint with safetensors that "
            "it was made from, which is read piece by piece"
        )


def apply_rope_scaling(where: str, file: Path, config: Any) -> None:
    """Set Llama 3.1's rotary scaling in a config; refuse other scaling. Raises SpecEdgeError.

    transformers 5.17 to 5.23 reads none of it: of gpt-oss it takes the lengths of the keys for the
    values. The file may end after its header, at `header_size`.
    """
    reader = _open(where, file)
    scales = [tensor for tensor in reader.tensors if _is_rotary_factor(tensor)]
    names = [tensor.name for tensor in scales]
    scalings = [*_scaling_fields(reader), *(f"it has {name}" for name in names)]
    if names == ["rope_freqs.weight"] and len(scalings) == 1 and config.model_type == "llama":
        factors = np.array(scales[0].data, np.float64).reshape(-1)
        config.rope_parameters, unscaled = (
            _llama3_scaling(config, factors.max()),
            config.rope_parameters,
        )
        if _match(factors, config.rope_parameters):
            return
        config.rope_parameters = unscaled
    if scalings:
        raise CheckpointError(
            f"{where}: {file.name} has a rotary scaling that transformers does not read "
            f"({scalings[0]}); give the checkpoint it was made from"
        )


def stored_dtype(where: str, file: Path) -> str:
    """Return the type to store the weights in: their own, or float32 if they are quantized."""
    return FLOATS.get(main_type(where, file), "float32")


def main_type(where: str, file: Path) -> str:
    """Return the type of most weights."""
    return _count_by_type(where, file).most_common(1)[0][0]


def is_quantized(where: str, file: Path) -> bool:
    """Return True if a file has weights in blocks that can be kept."""
    return not ggml_types.LAYOUTS.keys().isdisjoint(_count_by_type(where, file))


def quantized_tensors(where: str, file: Path) -> list[QuantizedTensor]:
    """Return a file's quantized matrices, memory-mapped."""
    return [
        _quantized_tensor(tensor)
        for tensor in _open(where, file).tensors
        if tensor.tensor_type.name not in FLOATS and tensor.data.ndim == 2
    ]


def _quantized_tensor(tensor: Any) -> QuantizedTensor:
    import gguf

    data, kind = tensor.data, tensor.tensor_type
    size, num_rows = map(int, tensor.shape)
    return QuantizedTensor(
        tensor.name,
        kind.name,
        (num_rows, size),
        int(tensor.n_bytes),
        ggml_types.LAYOUTS.get(kind.name),
        lambda rows: gguf.quants.dequantize(data[rows], kind),
        lambda rows: ggml_types.unpack(data[rows], kind.name),
    )


def header_size(file: Path) -> float:
    """Return the end of the header and rotary factors in a sparse file; infinite if truncated."""
    import gguf

    try:
        reader = gguf.GGUFReader(file)
        ends = [int(t.data_offset) + int(t.n_bytes) for t in reader.tensors if _is_rotary_factor(t)]
        return max(int(reader.data_offset), *ends) if ends else int(reader.data_offset)
    except Exception:  # whatever the reader makes of zeros
        return math.inf


def expansion(where: str, file: Path) -> float:
    """Return the bytes of the bundle per byte of the file."""
    width = 4 if stored_dtype(where, file) == "float32" else 2
    stored = sum(int(tensor.n_bytes) for tensor in _open(where, file).tensors)
    return width * sum(_count_by_type(where, file).values()) / max(stored, 1)


def load(file: Path, config: Any) -> tuple[Any, dict[str, Any]]:
    """Load the model in float32, and transformers' loading report."""
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


def count_unused(where: str, file: Path, model: torch.nn.Module) -> int:
    """Count the file's weights that the model has no place for, unreported by transformers."""
    tensors = {id(tensor): tensor.numel() for tensor in model.state_dict(keep_vars=True).values()}
    scales = [tensor for tensor in _open(where, file).tensors if _is_rotary_factor(tensor)]
    num_scales = sum(int(tensor.n_elements) for tensor in scales)
    return max(0, sum(_count_by_type(where, file).values()) - num_scales - sum(tensors.values()))


def _is_rotary_factor(tensor: Any) -> bool:
    return "rope_freqs" in tensor.name or "rope_factors" in tensor.name


def _scaling_fields(reader: Any) -> list[str]:
    """Describe the header's fields of rotary scaling."""
    plain = {
        "rope.scaling.type": "none",
        "rope.scaling.factor": 1,
        "rope.scaling.attn_factor": 1,
        "rope.scale_linear": 1,
    }
    descriptions = []
    for key, field in reader.fields.items():
        name, value = key.partition(".")[2], field.contents()
        if name in plain and value != plain[name]:
            descriptions.append(
                f"its {key} is {value if isinstance(value, str) else f'{value:.4g}'}"
            )
    return descriptions


def _llama3_scaling(config: Any, factor: float) -> dict[str, Any]:
    """Return the rotary scaling of Llama 3.1 and 3.2, whose values differ in the factor alone."""
    return {
        "rope_type": "llama3",
        "rope_theta": config.rope_parameters["rope_theta"],
        "factor": float(factor),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _match(factors: np.ndarray, rope: dict[str, Any]) -> bool:
    """Return True if the frequencies are divided as these parameters define. [D/2]"""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    lengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(len(factors)) / len(factors))
    turns = rope["original_max_position_embeddings"] / lengths
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return np.allclose(factors, 1 / ((1 - kept) / rope["factor"] + kept), rtol=1e-5, atol=0)


def _count_by_type(where: str, file: Path) -> Counter[str]:
    """Count the weights stored in each type."""
    sizes: Counter[str] = Counter()
    for tensor in _open(where, file).tensors:
        sizes[tensor.tensor_type.name] += math.prod(map(int, tensor.shape))
    if not sizes:
        raise CheckpointError(f"{where}: {file.name} holds no tensors; download it again")
    return sizes


def _open(where: str, file: Path) -> Any:
    """Open a file's header, with its tensors memory-mapped. Raises SpecEdgeError."""
    try:
        import gguf
    except ImportError as error:
        raise MissingExtraError(
            f"{where} is a GGUF file, which takes another package: pip install gguf accelerate"
        ) from error
    prefix = f"{where}: {file.name} is no GGUF file that can be read ("
    with translate_errors(CheckpointError, prefix, ")"), quiet():
        return gguf.GGUFReader(file)
