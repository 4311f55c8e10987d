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
    """How matrices are quantized, and in which format they are stored."""

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


def pack(integers: Integers, scheme: Scheme) -> dict[str, torch.Tensor]:
    """Return the tensors of a module, by the last parts of their names."""
    if scheme.how in ("awq", "auto_round:auto_awq"):
        return awq(integers, scheme)
    if scheme.how == "pack-quantized":
        return pack_quantized(integers, scheme)
    if scheme.how == "int-quantized":
        return int_quantized(integers, scheme)
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
