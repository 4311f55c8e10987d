"""Whether products of bytes are right on this machine, asked of whatever multiplies them.

Sums of products of unsigned and signed bytes saturate at 16 bits on AVX2 without VNNI, unless ONNX
Runtime is told to make both unsigned. NumPy only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

PRODUCT_GRAPH = Path(__file__).with_name(
    "product.onnx"
)  # x [T, 64] times a constant [64, 32], in bytes
UNSIGNED_OPTION = "session.x64quantprecision"  # "1" makes both unsigned


def are_exact(multiply: Callable[[np.ndarray], np.ndarray]) -> bool:
    """Whether `PRODUCT` gives NumPy's products of the largest bytes, by one row and by several."""
    rng = np.random.default_rng(0)
    x = rng.choice(np.array([0, 1, 127, 128, 129, 254, 255], np.uint8), (5, 64))
    x[0] = 255
    wanted = (x.astype(np.int32) - 128) @ weights().astype(np.int32)
    found = multiply(x), multiply(x[:1])
    return np.array_equal(found[0], wanted) and np.array_equal(found[1], wanted[:1])


def weights() -> np.ndarray:
    """The constant in `PRODUCT`: the largest bytes, of both signs. [64, 32]"""
    columns = np.arange(64 * 32).reshape(64, 32)
    return np.where(columns % 3, 127, -127).astype(np.int8)
