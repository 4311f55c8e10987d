"""Group-wise quantized matrices: GPTQ, AWQ, AutoRound, compressed-tensors, bitsandbytes int8.

A group of inputs has a scale s and a zero point z for each output:

    W[n, k] = (q[n, k] - z[n, g(k)]) * s[n, g(k)]    N outputs, K inputs, G groups

With float16 or bfloat16 scales these products are exact in float32. Integers of 4 or 8 bits are
packed into 32-bit words, lowest bits first. Bits and group sizes are derived from the shapes of
each matrix, since a checkpoint may mix them.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specedge.errors import CheckpointError

from .lazy_tensors import lazy_rows
from .quantized_tensors import (
    BlockLayout,
    IntegerBlocks,
    QuantizationFormat,
    QuantizedTensor,
    TensorsByName,
)

_SMALLEST_BLOCK = 16  # of MatMulNBits
# Larger groups are split, with equal scales: products with int8 activations in larger blocks are
# not batch-invariant on processors with AVX-512 and VNNI (ONNX Runtime 1.32).
_LARGEST_BLOCKS = {4: 32, 8: 64}
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # nibbles of a word in the order of its outputs
_BITS = (4, 8)
_INT8_STEP = 7.874015718698502e-3  # 1 / 127, as bitsandbytes rounds it
_AUTO_ROUND_LAYOUTS = {
    "auto_round": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2",
    "auto_round:gptq": "gptq",
    "auto_round:auto_gptq": "gptq",
    "auto_round:awq": "gemm",
    "auto_round:auto_awq": "gemm",
}
_INTEGER_FORMATS = ("pack-quantized", "int-quantized", "naive-quantized")
# Scales of activations and caches are ignored: a bundle quantizes activations dynamically.
_ACTIVATION_PARTS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")
_CACHE_PARTS = (".q_scale", ".k_scale", ".v_scale", ".k_zero_point", ".v_zero_point")


class GroupFormat(QuantizationFormat):
    """Format of integers with a scale for each group of inputs."""

    main_parts: tuple[str, ...]  # names of tensors of integers; "weight" only in int8
    growth = 8.0  # 4 bits in float32
    can_be_kept = True

    def quantized_tensors(self, where: str, state: TensorsByName) -> list[QuantizedTensor]:
        return [*self._tensors_by_module(where, state).values()]

    def dequantize(
        self, where: str, state: TensorsByName, transposed: Collection[str]
    ) -> dict[str, torch.Tensor]:
        tensors = self._tensors_by_module(where, state)
        result = {key: tensor for key, tensor in state.items() if not key.endswith(_CACHE_PARTS)}
        for module, tensor in tensors.items():
            for part in _parts(module, result):
                del result[f"{module}.{part}"]
            matrix = lazy_rows(tensor)
            is_transposed = module.rpartition(".")[2] in transposed
            result[f"{module}.weight"] = matrix.T if is_transposed else matrix
        for key in result:
            module, _, part = key.rpartition(".")
            if module in tensors and part not in ("weight", "bias"):
                raise CheckpointError(
                    f"{where}: {key} is a part of a weight in an unsupported format; "
                    "specify the original checkpoint"
                )
        return result

    def _tensors_by_module(self, where: str, state: TensorsByName) -> dict[str, QuantizedTensor]:
        tensors = {}
        for key, tensor in state.items():
            module, _, part = key.rpartition(".")
            is_quantized = part != "weight" or tensor.dtype == torch.int8
            if part in self.main_parts and is_quantized:
                parts = _ModuleParts(where, self.name, self.config, state, module)
                tensors[module] = self._read(parts, part)
        if not tensors:
            raise CheckpointError(
                f"{where}: its config.json says {self.name}, and its files contain no such "
                "weights; download it again"
            )
        return tensors

    @abstractmethod
    def _read(self, parts: _ModuleParts, main_part: str) -> QuantizedTensor:
        """Read the matrix of a module."""


class GptqFormat(GroupFormat):
    """Integers in 32-bit words in a layout of GPTQ or AWQ."""

    name = "GPTQ"
    main_parts = ("qweight",)
    layouts: tuple[str, ...] = ("gptq", "gptq_v2", "gemm")

    @property
    def layout(self) -> str:
        """Layout: "gptq", "gptq_v2", "gemm", or an unknown one."""
        layout = self.config.get("checkpoint_format") or self.config.get("format") or "gptq"
        return str(layout).lower()

    def unsupported_variant(self) -> str | None:
        config, layout = self.config, self.layout
        if layout not in self.layouts:
            return f"{self.name}'s layout '{layout[:40]}'"
        bits = config.get("bits", 4)
        if bits not in ((4,) if layout == "gemm" else _BITS):
            return f"{self.name} of {str(bits)[:40]} bits"
        if config.get("data_type", "int") != "int":
            return f"{self.name}'s data type '{str(config['data_type'])[:40]}'"
        if config.get("act_bits", 16) not in (None, 16, 32):
            return f"{self.name} with activations of {str(config['act_bits'])[:40]} bits"
        if transform := _transform(config):
            return f"{self.name} with {transform}"
        return None

    def _read(self, parts: _ModuleParts, main_part: str) -> QuantizedTensor:
        packed, zeros = parts.get("qweight"), parts.get("qzeros")
        scales = parts.get("scales", is_float=True)
        tensors = {"qweight": packed, "scales": scales, "qzeros": zeros}
        is_words = {packed.dtype, zeros.dtype} == {torch.int32}
        if not is_words or {tensor.ndim for tensor in tensors.values()} != {2}:
            raise parts.misfit(tensors)
        read = self._read_awq if self.layout == "gemm" else self._read_gptq
        return read(parts, packed, scales, zeros)

    def _read_gptq(
        self, parts: _ModuleParts, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
    ) -> QuantizedTensor:
        """Read qweight [K / p, N], scales [G, N] and qzeros [G, N / p], p integers in a word.

        The first version of the format stores zero points minus 1, subtracted from whole words.
        """
        num_groups, width = scales.shape
        bits = 32 * zeros.shape[1] // max(width, 1)
        size = 32 * packed.shape[0] // max(bits, 1)
        if (
            bits not in _BITS
            or [*packed.shape] != [size * bits // 32, width]
            or [*zeros.shape] != [num_groups, width * bits // 32]
        ):
            raise parts.misfit({"qweight": packed, "scales": scales, "qzeros": zeros})
        words, integers = zeros.numpy().view(np.uint32), packed.numpy()
        if self.layout == "gptq" and not parts.is_symmetric:
            words = words + np.uint32(0x11111111 if bits == 4 else 0x01010101)
        points = parts.zero_points("qzeros", _unpack(words, bits).T, bits, is_gptq=True)
        return parts.tensor(
            bits, (width, size), scales.T, points, "g_idx",
            lambda rows: _unpack_rows(integers[:, rows], bits),
        )  # fmt: skip

    def _read_awq(
        self, parts: _ModuleParts, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
    ) -> QuantizedTensor:
        """Read qweight [K, N / 8], scales [G, N] and qzeros [G, N / 8], 8 outputs in a word."""
        size, (num_groups, width) = len(packed), scales.shape
        if [*packed.shape] != [size, width / 8] or [*zeros.shape] != [num_groups, width / 8]:
            raise parts.misfit({"qweight": packed, "scales": scales, "qzeros": zeros})
        words = packed.numpy()

        def read(rows: Any) -> np.ndarray:
            indices = np.arange(width)[rows]
            start, end = indices.min() // 8, indices.max() // 8 + 1
            return _unpack_awq(words[:, start:end])[indices - 8 * start]

        points = parts.zero_points("qzeros", _unpack_awq(zeros.numpy()), 4)
        return parts.tensor(4, (width, size), scales.T, points, None, read)


class AwqFormat(GptqFormat):
    """Integers of 4 bits in AWQ's layout."""

    name = "AWQ"
    layouts = ("gemm",)

    @property
    def layout(self) -> str:
        if self.config.get("backend") == "llm-awq":
            return "llm-awq"
        return str(self.config.get("version") or self.config.get("format") or "gemm").lower()


