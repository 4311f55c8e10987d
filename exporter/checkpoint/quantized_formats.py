"""Quantized checkpoints: integer formats and mxfp4 can be kept, others are dequantized.

Other floating-point formats are fp8, and bitsandbytes' nf4 and fp4; further formats are rejected by
name. Matrices are dequantized exactly, one at a time. R rows and C columns of a matrix; G blocks of
32 in a row of mxfp4; E experts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specedge.errors import CheckpointError

from ..libraries import translate_errors
from . import folders, ggml_types, group_quantized
from .lazy_tensors import LazyTensor, lazy_rows
from .quantized_tensors import IntegerBlocks, QuantizationFormat, QuantizedTensor, TensorsByName

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_NAMES = {
    "aqlm": "AQLM",
    "bitnet": "BitNet",
    "bitsandbytes": "bitsandbytes",
    "eetq": "EETQ",
    "fbgemm_fp8": "FBGEMM's fp8",
    "hqq": "HQQ",
    "modelopt": "ModelOpt",
    "quanto": "Quanto",
    "torchao": "torchao",
}
_E2M1 = tuple(number / 2 for number in ggml_types.TWICE_E2M1)
_PIECE = 1 << 20  # elements that are dequantized at a time
_EXACT = (
    100  # up to this exponent, products of a power of two and an fp8 number are exact in bfloat16
)


def read_format(raw: Mapping[str, Any]) -> QuantizationFormat | None:
    """Return the quantization format that a config.json states; None for float weights."""
    stated = _quantization_configs(raw)
    config = next((c for c in stated if isinstance(c, dict)), None)
    if config is None:
        return UnknownFormat({}) if any(c is not None for c in stated) else None
    if config.get("load_in_8bit"):
        return group_quantized.BitsAndBytesInt8Format(config)
    if config.get("load_in_4bit"):
        return FourBitFormat(config)
    method = str(config.get("quant_method")).removeprefix("intel/")
    return _FORMATS.get(method, UnknownFormat)(config)


def read_old_config(where: str, raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return config.json with the quantization config of AutoGPTQ's or AutoAWQ's separate file."""
    if read_format(raw) is not None:
        return raw
    if (folder / "quantize_config.json").exists():
        config = folders.read_json_object(where, folder / "quantize_config.json")
        return raw | {"quantization_config": {"quant_method": "gptq"} | config}
    if (folder / "quant_config.json").exists():
        config = folders.read_json_object(where, folder / "quant_config.json")
        bits = {"bits": config.get("w_bit", 4)}
        return raw | {"quantization_config": {"quant_method": "awq"} | bits | config}
    return raw


def check(where: str, raw: Mapping[str, Any], original: str | None) -> None:
    """Reject quantization formats that cannot be read. Raises CheckpointError.

    `original` is the checkpoint from which this one was derived.
    """
    quantization = read_format(raw)
    if quantization is None or (name := quantization.unsupported_variant()) is None:
        return
    cure = f"the original checkpoint {original}" if original else "the original checkpoint"
    raise CheckpointError(
        f"{where} is quantized with {name}, which is not supported; specify {cure}"
    )


def _quantization_configs(raw: Mapping[str, Any]) -> list[Any]:
    """Return the quantization configs of a config.json and of its text config."""
    inner = raw.get("text_config")
    configs = (raw, inner if isinstance(inner, dict) else {})
    return [p.get(key) for p in configs for key in ("quantization_config", "compression_config")]


class UnknownFormat(QuantizationFormat):
    """Format that is not supported."""

    def unsupported_variant(self) -> str:
        method = str(self.config.get("quant_method") or "unknown").removeprefix("intel/")
        return _NAMES.get(method, f"the method '{method[:40]}'")

    def dequantize(
        self, where: str, state: TensorsByName, transposed: Collection[str]
    ) -> dict[str, torch.Tensor]:
        raise CheckpointError(f"{where} is quantized with {self.unsupported_variant()}")


class Mxfp4Format(QuantizationFormat):
    """Experts in blocks of 32 four-bit floats with a shared exponent, as in gpt-oss."""

    name = "mxfp4"
    growth = 64 / 17
    can_be_kept = True

    def quantized_tensors(self, where: str, state: TensorsByName) -> list[QuantizedTensor]:
        return [_mxfp4_tensor(name, *parts) for name, parts in _mxfp4_parts(where, state).items()]

    def dequantize(
        self, where: str, state: TensorsByName, transposed: Collection[str]
    ) -> dict[str, torch.Tensor]:
        result = dict(state)
        for name, (blocks, scales) in _mxfp4_parts(where, state).items():
            del result[f"{name}_blocks"], result[f"{name}_scales"]
            matrix = dequantize_mxfp4(name, blocks, scales)
            # gpt-oss multiplies by experts from the right: its parameters are [E, C, R].
            result[name] = matrix.transpose(1, 2) if matrix.ndim == 3 else matrix
        return result


