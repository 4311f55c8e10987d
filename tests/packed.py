"""Checkpoints as GPTQ, AWQ, AutoRound and compressed-tensors publish them.

The packers follow the published layouts alone: nothing of the exporter is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from checkpoints import make_config, make_model, make_tokenizer, save

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # outputs of a word, from its lowest bits


@dataclass(frozen=True)
class Scheme:
    """Quantization scheme and storage format of matrices."""

    how: str = "gptq"
    bits: int = 4
    group_size: int = 32
    symmetric: bool = False
    reordered: bool = False
    scale_type: torch.dtype = torch.float16
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def quantization_config(self) -> dict[str, Any]:
        """The entry of config.json, as the format's own library writes it."""
        common = {"bits": self.bits, "group_size": self.group_size, "sym": self.symmetric}
        if self.how in ("gptq", "gptq_v2"):
            own = {"quant_method": "gptq", "checkpoint_format": self.how, "lm_head": False}
            return common | own | {"desc_act": self.reordered} | self.config
        if self.how == "awq":
            own = {"quant_method": "awq", "version": "gemm", "zero_point": not self.symmetric}
            return common | own | {"modules_to_not_convert": None} | self.config
        if self.how.startswith("auto_round"):
            own = {"quant_method": "auto-round", "packing_format": self.how, "data_type": "int"}
            return common | own | self.config
        if self.how == "bitsandbytes":
            return {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
        is_channel = self.group_size < 0
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": self.symmetric,
            "strategy": "channel" if is_channel else "group",
            "group_size": None if is_channel else self.group_size,
            "actorder": "group" if self.reordered else None,
        }
        scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": self.how,
            "config_groups": {"group_0": scheme},
            "ignore": ["lm_head"],
            "quantization_status": "compressed",
        } | self.config


@dataclass(frozen=True)
class Integers:
    """Quantized matrix: integers [N, K], scales and zero points [N, G], group of each input [K]."""

    values: np.ndarray
    scales: torch.Tensor
    zeros: np.ndarray
    groups: np.ndarray

    def dequantize(self) -> torch.Tensor:
        """The matrix in float32, [N, K]."""
        signed = self.values.astype(np.int64) - self.zeros[:, self.groups]
        return torch.from_numpy(signed).float() * self.scales.float()[:, self.groups]


def quantize(weights: torch.Tensor, scheme: Scheme, seed: int) -> Integers:
    """Round a matrix [N, K] to the nearest integers of its groups."""
    random = np.random.default_rng(seed)
    width, size = weights.shape
    step = size if scheme.group_size < 0 else scheme.group_size
    groups = np.arange(size) // step
    if scheme.reordered:
        groups = random.permutation(groups)
    top, count = 2**scheme.bits - 1, groups.max() + 1
    zeros = np.full((width, count), 2 ** (scheme.bits - 1))
    if not scheme.symmetric:
        zeros = random.integers(1, top, (width, count))
    whole = weights.float().numpy()
    scales = torch.zeros(width, count)
    for g in range(count):
        part = np.abs(whole[:, groups == g]).max(1)
        scales[:, g] = torch.from_numpy(part / (top / 2))
    scales = scales.to(scheme.scale_type)
    steps = scales.float().numpy()[:, groups]
    values = np.clip(np.rint(whole / steps) + zeros[:, groups], 0, top).astype(np.int64)
    return Integers(values, scales, zeros, groups)


