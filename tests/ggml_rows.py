"""Random rows in ggml's quantization types, K-quants among them, which gguf-py cannot write."""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

_NUMBERS = {  # float16 in a block
    "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,),
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
}  # fmt: skip


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
    """Random rows in super-blocks, about as many above 0 as below, like weights. [N, bytes]"""
    rows = random_rows(name, num_rows + seed, size, 1e-4)[:num_rows]
    if name == "Q2_K":
        blocks = rows.reshape(num_rows, size // 256, -1)
        blocks[..., 80:] = np.array((0.001, 0.0015), np.float16).view(np.uint8)
        blocks[..., :16] |= 0b10001000  # scales and minima of 8 to 15
    if name in ("Q4_K", "Q5_K"):
        blocks = rows.reshape(num_rows, size // 256, -1)
        halves = (0.0002, 0.0015) if name == "Q4_K" else (0.0001, 0.0015)
        blocks[..., :4] = np.array(halves, np.float16).view(np.uint8)
        blocks[..., 4:12] |= 0b10100000  # scales and minima of 32 to 63
    return rows
