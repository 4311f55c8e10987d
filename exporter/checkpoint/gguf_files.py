"""GGUF files, whose tensors are memory-mapped and dequantized one at a time when read."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from specedge.errors import CheckpointError, MissingExtraError

from ..internals import gguf_tensor_mapping
from ..libraries import translate_errors
from . import ggml_types, gguf_architectures, gguf_header
from .gguf_header import GgufHeader
from .lazy_tensors import LazyTensor, lazy_rows
from .quantized_tensors import QuantizedTensor

FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Name of a part, as written by llama.cpp.
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
_TYPE_SUFFIX = re.compile(
    r"[-._]+((ud|i1|iq|q|tq|bf|f|fp|mxfp)\d\w*|imat\w*|ud-\w+)([-._](k|s|m|l|xl|xs|0|1))*$",
    re.IGNORECASE,
)
_NEUTRAL_SCALING = {
    "scaling.type": "none", "scaling.factor": 1, "scaling.attn_factor": 1, "scale_linear": 1,
}  # fmt: skip
_SCALING_CONTEXT = ("scaling.original_context_length", "scaling.finetuned")
_SCALING_FACTORS = ("scaling.factor", "scale_linear")
_SCALING_NUMBERS = {
    *_SCALING_FACTORS, "scaling.attn_factor", "scaling.original_context_length",
    "scaling.yarn_attn_factor", "scaling.yarn_beta_fast", "scaling.yarn_beta_slow",
    "scaling.yarn_log_multiplier",
}  # fmt: skip
_PHIMOE_FACTOR = 1.243163121016122  # of Phi-3.5-MoE; files have the attention factor of Phi-3
_GENERIC_NAMES = {"", "model", "ggml-model", "ggml", "consolidated", "unnamed"}
_LAYER = re.compile(r"blk\.(\d+)\.(?!attn_rot_embd)")  # some files have rotary frequencies


@dataclass(frozen=True)
class GgufCheckpoint:
    """Opened GGUF file, or the parts of a split one in order.

    Attributes:
        where: Role and name, as in error messages.
        name: Name of the first file.
        fields: Values of the first file's header.
        tensors: Tensors of all files.
    """

    where: str
    name: str
    fields: Mapping[str, Any]
    tensors: Sequence[Any]

    @property
    def architecture(self) -> str:
        return str(self.fields.get("general.architecture"))

    @property
    def license(self) -> str | None:
        """License that the header states."""
        stated = self.fields.get("general.license.name") or self.fields.get("general.license")
        return ", ".join(map(str, stated)) if isinstance(stated, list) else stated

    @property
    def model_name(self) -> str:
        """Name of the model: the file's without its quantization type, or the header's."""
        stem = re.sub(r"-\d{5}-of-\d{5}$", "", os.path.splitext(self.name)[0])
        name = _TYPE_SUFFIX.sub("", stem)
        if name.lower() not in _GENERIC_NAMES:
            return name
        stated = self.fields.get("general.name") or self.fields.get("general.basename")
        return str(stated) if stated else stem

    @property
    def main_type(self) -> str:
        """Type of most weights."""
        return self._counts.most_common(1)[0][0]

    @property
    def stored_dtype(self) -> str:
        """Type of the exported weights: their own, or float32 if they are quantized."""
        return FLOATS.get(self.main_type, "float32")

    @property
    def is_quantized(self) -> bool:
        """True if some weights are in blocks that a bundle can keep."""
        return not ggml_types.LAYOUTS.keys().isdisjoint(self._counts)

    @property
    def expansion(self) -> float:
        """Size of a float bundle relative to the file."""
        width = 4 if self.stored_dtype == "float32" else 2
        stored = sum(int(tensor.n_bytes) for tensor in self.tensors)
        return width * sum(self._counts.values()) / max(stored, 1)

    @property
    def _counts(self) -> Counter[str]:
        """Number of weights in each type."""
        sizes: Counter[str] = Counter()
        for tensor in self.tensors:
            sizes[tensor.tensor_type.name] += _num_weights(tensor)
        return sizes

    def quantized_tensors(self) -> list[QuantizedTensor]:
        """Return the quantized matrices, memory-mapped; stacked experts count as one matrix."""
        return [
            _quantized_tensor(tensor)
            for tensor in self.tensors
            if tensor.tensor_type.name not in FLOATS and tensor.data.ndim in (2, 3)
        ]

    def build_config(self) -> PreTrainedConfig | None:
        """Return the config, None if transformers has to read it. Raises CheckpointError."""
        shapes = {tensor.name: (*map(int, reversed(tensor.shape)),) for tensor in self.tensors}
        with translate_errors(CheckpointError, f"{self.where}: {self.name} cannot be read: "):
            return gguf_architectures.build_config(self.architecture, self.fields, shapes)

    def complete_config(self, config: Any) -> None:
        """Set fields of a config that transformers does not read from the header.

        It ignores rotary scaling, Phi-3's rotary size, the query scale of Gemma 2 and 3 and all but
        one part of a split file. Files may be truncated at `header_size`. Raises CheckpointError
        for unknown rotary scaling.
        """
        has_head = any(tensor.name == "output.weight" for tensor in self.tensors)
        if has_head and config.model_type not in ("falcon", "bloom"):
            config.tie_word_embeddings = False
        size = self.fields.get("phi3.rope.dimension_count")
        if config.model_type == "phi3" and size is not None:
            head_size = _head_size(config)
            if not isinstance(size, int) or not 0 < size <= head_size:
                raise CheckpointError(
                    f"{self.where}: {self.name} has a rotary size of {size} for heads of "
                    f"{head_size}; download it again"
                )
            share = size / head_size
            config.rope_parameters = {**config.rope_parameters, "partial_rotary_factor": share}
        if config.model_type in ("gemma2", "gemma3_text"):
            is_27b = config.num_hidden_layers in (46, 62)  # recognized by the number of layers
            per_head = config.hidden_size // config.num_attention_heads
            config.query_pre_attn_scalar = per_head if is_27b else _head_size(config)
        self._apply_rope_scaling(config)

    def _apply_rope_scaling(self, config: Any) -> None:
        """Set rotary scaling that transformers ignores. Raises CheckpointError if unknown."""
        factors = {
            tensor.name: np.array(tensor.data, np.float64).reshape(-1)
            for tensor in self.tensors
            if _is_rotary_factor(tensor.name)
        }
        fields = {
            key.partition(".rope.")[2]: value
            for key, value in self.fields.items()
            if ".rope.scal" in key
        }
        active = {
            name: value
            for name, value in fields.items()
            if value != _NEUTRAL_SCALING.get(name) and name not in _SCALING_CONTEXT
        }
        if fields.get("scaling.type") == "none":  # a factor has no effect
            active = {name: active[name] for name in active if name not in _SCALING_FACTORS}
        if not factors and not active:
            return
        rope = getattr(config, "rope_parameters", None) or {}
        is_nested = "full_attention" in rope  # Gemma 3 scales its global layers only
        unscaled = rope["full_attention"] if is_nested else rope
        scaling = _scaling(fields, factors, config, unscaled) if unscaled else None
        if scaling is None:
            reasons = [f"its rope.{name} is {value}" for name, value in active.items()]
            reasons += [f"it has {name}" for name in factors]
            raise CheckpointError(
                f"{self.where}: {self.name} has an unsupported rotary scaling "
                f"({', '.join(reasons)}); specify the original checkpoint"
            )
        scaling = {**unscaled, **scaling}
        config.rope_parameters = {**rope, "full_attention": scaling} if is_nested else scaling
        context = scaling.get("original_max_position_embeddings")
        if context and hasattr(config, "original_max_position_embeddings"):
            config.original_max_position_embeddings = context  # which transformers prefers

    def state(self, model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], int]:
        """Return a model's state, with lazy matrices, and the number of unused weights.

        `model` has no weights. Raises CheckpointError if a tensor has another size, or if
        the model type lacks a layer's tensor. Architectures that transformers reads may have
        unused ones, such as the keys of layers that share a cache.
        """
        expected = model.state_dict()
        relation = gguf_architectures.ARCHITECTURES.get(self.architecture)
        permutation = relation.permutation if relation else self.architecture
        names, process = gguf_tensor_mapping(model, self.architecture, permutation or "")
        names |= gguf_architectures.tensor_names(expected)
        part_names = gguf_architectures.part_names(expected)
        is_part = {part for stored in part_names.values() for part in stored}
        parts: dict[str, torch.Tensor] = {}
        state: dict[str, torch.Tensor] = {}
        num_unused = 0
        tensors = (p for t in self.tensors for p in _split_projections(t, names, expected).items())
        for stored_name, values in tensors:
            if stored_name in is_part:
                parts[stored_name] = values
                continue
            name = names.get(stored_name) or names.get(stored_name.removesuffix(".weight"))
            if name not in expected:
                num_unused += 0 if _is_rotary_factor(stored_name) else values.numel()
                layer = _LAYER.match(stored_name)
                if relation and layer and int(layer[1]) < model.config.num_hidden_layers:
                    raise CheckpointError(
                        f"{self.where}: its model type, {model.config.model_type}, has no "
                        f"{stored_name}; specify the original checkpoint"
                    )
                continue
            assert name is not None
            shape = expected[name].shape
            if shape.numel() != values.numel():
                raise CheckpointError(
                    f"{self.where}: {stored_name} is {[*values.shape]} in its file and {[*shape]} "
                    "by its header; download it again"
                )
            state[name] = _arrange(values, shape, process, stored_name)
        for name, stored in part_names.items():
            if parts.keys() >= set(stored):
                try:
                    state[name] = gguf_architectures.join_parts(
                        name,
                        [parts[part] for part in stored],
                        model.get_submodule(name.rpartition(".")[0]),
                        expected[name].shape,
                    )
                except (RuntimeError, IndexError) as error:
                    shapes = (f"{part} is {[*parts[part].shape]}" for part in stored)
                    raise CheckpointError(
                        f"{self.where}: {', '.join(shapes)}, which do not fit; download it again"
                    ) from error
        return state, num_unused


def open_files(where: str, files: Sequence[Path]) -> GgufCheckpoint:
    """Open a GGUF file, or all parts of a split one. Raises CheckpointError."""
    readers = [_open(where, file) for file in files]
    tensors = [tensor for reader in readers for tensor in reader.tensors]
    first = GgufCheckpoint(where, files[0].name, readers[0].fields, tensors)
    num_parts, count = first.fields.get("split.count") or 1, first.fields.get("split.tensors.count")
    if num_parts != len(files):
        raise CheckpointError(
            f"{where}: {files[0].name} is one of {num_parts} parts, and {len(files)} are "
            "present; download all of them, with their original names"
        )
    if num_parts > 1 and count not in (None, len(tensors)):
        raise CheckpointError(
            f"{where}: the parts of {files[0].name} have {len(tensors)} of {count} tensors; "
            "download them again"
        )
    return first


def parts_of(where: str, name: str, names: set[str]) -> list[str]:
    """Return the parts of a split file in order, or a single file.

    Args:
        where: Role and name, as in error messages.
        name: Name of any part.
        names: Names of all files in the same folder.
    """
    if (match := _PART.fullmatch(name)) is None:
        return [name]
    total = max(1, int(match[3]))
    parts = [f"{match[1]}-{i:05}-of-{match[3]}{match[4]}" for i in range(1, total + 1)]
    if lacking := [part for part in parts if part not in names]:
        raise CheckpointError(f"{where}: {lacking[0]} is missing; download all {total} parts")
    return parts


def header_size(file: Path) -> float:
    """Return the end of the header and rotary factors in a sparse file; infinite if truncated."""
    try:
        header = gguf_header.read_header(file)
    except (OSError, ValueError):  # the file is zero after the downloaded bytes
        return math.inf
    ends = [
        tensor.offset + tensor.n_bytes
        for tensor in header.tensors
        if _is_rotary_factor(tensor.name)
    ]
    return max(header.data_offset, *ends, 0)


def _num_weights(tensor: Any) -> int:
    return math.prod(map(int, tensor.shape))


def _split_projections(
    tensor: Any, names: Mapping[str, str], expected: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return a tensor's values by name; fused projections are split.

    These are query, key and value of attention, and gate and up of experts.
    """
    values = _values(tensor)
    if ".ffn_gate_up_exps." in tensor.name and values.ndim > 1:
        gate, up = values.chunk(2, 1)
        return {tensor.name.replace("gate_up", part): v for part, v in (("gate", gate), ("up", up))}
    stem, _, suffix = tensor.name.partition("attn_qkv.")
    parts = [f"{stem}attn_{part}.{suffix}" for part in "qkv"]
    if tensor.name in names or not all(names.get(part) in expected for part in parts):
        return {tensor.name: values}
    sizes = [expected[names[part]].shape[0] for part in parts]
    if sum(sizes) != len(values):
        return {tensor.name: values}
    return dict(zip(parts, values.split(sizes), strict=True))


