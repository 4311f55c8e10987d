"""The names of op sets: what attention is made of and, where it ends in one, a type to compute in.

A set without a type computes as the CPU does best: in float32, and of integers in integers.
"""

from __future__ import annotations

from .precision import DTYPES, HALVES

OPS = ("onnx", "gqa")
COMPUTED = {"fp32": "float32", **HALVES}  # the types, by what names end in
OP_SETS = (*OPS, *(f"{ops}-{kind}" for kind in COMPUTED for ops in OPS))


def attention(ops: str) -> str:
    """What attention is made of in an op set: one of `OPS`."""
    return ops.partition("-")[0]


def computed(ops: str) -> str:
    """The type of an op set's activations and caches."""
    return COMPUTED.get(ops.partition("-")[2], "float32")


def is_rounded(ops: str, weights_dtype: str) -> bool:
    """Whether a set's graphs are another function than the model's own in float32."""
    return weights_dtype not in DTYPES or computed(ops) != "float32"
