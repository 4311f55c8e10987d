"""Block-wise quantization types of ggml, unpacked to integers, scales and offsets.

The layouts are those of ggml-common.h. Types with a minimum have values d * q - m with unsigned q.
The zero point of a block is the integer nearest to m / d, and the difference becomes the block's
offset, since products with int8 activations are more accurate with smaller offsets. Q4_K has the
middle zero point: it is as accurate as llama.cpp without the memory of 4-bit zero points.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .quantized_tensors import BlockLayout, IntegerBlocks, map_strips

_ZERO_POINT = 128  # zero point of 8-bit integers
MXFP4_LAYOUT = BlockLayout(8, 32)
TWICE_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the numbers of OCP Microscaling Formats (MX) 1.0
MXFP4_INTEGERS = (
    np.array([*TWICE_E2M1, *(-n for n in TWICE_E2M1)]).astype(np.int8).view(np.uint8) ^ _ZERO_POINT
)
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_IQ4_INTEGERS = np.array(_IQ4_VALUES, np.int8).view(np.uint8) ^ _ZERO_POINT


_Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None]  # integers, scales and minima of blocks


@dataclass(frozen=True)
class GgmlType:
    """Quantization type: values are scale * (integer - zero_point), or scale * integer + minimum.

    Attributes:
        layout: Layout in a bundle.
        split: Return the integers, scales and minima of blocks of the file.
        zero_point: Zero point of integers without minima.
        largest: Largest integer with a minimum, if zero points are rounded from minima.
    """

    layout: BlockLayout
    split: Callable[[np.ndarray], _Parts]
    zero_point: int = 0
    largest: int | None = None

    def dequantize(self, blocks: np.ndarray, values: np.ndarray) -> None:
        """Dequantize blocks of the file, [N, blocks, bytes], to `values`, [N, K]."""
        integers, scales, minima = self._parts(blocks)
        wide = values.reshape(integers.shape)
        wide[:] = (integers - np.uint8(self.zero_point)).view(np.int8)
        wide *= scales[..., None]
        if minima is not None:
            wide += minima[..., None]

    def unpack(self, blocks: np.ndarray) -> IntegerBlocks:
        """Return blocks of the file, [N, blocks, bytes], in the layout of a bundle."""
        integers, scales, minima = self._parts(blocks)
        middle = 2 ** (self.layout.bits - 1)
        if minima is None:
            return IntegerBlocks(integers + np.uint8(middle - self.zero_point), scales)
        points = np.full(scales.shape, middle, np.uint8)
        if self.largest is not None:
            ratio = np.divide(-minima, scales, out=np.zeros_like(scales), where=scales != 0)
            points = np.rint(ratio).clip(0, self.largest).astype(np.uint8)
        offsets = points * scales + minima
        if self.layout.has_zero_points:
            return IntegerBlocks(integers, scales, offsets, points)
        return IntegerBlocks(integers + (middle - points)[..., None], scales, offsets)

    def _parts(self, blocks: np.ndarray) -> _Parts:
        """Return integers, [N, blocks, block_size], and scales and minima, [N, blocks]."""
        integers, scales, minima = self.split(blocks)
        return (
            integers.reshape(len(blocks), -1, self.layout.block_size),
            scales.reshape(len(blocks), -1),
            None if minima is None else minima.reshape(len(blocks), -1),
        )


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Return the low halves of bytes, followed by the high halves. [..., n] -> [..., 2 * n]"""
    return np.concatenate((packed & 15, packed >> 4), -1)


def _bits(packed: np.ndarray, width: int) -> np.ndarray:
    """Return each byte's fields of `width` bits, lowest first. [..., n] -> [..., 8 / width, n]"""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return (packed[..., None, :] >> shifts) & np.uint8((1 << width) - 1)


def _halves(blocks: np.ndarray, start: int) -> np.ndarray:
    """Return each block's float16 number at a byte offset, in float32. [..., bytes] -> [..., 1]"""
    return np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16).astype(np.float32)