class AutoRoundFormat(GptqFormat):
    """AutoRound's integers, in the layout of its export."""

    name = "AutoRound"

    @property
    def layout(self) -> str:
        config = self.config
        packing = config.get("packing_format") or config.get("backend") or "auto_round:auto_gptq"
        return _AUTO_ROUND_LAYOUTS.get(str(packing), str(packing))


class BitsAndBytesInt8Format(GroupFormat):
    """int8 rows of bitsandbytes (LLM.int8)."""

    name = "bitsandbytes"
    main_parts = ("weight",)

    def _read(self, parts: _ModuleParts, main_part: str) -> QuantizedTensor:
        """Read int8 weight [N, K] in row layout, and SCB [N], the largest value of each row."""
        matrix, largest = parts.get("weight"), parts.get("SCB", is_float=True)
        layout = parts.state.get(f"{parts.module}.weight_format", torch.zeros(()))
        if matrix.ndim != 2 or largest.shape != matrix.shape[:1] or int(layout.max()) != 0:
            raise parts.misfit({"weight": matrix, "SCB": largest, "weight_format": layout})
        values, scales = matrix.numpy(), largest.float()[:, None] * _INT8_STEP
        shape = (len(matrix), matrix.shape[1])
        return parts.tensor(
            8, shape, scales, None, None, lambda rows: _shift_to_unsigned(values[rows])
        )