def _quantized_tensor(tensor: Any) -> QuantizedTensor:
    data, tensor_type = tensor.data.reshape(-1, tensor.data.shape[-1]), tensor.tensor_type
    size, num_rows = int(tensor.shape[0]), len(data)
    return QuantizedTensor(
        tensor.name,
        tensor_type.name,
        (num_rows, size),
        int(tensor.n_bytes),
        ggml_types.LAYOUTS.get(tensor_type.name),
        lambda rows: ggml_types.dequantize(data[rows], tensor_type.name),
        lambda rows: ggml_types.unpack(data[rows], tensor_type.name),
    )


def _values(tensor: Any) -> torch.Tensor:
    """Return the values of a tensor of the file; those of a matrix are read lazily."""
    import gguf

    shape, dtype_name = torch.Size(map(int, reversed(tensor.shape))), tensor.tensor_type.name
    if len(shape) < 2:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        return torch.from_numpy(np.array(values)).reshape(shape)
    if dtype_name not in FLOATS:
        return lazy_rows(_quantized_tensor(tensor), shape)
    dtype = getattr(torch, FLOATS[dtype_name])
    data = tensor.data.view(np.int16) if dtype == torch.bfloat16 else tensor.data
    return LazyTensor(
        torch.empty(shape, dtype=dtype, device="meta"),
        lambda: torch.from_numpy(data).view(dtype).reshape(shape),
    )