def _fifth_bits(blocks: np.ndarray, start: int) -> np.ndarray:
    """Return bit 4 of each block's 32 integers, stored in four bytes. [..., bytes] -> [..., 32]"""
    return np.unpackbits(blocks[..., start : start + 4], axis=-1, bitorder="little") << 4


def _split_q4_0(blocks: np.ndarray) -> _Parts:
    return _nibbles(blocks[..., 2:]), _halves(blocks, 0), None


def _split_q4_1(blocks: np.ndarray) -> _Parts:
    return _nibbles(blocks[..., 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _split_q5_0(blocks: np.ndarray) -> _Parts:
    return _nibbles(blocks[..., 6:]) | _fifth_bits(blocks, 2), _halves(blocks, 0), None


def _split_q5_1(blocks: np.ndarray) -> _Parts:
    integers = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks, 4)
    return integers, _halves(blocks, 0), _halves(blocks, 2)


def _split_q8_0(blocks: np.ndarray) -> _Parts:
    return blocks[..., 2:] ^ np.uint8(_ZERO_POINT), _halves(blocks, 0), None


def _split_q6_k(blocks: np.ndarray) -> _Parts:
    low = _nibbles_of_halves(blocks[..., :128], 64)
    high = _bits(blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 32), 2)
    scales = blocks[..., 192:208].view(np.int8).astype(np.float32) * _halves(blocks, 208)
    return low | (high.reshape(low.shape) << 4), scales, None


def _split_q2_k(blocks: np.ndarray) -> _Parts:
    scales = _halves(blocks, 80) * (blocks[..., :16] & 15).astype(np.float32)
    minima = _halves(blocks, 82) * (blocks[..., :16] >> 4).astype(np.float32)
    return _bits(blocks[..., 16:80].reshape(*blocks.shape[:-1], 2, 32), 2), scales, -minima


def _split_q3_k(blocks: np.ndarray) -> _Parts:
    low = _bits(blocks[..., 32:96].reshape(*blocks.shape[:-1], 2, 32), 2)
    high = _bits(blocks[..., :32], 1).reshape(low.shape)
    high_bits = _bits(blocks[..., 104:108], 2).reshape(*blocks.shape[:-1], 16)
    scales = (_nibbles(blocks[..., 96:104]) | (high_bits << 4)).astype(np.float32) - 32
    return low | (high << 2), _halves(blocks, 108) * scales, None


def _split_q4_k(blocks: np.ndarray) -> _Parts:
    return _nibbles_of_halves(blocks[..., 16:], 32), *_scales_and_minima(blocks)


def _split_q5_k(blocks: np.ndarray) -> _Parts:
    low = _nibbles_of_halves(blocks[..., 48:], 32).reshape(*blocks.shape[:-1], 8, 32)
    return low | (_bits(blocks[..., 16:48], 1) << 4), *_scales_and_minima(blocks)


def _split_iq4_nl(blocks: np.ndarray) -> _Parts:
    return _IQ4_INTEGERS[_nibbles(blocks[..., 2:])], _halves(blocks, 0), None


def _split_iq4_xs(blocks: np.ndarray) -> _Parts:
    low, high = (
        _bits(blocks[..., at], width).swapaxes(-1, -2).reshape(*blocks.shape[:-1], 8)
        for at, width in ((slice(4, 8), 4), (slice(2, 4), 2))
    )
    scales = _halves(blocks, 0) * ((low | (high << 4)).astype(np.float32) - 32)
    return _IQ4_INTEGERS[_nibbles_of_halves(blocks[..., 8:], 16)], scales, None


def _split_mxfp4(blocks: np.ndarray) -> _Parts:
    """Return twice the e2m1 numbers, which are integers, with half the e8m0 scale."""
    return MXFP4_INTEGERS[_nibbles(blocks[..., 1:])], mxfp4_scales(blocks[..., :1]), None


def mxfp4_scales(exponents: np.ndarray) -> np.ndarray:
    """Return half of e8m0 numbers, the scales of `MXFP4_INTEGERS`."""
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 128)


