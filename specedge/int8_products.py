"""Probe graph for exact int8 matrix products.

Sums of products of unsigned and signed bytes saturate at 16 bits on AVX2 without VNNI, unless a
session option makes both operands unsigned. NumPy only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

# x [T, 64], uint8, times a constant [64, 32], int8.
PRODUCT_GRAPH = Path(__file__).with_name("product.onnx")
UNSIGNED_OPTION = "session.x64quantprecision"  # "1" makes both operands unsigned


def are_exact(multiply: Callable[[np.ndarray], np.ndarray]) -> bool:
    """Return True if `PRODUCT_GRAPH` gives NumPy's products, for one row and for several."""
    rng = np.random.default_rng(0)
    x = rng.choice(np.array([0, 1, 127, 128, 129, 254, 255], np.uint8), (5, 64))
    x[0] = 255
    expected = (x.astype(np.int32) - 128) @ weights().astype(np.int32)
    products = multiply(x), multiply(x[:1])
    return np.array_equal(products[0], expected) and np.array_equal(products[1], expected[:1])


def weights() -> np.ndarray:
    """Return the constant of `PRODUCT_GRAPH`: extreme values of both signs [64, 32]."""
    columns = np.arange(64 * 32).reshape(64, 32)
    return np.where(columns % 3, 127, -127).astype(np.int8)