def _arrange(
    values: torch.Tensor, shape: torch.Size, process: Callable[[Any, str], Any], name: str
) -> torch.Tensor:
    """Return values in a parameter's shape and order; those of a matrix are read lazily."""

    def arrange(values: torch.Tensor) -> torch.Tensor:
        is_bfloat16 = values.dtype == torch.bfloat16
        data = process((values.view(torch.int16) if is_bfloat16 else values).numpy(), name)
        return torch.from_numpy(data).view(values.dtype).reshape(shape)

    if not isinstance(values, LazyTensor):
        return arrange(values).clone()
    if len(shape) < 2:
        return arrange(values.read().float()).clone()
    like = torch.empty(shape, dtype=values.dtype, device="meta")
    return LazyTensor(like, arrange, parts=(values,))


def _is_rotary_factor(name: str) -> bool:
    return "rope_freqs" in name or "rope_factors" in name


def _head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _scaling(
    fields: Mapping[str, Any],
    factors: Mapping[str, np.ndarray],
    config: Any,
    unscaled: Mapping[str, Any],
) -> dict[str, Any] | None:
    """Return transformers' parameters of a file's rotary scaling, None if it is unknown.

    Args:
        fields: Header fields that begin with "rope.scal", without "rope.".
        factors: Divisors of frequencies by tensor name, [D/2] each.
        config: The model's config.
        unscaled: Its rotary parameters.
    """
    numbers = {name: value for name, value in fields.items() if name in _SCALING_NUMBERS}
    if fields.keys() - _SCALING_NUMBERS - {"scaling.type", "scaling.finetuned"}:
        return None
    if numbers.get("scaling.yarn_log_multiplier") == 0:
        del numbers["scaling.yarn_log_multiplier"]
    if not all(isinstance(n, int | float) and 0 < n < math.inf for n in numbers.values()):
        return None
    log_multiplier = numbers.get("scaling.yarn_log_multiplier", 0)
    is_deepseek = config.model_type in ("deepseek_v2", "deepseek_v3")
    if log_multiplier and not is_deepseek and config.model_type not in ("mistral", "ministral3"):
        return None
    rotary_size = int(_head_size(config) * unscaled.get("partial_rotary_factor", 1))
    if any(len(divisors) != rotary_size // 2 for divisors in factors.values()):
        return None
    name = fields.get("scaling.type")
    factor = numbers.get("scaling.factor", numbers.get("scale_linear"))
    attention_factor = float(numbers.get("scaling.attn_factor", 1))
    context = numbers.get("scaling.original_context_length", config.max_position_embeddings)
    if factors.keys() == {"rope_factors_long.weight", "rope_factors_short.weight"}:
        if name not in (None, "longrope") or factor not in (None, 1):
            return None
        scaling = {
            "rope_type": "longrope",
            "factor": config.max_position_embeddings / context,
            "long_factor": factors["rope_factors_long.weight"].tolist(),
            "short_factor": factors["rope_factors_short.weight"].tolist(),
            "original_max_position_embeddings": int(context),
            "attention_factor": attention_factor,
        }
        if config.model_type == "phimoe":
            scaling |= {"short_mscale": _PHIMOE_FACTOR, "long_mscale": _PHIMOE_FACTOR}
        return scaling
    if factors.keys() == {"rope_freqs.weight"}:
        (divisors,) = factors.values()
        is_alone = name in (None, "none") and factor in (None, 1) and attention_factor == 1
        candidates = (
            _llama3_scaling(unscaled["rope_theta"], divisors.max(), high) for high in (4.0, 1.0)
        )
        matching = (scaling for scaling in candidates if is_alone and _match(divisors, scaling))
        return next(matching, None)
    if factors or factor is None:
        return None
    if name in (None, "linear") and attention_factor == 1:
        return {"rope_type": "linear", "factor": float(factor)}
    if name != "yarn" or factor < 1:
        return None
    scaling = {
        "rope_type": "yarn",
        "factor": float(factor),
        "original_max_position_embeddings": int(context),
        "beta_fast": float(numbers.get("scaling.yarn_beta_fast", 32)),
        "beta_slow": float(numbers.get("scaling.yarn_beta_slow", 1)),
    }
    if is_deepseek and log_multiplier:
        # Scores are scaled instead of rotary embeddings; the converter writes a tenth.
        scaling["mscale_all_dim"] = round(10 * log_multiplier, 6)
    elif config.model_type != "olmo3" or attention_factor == 1:
        # llama.cpp multiplies the attention factor of the YaRN paper by that of the header, but
        # for OLMo 3 converters wrote the product.
        attention_factor *= 0.1 * math.log(factor) + 1
        attention_factor /= 0.1 * log_multiplier * math.log(factor) + 1
    attention_factor = float(numbers.get("scaling.yarn_attn_factor", attention_factor))
    return {**scaling, "attention_factor": attention_factor}


def _llama3_scaling(theta: float, factor: float, high: float) -> dict[str, Any]:
    """Return the rotary scaling of Llama 3.1 and 3.2 (`high` is 4) or of Llama 4 (1)."""
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": float(factor),
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": 8192,
    }


def _match(factors: np.ndarray, rope: dict[str, Any]) -> bool:
    """Return True if the file's frequency divisors are those of these parameters. [D/2]"""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    lengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(len(factors)) / len(factors))
    turns = rope["original_max_position_embeddings"] / lengths
    with np.errstate(divide="ignore", invalid="ignore"):  # the limits of Llama 4 are equal
        kept = np.clip((turns - low) / (high - low), 0, 1)
    return np.allclose(factors, 1 / ((1 - kept) / rope["factor"] + kept), rtol=1e-5, atol=0)


def _open(where: str, file: Path) -> GgufHeader:
    """Validate and open a file. Raises CheckpointError."""
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            f"{where} is a GGUF file, which requires: pip install gguf accelerate"
        ) from error
    with translate_errors(
        CheckpointError, f"{where}: {file.name} is not a readable GGUF file (", ")"
    ):
        return gguf_header.read_header(file)