def _nibbles_of_halves(packed: np.ndarray, size: int) -> np.ndarray:
    """Unpack nibbles in chunks of `size` bytes, low halves first. [..., n] -> [..., 2 * n]"""
    pieces = _nibbles(packed.reshape(*packed.shape[:-1], -1, size))
    return pieces.reshape(*packed.shape[:-1], -1)


def _scales_and_minima(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the scales and minima of the 8 blocks in super-blocks of Q4_K or Q5_K. [..., 8]"""
    import gguf

    flat = np.ascontiguousarray(blocks[..., 4:16]).reshape(-1, 12)
    scales, minimum = gguf.quants.Q4_K.get_scale_min(flat)
    shape = (*blocks.shape[:-1], 8)
    return (
        _halves(blocks, 0) * scales.reshape(shape).astype(np.float32),
        -_halves(blocks, 2) * minimum.reshape(shape).astype(np.float32),
    )


TYPES = {
    "Q4_0": GgmlType(BlockLayout(4, 32), _split_q4_0, 8),
    "Q4_1": GgmlType(BlockLayout(4, 32, True, True), _split_q4_1, largest=15),
    "Q5_0": GgmlType(BlockLayout(8, 32), _split_q5_0, 16),
    "Q5_1": GgmlType(BlockLayout(8, 32, True), _split_q5_1, largest=31),
    "Q8_0": GgmlType(BlockLayout(8, 32), _split_q8_0, _ZERO_POINT),
    "Q6_K": GgmlType(BlockLayout(8, 16), _split_q6_k, 32),
    "Q2_K": GgmlType(BlockLayout(4, 16, True), _split_q2_k, largest=3),
    "Q3_K": GgmlType(BlockLayout(4, 16), _split_q3_k, 4),
    "Q4_K": GgmlType(BlockLayout(4, 32, True), _split_q4_k),
    "Q5_K": GgmlType(BlockLayout(8, 32, True), _split_q5_k, largest=31),
    "IQ4_NL": GgmlType(BlockLayout(8, 32), _split_iq4_nl, _ZERO_POINT),
    "IQ4_XS": GgmlType(BlockLayout(8, 32), _split_iq4_xs, _ZERO_POINT),
    "MXFP4": GgmlType(MXFP4_LAYOUT, _split_mxfp4, _ZERO_POINT),
}
LAYOUTS = {name: ggml_type.layout for name, ggml_type in TYPES.items()}


def dequantize(data: np.ndarray, type_name: str) -> np.ndarray:
    """Dequantize to the values of gguf-py, in float32. [..., bytes] -> [..., K]

    Types without a layout are dequantized by gguf-py, which processes 16 rows at a time, whose
    overhead dominates for narrow or memory-mapped rows; it gets each strip as a single row.
    """
    import gguf

    quantization_type, ggml_type = gguf.GGMLQuantizationType[type_name], TYPES.get(type_name)
    rows = data.view(np.ndarray).reshape(-1, data.shape[-1])
    shape = gguf.quants.quant_shape_from_byte_shape(data.shape, quantization_type)
    values = np.empty((len(rows), shape[-1]), np.float32)

    def convert(at: slice) -> None:
        with np.errstate(over="ignore", invalid="ignore"):  # such weights are rejected later
            if ggml_type is not None:
                ggml_type.dequantize(_blocks(rows[at], quantization_type), values[at])
            else:
                part = gguf.quants.dequantize(rows[at].reshape(1, -1), quantization_type)
                values[at] = part.reshape(-1, shape[-1])

    map_strips(convert, *values.shape)
    return values.reshape(shape)


def unpack(rows: np.ndarray, type_name: str) -> IntegerBlocks:
    """Unpack rows of a quantization type in `LAYOUTS`. [N, bytes] of uint8"""
    import gguf

    return TYPES[type_name].unpack(_blocks(rows, gguf.GGMLQuantizationType[type_name]))


def _blocks(rows: np.ndarray, quantization_type: Any) -> np.ndarray:
    """Split rows into blocks of the file. [N, bytes] -> [N, blocks, bytes of a block]"""
    import gguf

    _, num_bytes = gguf.GGML_QUANT_SIZES[quantization_type]
    return np.ascontiguousarray(rows).reshape(len(rows), -1, num_bytes)
