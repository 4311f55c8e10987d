"""Block-wise quantization types of ggml, unpacked to integers, scales and offsets.

The layouts are those of ggml-common.h. Types with a minimum have values d * q - m with unsigned q.
The zero point of a block is the integer nearest to m / d, and the difference becomes the block's
offset, since products with int8 activations are more accurate with smaller offsets. Q4_K has the
middle zero point: it is as accurate as llama.cpp without the memory of 4-bit zero points.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from specedge.cpu_count import cpu_count

from .quantized_tensors import BlockLayout, IntegerBlocks, strips

_ZERO_POINT = 128  # zero point of 8-bit integers
MXFP4_LAYOUT = BlockLayout(8, 32)
TWICE_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the numbers of OCP Microscaling Formats (MX) 1.0
MXFP4_INTEGERS = (
    np.array([*TWICE_E2M1, *(-n for n in TWICE_E2M1)]).astype(np.int8).view(np.uint8) ^ _ZERO_POINT
)
_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_IQ4_INTEGERS = np.array(_IQ4_VALUES, np.int8).view(np.uint8) ^ _ZERO_POINT


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


def _unpack_q4_0(blocks: np.ndarray) -> IntegerBlocks:
    return IntegerBlocks(_nibbles(blocks[..., 2:]), _halves(blocks, 0))


def _unpack_q4_1(blocks: np.ndarray) -> IntegerBlocks:
    scale, minimum = _halves(blocks, 0), _halves(blocks, 2)
    points = _zero_points(scale, minimum, 15)
    return IntegerBlocks(_nibbles(blocks[..., 4:]), scale, points * scale + minimum, points)


def _unpack_q5_0(blocks: np.ndarray) -> IntegerBlocks:
    integers = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks, 2)
    return IntegerBlocks(integers + np.uint8(_ZERO_POINT - 16), _halves(blocks, 0))


def _unpack_q5_1(blocks: np.ndarray) -> IntegerBlocks:
    integers = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks, 4)
    scale, minimum = _halves(blocks, 0), _halves(blocks, 2)
    points = _zero_points(scale, minimum, 31)
    return IntegerBlocks(integers + (_ZERO_POINT - points), scale, points * scale + minimum)


def _unpack_q8_0(blocks: np.ndarray) -> IntegerBlocks:
    return IntegerBlocks(blocks[..., 2:] ^ np.uint8(_ZERO_POINT), _halves(blocks, 0))


def _unpack_q6_k(blocks: np.ndarray) -> IntegerBlocks:
    low = _nibbles_of_halves(blocks[..., :128], 64)
    high = _bits(blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 32), 2)
    integers = low | (high.reshape(low.shape) << 4)
    scales = blocks[..., 192:208].view(np.int8).astype(np.float32) * _halves(blocks, 208)
    shifted = integers + np.uint8(_ZERO_POINT - 32)
    return IntegerBlocks(shifted.reshape(*blocks.shape[:-1], 16, 16), scales)


def _unpack_q2_k(blocks: np.ndarray) -> IntegerBlocks:
    scales = _halves(blocks, 80) * (blocks[..., :16] & 15).astype(np.float32)
    minimum = _halves(blocks, 82) * (blocks[..., :16] >> 4).astype(np.float32)
    integers = _bits(blocks[..., 16:80].reshape(*blocks.shape[:-1], 2, 32), 2)
    points = _zero_points(scales, -minimum, 3)
    shifted = integers.reshape(*blocks.shape[:-1], 16, 16) + (np.uint8(8) - points)[..., None]
    return IntegerBlocks(shifted, scales, points * scales - minimum)


def _unpack_q3_k(blocks: np.ndarray) -> IntegerBlocks:
    low = _bits(blocks[..., 32:96].reshape(*blocks.shape[:-1], 2, 32), 2)
    high = _bits(blocks[..., :32], 1).reshape(low.shape)
    integers = (low | (high << 2)) + np.uint8(8 - 4)
    high_bits = _bits(blocks[..., 104:108], 2).reshape(*blocks.shape[:-1], 16)
    scales = (_nibbles(blocks[..., 96:104]) | (high_bits << 4)).astype(np.float32) - 32
    return IntegerBlocks(integers, _halves(blocks, 108) * scales)


def _unpack_q4_k(blocks: np.ndarray) -> IntegerBlocks:
    scales, minimum = _scales_and_minima(blocks)
    integers = _nibbles_of_halves(blocks[..., 16:], 32)
    return IntegerBlocks(
        integers.reshape(*blocks.shape[:-1], 8, 32), scales, np.float32(8) * scales - minimum
    )


def _unpack_q5_k(blocks: np.ndarray) -> IntegerBlocks:
    scales, minimum = _scales_and_minima(blocks)
    low = _nibbles_of_halves(blocks[..., 48:], 32).reshape(*blocks.shape[:-1], 8, 32)
    integers = low | (_bits(blocks[..., 16:48], 1) << 4)
    points = _zero_points(scales, -minimum, 31)
    shifted = integers + (_ZERO_POINT - points)[..., None]
    return IntegerBlocks(shifted, scales, points * scales - minimum)


def _unpack_iq4_nl(blocks: np.ndarray) -> IntegerBlocks:
    return IntegerBlocks(_IQ4_INTEGERS[_nibbles(blocks[..., 2:])], _halves(blocks, 0))


def _unpack_iq4_xs(blocks: np.ndarray) -> IntegerBlocks:
    low, high = (
        _bits(blocks[..., at], width).swapaxes(-1, -2).reshape(*blocks.shape[:-1], 8)
        for at, width in ((slice(4, 8), 4), (slice(2, 4), 2))
    )
    scales = _halves(blocks, 0) * ((low | (high << 4)).astype(np.float32) - 32)
    return IntegerBlocks(_IQ4_INTEGERS[_nibbles_of_halves(blocks[..., 8:], 16)], scales)


def _unpack_mxfp4(blocks: np.ndarray) -> IntegerBlocks:
    """Unpack twice the e2m1 numbers, which are integers, with half the e8m0 scale."""
    return IntegerBlocks(MXFP4_INTEGERS[_nibbles(blocks[..., 1:])], mxfp4_scales(blocks[..., :1]))


def mxfp4_scales(exponents: np.ndarray) -> np.ndarray:
    """Return half of e8m0 numbers, the scales of `MXFP4_INTEGERS`."""
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 128)


def _zero_points(scales: np.ndarray, minima: np.ndarray, largest: int) -> np.ndarray:
    """Return the integer of each block whose value is nearest to 0, at most `largest`."""
    ratio = np.divide(-minima, scales, out=np.zeros_like(scales), where=scales != 0)
    return np.rint(ratio).clip(0, largest).astype(np.uint8)


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
        _halves(blocks, 2) * minimum.reshape(shape).astype(np.float32),
    )


_UNPACK: dict[str, Callable[[np.ndarray], IntegerBlocks]] = {
    "Q4_0": _unpack_q4_0,
    "Q4_1": _unpack_q4_1,
    "Q5_0": _unpack_q5_0,
    "Q5_1": _unpack_q5_1,
    "Q8_0": _unpack_q8_0,
    "Q6_K": _unpack_q6_k,
    "Q2_K": _unpack_q2_k,
    "Q3_K": _unpack_q3_k,
    "Q4_K": _unpack_q4_k,
    "Q5_K": _unpack_q5_k,
    "IQ4_NL": _unpack_iq4_nl,
    "IQ4_XS": _unpack_iq4_xs,
    "MXFP4": _unpack_mxfp4,
}
LAYOUTS = {
    "Q4_0": BlockLayout(4, 32),
    "Q4_1": BlockLayout(4, 32, has_offsets=True, has_zero_points=True),
    "Q5_0": BlockLayout(8, 32),
    "Q5_1": BlockLayout(8, 32, has_offsets=True),
    "Q8_0": BlockLayout(8, 32),
    "Q6_K": BlockLayout(8, 16),
    "Q2_K": BlockLayout(4, 16, has_offsets=True),
    "Q3_K": BlockLayout(4, 16),
    "Q4_K": BlockLayout(4, 32, has_offsets=True),
    "Q5_K": BlockLayout(8, 32, has_offsets=True),
    "IQ4_NL": BlockLayout(8, 32),
    "IQ4_XS": BlockLayout(8, 32),
    "MXFP4": MXFP4_LAYOUT,
}


def dequantize(data: np.ndarray, type_name: str) -> np.ndarray:
    """Dequantize to float32 as gguf-py does. [..., bytes] -> [..., K]

    gguf-py processes 16 rows at a time, whose overhead dominates for narrow or memory-mapped rows;
    here it gets each strip as a single row, in as many threads as there are CPUs.
    """
    import gguf

    quantization_type = gguf.GGMLQuantizationType[type_name]
    rows = data.view(np.ndarray).reshape(-1, data.shape[-1])
    shape = gguf.quants.quant_shape_from_byte_shape(data.shape, quantization_type)
    values = np.empty((len(rows), shape[-1]), np.float32)

    def convert(at: slice) -> None:
        with np.errstate(over="ignore", invalid="ignore"):  # such weights are rejected later
            part = gguf.quants.dequantize(rows[at].reshape(1, -1), quantization_type)
        values[at] = part.reshape(-1, shape[-1])

    pieces = list(strips(*values.shape))
    if len(pieces) == 1:
        convert(pieces[0])
    else:
        with ThreadPoolExecutor(cpu_count()) as pool:
            list(pool.map(convert, pieces))
    return values.reshape(shape)


def unpack(rows: np.ndarray, type_name: str) -> IntegerBlocks:
    """Unpack rows of a quantization type in `LAYOUTS`. [N, bytes] of uint8"""
    import gguf

    _, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    blocks = np.ascontiguousarray(rows).reshape(len(rows), -1, num_bytes)
    unpacked = _UNPACK[type_name](blocks)
    size = LAYOUTS[type_name].block_size
    return IntegerBlocks(
        unpacked.integers.reshape(len(rows), -1, size),
        unpacked.scales.reshape(len(rows), -1),
        _flat(unpacked.offsets),
        _flat(unpacked.zero_points),
    )


def _flat(numbers: np.ndarray | None) -> np.ndarray | None:
    """Return numbers of blocks as rows. [N, ...] -> [N, blocks]"""
    return None if numbers is None else numbers.reshape(len(numbers), -1)