class CompressedTensorsFormat(GroupFormat):
    """Integers of compressed-tensors (llm-compressor), packed or in int8."""

    name = "compressed-tensors"
    main_parts = ("weight", "weight_packed")

    def unsupported_variant(self) -> str | None:
        name, config, groups = self.name, self.config, self.config.get("config_groups")
        schemes = [*groups.values()] if isinstance(groups, dict) else []
        formats = [config.get("format"), *(s.get("format") for s in schemes if isinstance(s, dict))]
        for layout in formats:
            if layout not in (None, "mixed-precision", *_INTEGER_FORMATS):
                return f"{name} in the format '{str(layout)[:40]}'"
        sparsity = config.get("sparsity_config")
        if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
            return f"{name} in the sparse format '{str(sparsity['format'])[:40]}'"
        if transform := _transform(config):
            return f"{name} with {transform}"
        for scheme in schemes:
            weights = scheme.get("weights") if isinstance(scheme, dict) else None
            if not isinstance(weights, dict):
                return f"{name} with a group whose weights are not described"
            if weights.get("type", "int") != "int" or weights.get("num_bits", 8) not in _BITS:
                weight_type = f"{str(weights.get('type'))[:40]}{str(weights.get('num_bits'))[:40]}"
                return f"{name} with weights in {weight_type}"
        return None if schemes else f"{name} without config_groups"

    def _read(self, parts: _ModuleParts, main_part: str) -> QuantizedTensor:
        """Read weight_packed [N, K / p] or int8 weight [N, K], and weight_scale [N, G].

        Packed integers and zero points, [N / p, G], are shifted to unsigned ones.
        """
        matrix, scales = parts.get(main_part), parts.get("weight_scale", is_float=True)
        tensors = {main_part: matrix, "weight_scale": scales}
        width, size, bits = len(matrix), matrix.shape[-1], 8
        if main_part == "weight_packed":
            shape = parts.get("weight_shape").tolist()
            size = shape[-1] if len(shape) == 2 and shape[0] == width else 0
            bits = next((b for b in _BITS if math.ceil(size * b / 32) == matrix.shape[-1]), 0)
        if scales.numel() == 1:
            scales = scales.reshape(1, 1).expand(width, 1)
        elif scales.ndim == 1:
            scales = scales[:, None]
        if matrix.ndim != 2 or scales.ndim != 2 or len(scales) != width or 0 in (size, bits):
            raise parts.misfit(tensors)
        values = matrix.numpy()

        def read(rows: Any) -> np.ndarray:
            if main_part == "weight":
                return _shift_to_unsigned(values[rows])
            return _unpack(values[rows], bits)[:, :size]

        points = self._unsigned_zero_points(parts, bits, scales)
        return parts.tensor(bits, (width, size), scales, points, "weight_g_idx", read)

    def _unsigned_zero_points(
        self, parts: _ModuleParts, bits: int, scales: torch.Tensor
    ) -> np.ndarray | None:
        """Return zero points as unsigned integers, [N, G]; None if there are none."""
        zeros = parts.find("weight_zero_point")
        if zeros is None:
            return None
        width, num_groups = scales.shape
        if zeros.dtype == torch.int32 and [*zeros.shape] == [-(-width * bits // 32), num_groups]:
            unsigned = _unpack_rows(zeros.numpy(), bits)[:, :width].T
        elif zeros.dtype == torch.int8 and zeros.numel() in (1, scales.numel()):
            signed = zeros.numpy().reshape(-1, num_groups).astype(np.int16)
            unsigned = (signed + 2 ** (bits - 1)).astype(np.uint8)
            unsigned = np.broadcast_to(unsigned, (width, num_groups))
        else:
            raise parts.misfit({"weight_zero_point": zeros, "weight_scale": scales})
        return parts.zero_points("weight_zero_point", unsigned, bits)


_MODULE_PARTS = {
    "qweight", "qzeros", "scales", "g_idx", "weight", "weight_packed", "weight_scale",
    "weight_zero_point", "weight_shape", "weight_g_idx", "SCB", "weight_format", *_ACTIVATION_PARTS,
}  # fmt: skip


def _parts(module: str, state: TensorsByName) -> list[str]:
    return [part for part in _MODULE_PARTS if f"{module}.{part}" in state]


def _is_symmetric(config: Mapping[str, Any]) -> bool:
    """Return True if a config says so for all modules, and for none of them the contrary."""
    groups = config.get("config_groups")
    if groups is not None:
        return all(scheme["weights"].get("symmetric", True) is True for scheme in groups.values())
    modules = {**(config.get("dynamic") or {}), **(config.get("extra_config") or {})}
    stated = [m["sym"] for m in modules.values() if isinstance(m, dict) and "sym" in m]
    is_symmetric = config.get("sym") is True or config.get("zero_point") is False
    return is_symmetric and all(value is True for value in stated)


def _transform(config: Mapping[str, Any]) -> str | None:
    """Return the key of a config's activation transform; None without one."""
    keys = ("transform_config", "rotation_config", "hadamard_config")
    return next((key for key in keys if config.get(key)), None)


@dataclass(frozen=True)
class _ModuleParts:
    """Tensors of a module whose matrix is quantized."""

    where: str
    method: str
    config: Mapping[str, Any]
    state: TensorsByName
    module: str

    def find(self, part: str) -> torch.Tensor | None:
        """Return a part; None if the checkpoint lacks it."""
        return self.state.get(f"{self.module}.{part}")

    def get(self, part: str, is_float: bool = False) -> torch.Tensor:
        """Return a part of integers, or of floats. Raises CheckpointError."""
        key, tensor = f"{self.module}.{part}", self.find(part)
        if tensor is None:
            raise CheckpointError(f"{self.where} lacks {key}; download it again")
        if tensor.is_floating_point() != is_float:
            raise CheckpointError(
                f"{self.where}: {key} is stored in {str(tensor.dtype).removeprefix('torch.')}, an "
                "unknown layout; specify the original checkpoint"
            )
        return tensor

    @property
    def is_symmetric(self) -> bool:
        return _is_symmetric(self.config)

    def zero_points(
        self, part: str, stored: np.ndarray, bits: int, is_gptq: bool = False
    ) -> np.ndarray | None:
        """Return unsigned zero points; None for those of a symmetric method.

        Quantizers of GPTQ disagree whether the middle is stored minus 1, also under one format's
        name, so a symmetric checkpoint has the middle where either of the two is stored.
        """
        if not self.is_symmetric:
            return stored
        middle = 2 ** (bits - 1)
        is_lower = is_gptq and stored.size > 0 and stored.flat[0] == middle - 1
        if (other := stored[stored != middle - is_lower]).size:
            raise CheckpointError(
                f"{self.where}: {self.module}.{part} has the zero point {other[0]}, but the "
                f"quantization config is symmetric (zero point {middle}); specify the original "
                "checkpoint"
            )
        return None

    def misfit(self, parts: Mapping[str, torch.Tensor]) -> CheckpointError:
        shapes = ", ".join(
            f"{part} {str(tensor.dtype).removeprefix('torch.')} {[*tensor.shape]}"
            for part, tensor in parts.items()
        )
        return CheckpointError(
            f"{self.where}: the parts of {self.module} do not fit each other ({shapes}); download "
            "it again, or specify the original checkpoint"
        )

    def _group_size(self, size: int, num_groups: int) -> int:
        """Return the group size: the config's if it fits the number of groups."""
        stated = self.config.get("group_size", self.config.get("q_group_size"))
        for number in (stated, size // max(num_groups, 1)):
            if isinstance(number, int) and number > 0 and -(-size // number) == num_groups:
                return number
        raise CheckpointError(
            f"{self.where}: {self.module} has {num_groups} groups of {size} inputs, an unknown "
            "layout; specify the original checkpoint"
        )

    def _input_order(self, part: str, size: int, group_size: int) -> np.ndarray | None:
        """Return the inputs sorted by group; None if they are already in that order. [K]"""
        groups = self.find(part)
        if groups is None or bool((groups == -1).all()):
            return None
        expected = np.arange(size) // group_size
        if groups.shape != (size,) or groups.is_floating_point():
            raise self.misfit({part: groups})
        numbers = groups.numpy()
        order = np.argsort(numbers, kind="stable")
        if not np.array_equal(numbers[order], expected):
            raise CheckpointError(
                f"{self.where}: {self.module}.{part} does not name {expected[-1] + 1} groups of "
                f"{group_size} inputs; download it again, or specify the original checkpoint"
            )
        return None if np.array_equal(numbers, expected) else order

    def tensor(
        self,
        bits: int,
        shape: tuple[int, int],
        scales: torch.Tensor,
        zeros: np.ndarray | None,
        groups: str | None,
        read: Callable[[Any], np.ndarray],
    ) -> QuantizedTensor:
        """Return the matrix, [N, K].

        Args:
            bits: Bits of an integer.
            shape: N and K.
            scales: Scales, [N, G].
            zeros: Unsigned zero points, [N, G]; None for 2 ** (bits - 1).
            groups: Part of group indices by input, if the format has one.
            read: Return integers of rows, [n, K].
        """
        size, num_groups = shape[1], scales.shape[1]
        group_size = self._group_size(size, num_groups)
        order = None if groups is None else self._input_order(groups, size, group_size)
        block_size = math.gcd(group_size, size, _LARGEST_BLOCKS[bits])
        num_blocks = size // block_size
        of_blocks = np.arange(num_blocks) * block_size // group_size
        has_zeros = zeros is not None and bool((zeros != 2 ** (bits - 1)).any())

        def unpack(rows: Any) -> IntegerBlocks:
            integers = read(rows)
            integers = integers if order is None else integers[:, order]
            return IntegerBlocks(
                integers.reshape(-1, num_blocks, block_size),
                scales[rows].float().numpy()[:, of_blocks],
                zero_points=zeros[rows][:, of_blocks] if zeros is not None and has_zeros else None,
            )

        def dequantize(rows: slice | np.ndarray) -> np.ndarray:
            values = unpack(rows).dequantize(bits).reshape(-1, size)
            return values if order is None else values[:, np.argsort(order)]

        is_kept = block_size >= _SMALLEST_BLOCK
        grouping = f"groups of {group_size}" if num_groups > 1 else "per channel"
        parts = (f"{self.module}.{part}" for part in _parts(self.module, self.state))
        return QuantizedTensor(
            self.module,
            f"{self.method} int{bits}, {grouping}",
            shape,
            sum(self.state[part].nbytes for part in parts),
            BlockLayout(bits, block_size, has_zero_points=has_zeros) if is_kept else None,
            dequantize,
            unpack,
            order,
        )


def _shift_to_unsigned(values: np.ndarray) -> np.ndarray:
    """Add 128 to int8 numbers."""
    return values.view(np.uint8) ^ np.uint8(128)


def _unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpack words, lowest bits first. [..., n] -> [..., n * 32 / bits]"""
    data = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return data
    return np.stack((data & 15, data >> 4), -1).reshape(*data.shape[:-1], -1)


def _unpack_rows(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpack the words of each column to a row. [n, N] -> [N, n * 32 / bits]"""
    per_word = 32 // bits
    integers = _unpack(words, bits).reshape(*words.shape, per_word)
    return integers.transpose(1, 0, 2).reshape(words.shape[1], -1)


def _unpack_awq(words: np.ndarray) -> np.ndarray:
    """Unpack AWQ's words of eight outputs, transposed. [n, N / 8] -> [N, n]"""
    integers = _unpack(words, 4).reshape(*words.shape, 8)[..., _AWQ_ORDER]
    return integers.reshape(len(words), -1).T