def pack_columns(
    values: np.ndarray, bits: int, order: tuple[int, ...] | None = None
) -> torch.Tensor:
    """Pack integers along the last axis into words, lowest bits first. [R, C] -> [R, C / p]"""
    count = 32 // bits
    padded = np.pad(values.astype(np.uint64), ((0, 0), (0, -values.shape[1] % count)))
    words = np.zeros((len(padded), padded.shape[1] // count), np.uint64)
    for i in range(count):
        words |= padded[:, (order[i] if order else i) :: count] << np.uint64(bits * i)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


def pack_rows(values: np.ndarray, bits: int) -> torch.Tensor:
    """Pack integers along the first axis into words. [R, C] -> [R / p, C]"""
    return pack_columns(np.ascontiguousarray(values.T), bits).T.contiguous()


def gptq(integers: Integers, scheme: Scheme, minus: int) -> dict[str, torch.Tensor]:
    return {
        "qweight": pack_rows(integers.values.T, scheme.bits),
        "qzeros": pack_columns(integers.zeros.T - minus, scheme.bits),
        "scales": integers.scales.T.contiguous(),
        "g_idx": torch.from_numpy(integers.groups.astype(np.int32)),
    }


def awq(integers: Integers, scheme: Scheme) -> dict[str, torch.Tensor]:
    return {
        "qweight": pack_columns(integers.values.T, scheme.bits, _AWQ_ORDER),
        "qzeros": pack_columns(integers.zeros.T, scheme.bits, _AWQ_ORDER),
        "scales": integers.scales.T.contiguous(),
    }


def pack_quantized(integers: Integers, scheme: Scheme) -> dict[str, torch.Tensor]:
    parts = {
        "weight_packed": pack_columns(integers.values, scheme.bits),
        "weight_scale": integers.scales,
        "weight_shape": torch.tensor(integers.values.shape),
    }
    if not scheme.symmetric:
        parts["weight_zero_point"] = pack_rows(integers.zeros, scheme.bits)
    if scheme.reordered:
        parts["weight_g_idx"] = torch.from_numpy(integers.groups.astype(np.int32))
    return parts


def int_quantized(integers: Integers, scheme: Scheme) -> dict[str, torch.Tensor]:
    middle = 2 ** (scheme.bits - 1)
    parts = {
        "weight": torch.from_numpy((integers.values - middle).astype(np.int8)),
        "weight_scale": integers.scales,
    }
    if not scheme.symmetric:
        parts["weight_zero_point"] = torch.from_numpy((integers.zeros - middle).astype(np.int8))
    return parts


def llm_int8(integers: Integers) -> dict[str, torch.Tensor]:
    return {
        "weight": torch.from_numpy((integers.values - 128).astype(np.int8)),
        "SCB": integers.scales[:, 0].float() * 127,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }


def pack(integers: Integers, scheme: Scheme) -> dict[str, torch.Tensor]:
    """Return the tensors of a module, by the last parts of their names."""
    if scheme.how in ("awq", "auto_round:auto_awq"):
        return awq(integers, scheme)
    if scheme.how == "pack-quantized":
        return pack_quantized(integers, scheme)
    if scheme.how == "int-quantized":
        return int_quantized(integers, scheme)
    if scheme.how == "bitsandbytes":
        return llm_int8(integers)
    return gptq(integers, scheme, scheme.how in ("gptq", "auto_round:auto_gptq"))


def quantize_checkpoint(
    folder: Path,
    scheme: Scheme,
    is_quantized: Callable[[str], bool] = lambda name: name.endswith("_proj.weight"),
) -> dict[str, torch.Tensor]:
    """Replace matrices of a checkpoint by packed ones; return their dequantized values."""
    state, dequantized, shared = load_file(folder / "model.safetensors"), {}, {}
    for key in [key for key in state if is_quantized(key)]:
        module = key.removesuffix(".weight")
        # Matrices of one input have one order, as in libraries that sort its channels.
        layer = module.rpartition(".")[0], state[key].shape[1]
        seed = shared.setdefault(layer, len(shared)) if scheme.reordered else len(dequantized)
        integers = quantize(state.pop(key), scheme, seed)
        state |= {f"{module}.{name}": t for name, t in pack(integers, scheme).items()}
        dequantized[key] = integers.dequantize()
    save_file(state, folder / "model.safetensors")
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(config | {"quantization_config": scheme.quantization_config}))
    return dequantized


def make_packed(
    folder: Path, scheme: Scheme, kind: str = "llama", **options: Any
) -> tuple[Path, torch.nn.Module]:
    """A float16 checkpoint with packed matrices, and the model of its dequantized values."""
    sizes = {"hidden": 128, "scale": 0.1} | ({"kv_heads": 2} if kind == "llama" else {}) | options
    model = make_model(make_config(kind, **sizes)).half()
    path = save(model, make_tokenizer(folder / "tokenizer"), folder / "checkpoint")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        for key, matrix in quantize_checkpoint(path, scheme).items():
            model.get_parameter(key).copy_(matrix)
    return path, model


# Quantiles of the normal distribution, as bitsandbytes has them (Dettmers et al. 2023, appendix E).
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


def four_bit(
    weights: torch.Tensor, is_nested: bool, block_size: int = 64
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A matrix [R, C] in bitsandbytes' nf4, by the ends of its tensors' names, and as float32.

    With `is_nested` its scales are quantized, too.
    """
    table, flat = np.array(NF4, np.float32), weights.float().numpy().reshape(-1)
    scales = np.array([np.abs(b).max() for b in np.split(flat, len(flat) // block_size)])
    stated = {"quant_type": "nf4", "blocksize": block_size, "dtype": "float16",
              "shape": [*weights.shape]}  # fmt: skip
    parts = {"quant_map": torch.from_numpy(table)}
    if is_nested:
        offset, outer = float(scales.mean()), np.linspace(-1, 1, 256, dtype=np.float32)
        groups = [scales[at : at + 16] - offset for at in range(0, len(scales), 16)]
        sizes = np.array([np.abs(g).max() for g in groups], np.float32)
        codes = [
            np.abs(outer[:, None] - g / s).argmin(0) for g, s in zip(groups, sizes, strict=True)
        ]
        scales = np.concatenate([outer[c] * s for c, s in zip(codes, sizes, strict=True)])
        scales = scales + np.float32(offset)
        stated |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": offset}
        parts["absmax"] = torch.from_numpy(np.concatenate(codes).astype(np.uint8))
        parts["nested_absmax"] = torch.from_numpy(sizes)
        parts["nested_quant_map"] = torch.from_numpy(outer)
    else:
        parts["absmax"] = torch.from_numpy(scales)
    wide = scales.repeat(block_size)
    indices = np.abs(table[:, None] - flat / wide).argmin(0)
    packed = (indices[0::2] << 4 | indices[1::2]).astype(np.uint8)
    stated_bytes = torch.tensor(list(json.dumps(stated).encode()), dtype=torch.uint8)
    parts["quant_state.bitsandbytes__nf4"] = stated_bytes
    dequantized = torch.from_numpy(table[indices] * wide.astype(np.float32)).reshape(weights.shape)
    return {"": torch.from_numpy(packed)[:, None]} | parts, dequantized