class FourBitFormat(QuantizationFormat):
    """bitsandbytes' nf4 and fp4: indices into a table of 16 numbers."""

    name = "bitsandbytes"
    growth = 8.0

    def dequantize(
        self, where: str, state: TensorsByName, transposed: Collection[str]
    ) -> dict[str, torch.Tensor]:
        result = dict(state)
        damaged = (KeyError, TypeError, ValueError, RecursionError)
        for key in state:
            name, is_state, _ = key.partition(_STATE)
            if not is_state:
                continue
            before = f"{where}: the parts of {name} do not fit each other ("
            with translate_errors(CheckpointError, before, "); download it again", catch=damaged):
                stated = json.loads(bytes(result.pop(key).tolist()))
                names = {part: f"{name}.{part}" for part in _STATE_PARTS}
                parts = {part: result.pop(n) for part, n in names.items() if n in result}
                result[name] = _dequantize_four_bit(result[name], parts, stated)
        if len(result) == len(state):
            raise CheckpointError(
                f"{where}: its config.json says bitsandbytes, and its files contain no such "
                "weights; download it again"
            )
        return result


class Fp8Format(QuantizationFormat):
    """fp8 numbers with a scale per block, as in DeepSeek-V3, or per tensor."""

    name = "fp8"
    growth = 4.0

    @property
    def block(self) -> tuple[int, int] | None:
        """Rows and columns per scale, 0 for all; None for an unknown layout."""
        if self.config.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            return None
        block = self.config.get("weight_block_size")
        if block is None:
            return 0, 0
        if not isinstance(block, list) or [type(n) for n in block] != [int, int] or min(block) < 1:
            return None
        return block[0], block[1]

    def unsupported_variant(self) -> str | None:
        return "the method 'fp8'" if self.block is None else None

    def dequantize(
        self, where: str, state: TensorsByName, transposed: Collection[str]
    ) -> dict[str, torch.Tensor]:
        assert self.block is not None
        result = dict(state)
        for key, tensor in state.items():
            if tensor.dtype not in FP8:
                continue
            scales = result.pop(f"{key}_scale_inv", None)
            if scales is None:
                raise CheckpointError(f"{where} lacks {key}_scale_inv; download it again")
            sizes = [n or whole for n, whole in zip(self.block, tensor.shape[-2:], strict=False)]
            blocks = [-(-whole // n) for n, whole in zip(sizes, tensor.shape[-2:], strict=False)]
            if scales.numel() != 1 and [*scales.shape] != [*tensor.shape[:-2], *blocks]:
                raise CheckpointError(
                    f"{where}: {key}_scale_inv is {[*scales.shape]}, an unknown layout of "
                    f"scales for {[*tensor.shape]}; specify the original checkpoint"
                )
            result[key] = dequantize_fp8(tensor, scales, sizes)
        return result


_FORMATS: dict[str, type[QuantizationFormat]] = {
    "gptq": group_quantized.GptqFormat,
    "awq": group_quantized.AwqFormat,
    "auto-round": group_quantized.AutoRoundFormat,
    "compressed-tensors": group_quantized.CompressedTensorsFormat,
    "mxfp4": Mxfp4Format,
    "fp8": Fp8Format,
}


def _mxfp4_parts(
    where: str, state: Mapping[str, torch.Tensor]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return blocks, [..., R, G, 16], and scales, [..., R, G], by name. Raises CheckpointError."""
    parts = {}
    for key, blocks in state.items():
        name = key.removesuffix("_blocks")
        if name == key:
            continue
        scales = state.get(f"{name}_scales")
        if (
            scales is None
            or scales.ndim < 2
            or (blocks.dtype, scales.dtype) != (torch.uint8, torch.uint8)
            or blocks.shape != (*scales.shape, 16)
        ):
            raise CheckpointError(f"{where}: {key} and its scales do not fit; download it again")
        parts[name] = blocks, scales
    return parts


def dequantize_mxfp4(name: str, blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantize blocks of 32 four-bit numbers with shared exponents, exactly, to bfloat16.

    [..., R, G, 16] and [..., R, G] -> [..., R, 32 G]
    """
    tensor = _mxfp4_tensor(name, blocks, scales)
    return lazy_rows(tensor, (*scales.shape[:-1], tensor.shape[1]), torch.bfloat16)


def _mxfp4_tensor(name: str, blocks: torch.Tensor, scales: torch.Tensor) -> QuantizedTensor:
    """Return the matrices of all experts as one, [E * R, 32 G]."""
    packed, exponents = (
        tensor.flatten(0, ndim).numpy()
        for tensor, ndim in ((blocks, blocks.ndim - 3), (scales, scales.ndim - 2))
    )
    shape = (len(packed), 32 * packed.shape[1])
    numbers = np.array([*_E2M1, *(-n for n in _E2M1)], np.float32)

    def codes(rows: Any) -> np.ndarray:
        bytes_ = packed[rows]
        return np.stack((bytes_ & 15, bytes_ >> 4), -1).reshape(*bytes_.shape[:-1], 32)

    def unpack(rows: np.ndarray) -> IntegerBlocks:
        integers = ggml_types.MXFP4_INTEGERS[codes(rows)]
        return IntegerBlocks(integers, ggml_types.mxfp4_scales(exponents[rows]))

    def dequantize(rows: slice | np.ndarray) -> np.ndarray:
        values = numbers[codes(rows)]
        factors = _to_float(torch.from_numpy(exponents[rows])).numpy()
        return (values * factors[..., None]).reshape(-1, shape[1])

    num_bytes = blocks.nbytes + scales.nbytes
    return QuantizedTensor(
        name, "mxfp4", shape, num_bytes, ggml_types.MXFP4_LAYOUT, dequantize, unpack
    )


_STATE = ".quant_state.bitsandbytes__"
_STATE_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")


def _dequantize_four_bit(
    matrix: torch.Tensor, parts: Mapping[str, torch.Tensor], stated: Mapping[str, Any]
) -> torch.Tensor:
    """Dequantize 4-bit indices into a table of 16 numbers, with a scale per block, to float32.

    A byte has two indices, the first in its high half. With double quantization scales are indices
    into a table of 256 numbers, with scales and a common offset. [R, C]
    """
    shape, size = tuple(map(int, stated["shape"])), int(stated["blocksize"])
    count = math.prod(shape)
    packed, table = matrix.reshape(-1).view(torch.uint8), parts["quant_map"].float()
    scales = parts["absmax"]
    if len(shape) != 2 or len(packed) != -(-count // 2) or table.shape != (16,):
        raise ValueError(f"{len(packed)} bytes of weights, {[*shape]} by its quant_state")
    if size < 2 or size % 2 or len(scales) != -(-count // size):
        raise ValueError(f"{len(scales)} scales for blocks of {size} in {[*shape]}")
    nested = parts.get("nested_absmax")
    if nested is not None:
        outer, of_scales = parts["nested_quant_map"].float(), int(stated["nested_blocksize"])
        if outer.shape != (256,) or len(nested) != -(-len(scales) // max(of_scales, 1)):
            raise ValueError(f"{len(nested)} scales of {len(scales)} scales")
        factors = nested.float().repeat_interleave(of_scales)[: len(scales)]
        scales = outer[scales.int()] * factors + float(stated["nested_offset"])
    scales = scales.float()

    def read() -> torch.Tensor:
        wide = torch.empty(count)
        step = size * max(1, _PIECE // size)
        for at in range(0, count, step):
            end = min(at + step, count)
            codes = packed[at // 2 : -(-end // 2)]
            values = table[torch.stack((codes >> 4, codes & 15), -1).flatten().int()]
            factors = scales[at // size : -(-end // size)].repeat_interleave(size)
            wide[at:end] = values[: end - at] * factors[: end - at]
        return wide.reshape(shape)

    return LazyTensor(torch.empty(shape, device="meta"), read)


def dequantize_fp8(matrix: torch.Tensor, scales: torch.Tensor, block: list[int]) -> torch.Tensor:
    """Dequantize fp8 numbers with a scale per block (DeepSeek-V3); edge blocks may be partial.

    The result is exact in bfloat16 if all scales are powers of two, else rounded to float32.
    [..., R, C] and [..., R / block, C / block] -> [..., R, C]
    """
    factors = _to_float(scales)
    exponents = factors.abs().frexp()
    exact = bool(((exponents[0] == 0.5) & (exponents[1].abs() <= _EXACT)).all())
    dtype = torch.bfloat16 if exact else torch.float32

    def read() -> torch.Tensor:
        if factors.numel() == 1:
            return (matrix.float() * factors.reshape(())).to(dtype)
        wide = torch.empty(matrix.shape, dtype=dtype)
        for i in range(factors.shape[-2]):
            rows = slice(i * block[0], (i + 1) * block[0])
            row = factors[..., i, :].repeat_interleave(block[1], -1)[..., None, : matrix.shape[-1]]
            wide[..., rows, :] = matrix[..., rows, :].float() * row
        return wide

    return LazyTensor(torch.empty(matrix.shape, dtype=dtype, device="meta"), read)


def _to_float(scales: torch.Tensor) -> torch.Tensor:
    """Return scales in float32; bytes are e8m0 exponents."""
    return (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float()
