"""Random rows in ggml's quantization types, K-quants among them, which gguf-py cannot write."""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

_NUMBERS = {"Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}  # float16 in a block


def random_rows(name: str, num_rows: int, size: int, scale: float = 0.01) -> np.ndarray:
    """Random bytes whose float16 numbers are about `scale`. [N, bytes]"""
    block_size, num_bytes = gguf.GGML_QUANT_SIZES[Kind[name]]
    rng = np.random.default_rng([*name.encode(), num_rows])
    blocks = rng.integers(0, 256, (num_rows, size // block_size, num_bytes), dtype=np.uint8)
    for start in _NUMBERS.get(name, (0, 2)):
        halves = rng.normal(0, scale, blocks.shape[:2]).astype(np.float16)
        blocks[..., start : start + 2] = halves[..., None].view(np.uint8)
    return blocks.reshape(num_rows, -1)
