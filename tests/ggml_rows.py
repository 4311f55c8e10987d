"""Random rows in ggml's quantization types, K-quants among them, which gguf-py cannot write."""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

_NUMBERS = {"Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}  # float16 in a block


def random_rows(name: str, num_rows: int, size: int, scale: float = 0.01) -> np.ndarray:
    """Random bytes whose scales are about `scale`. [N, bytes]"""
    block_size, num_bytes = gguf.GGML_QUANT_SIZES[Kind[name]]
    rng = np.random.default_rng([*name.encode(), num_rows])
    blocks = rng.integers(0, 256, (num_rows, size // block_size, num_bytes), dtype=np.uint8)
    if name == "MXFP4":  # a power of two, 2 ** (byte - 128)
        exponents = rng.normal(np.log2(scale), 1, blocks.shape[:2])
        blocks[..., 0] = np.rint(exponents + 128).astype(np.uint8)
        return blocks.reshape(num_rows, -1)
    for start in _NUMBERS.get(name, (0, 2)):
        halves = rng.normal(0, scale, blocks.shape[:2]).astype(np.float16)
        blocks[..., start : start + 2] = halves[..., None].view(np.uint8)
    return blocks.reshape(num_rows, -1)


def random_weights(name: str, num_rows: int, size: int, seed: int) -> np.ndarray:
    """Random rows of a K-quant, about as many above 0 as below, like those of models. [N, bytes]"""
    rows = random_rows(name, num_rows + seed, size, 1e-4)[:num_rows]
    if name in ("Q4_K", "Q5_K"):
        blocks = rows.reshape(num_rows, size // 256, -1)
        halves = (0.0002, 0.0015) if name == "Q4_K" else (0.0001, 0.0015)
        blocks[..., :4] = np.array(halves, np.float16).view(np.uint8)
        blocks[..., 4:12] |= 0b10100000  # scales and minima of 32 to 63
    return rows
