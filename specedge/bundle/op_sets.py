"""The names of op sets: what attention is made of and, where it ends in one, a type.

A set computes in that type, or has caches in it. Without one, and beside such caches, it computes
as the CPU does best: in float32, and of integers in integers. `qdq` is float16 with integers as
compilers of engines take them.
"""

from __future__ import annotations

from .precision import DTYPES, HALF_DTYPES

OPS = ("onnx", "gqa")
QDQ = "qdq"  # DequantizeLinear alone reads integers
COMPUTE_TYPES = {
    "fp32": "float32",
    **HALF_DTYPES,
    QDQ: "float16",
}  # the types, by what names end in
CACHE_SUFFIXES = {"kv16": "float16"}  # the types of caches alone,
CACHE_TYPES = {"fp16": "kv16"}  # by what they are asked for as
OP_SETS = (
    *OPS,
    *(
        f"{ops}-{kind}"
        for kind in (*COMPUTE_TYPES, *CACHE_SUFFIXES)
        for ops in OPS
        if (ops, kind) != ("gqa", QDQ)
    ),
)


def attention_ops(ops: str) -> str:
    """What attention is made of in an op set: one of `OPS`."""
    return ops.partition("-")[0]


def compute_dtype(ops: str) -> str:
    """The type of an op set's activations."""
    return COMPUTE_TYPES.get(_kind(ops), "float32")


def cache_dtype(ops: str) -> str:
    """The type of an op set's caches."""
    return CACHE_SUFFIXES.get(_kind(ops)) or compute_dtype(ops)


def has_compute_type(ops: str) -> bool:
    """Whether an op set names the type that it computes in."""
    return _kind(ops) in COMPUTE_TYPES


def is_qdq(ops: str) -> bool:
    """Whether an op set is made for compilers of engines alone."""
    return _kind(ops) == QDQ


def describe_dtypes(ops: str) -> str:
    """What an op set's name says of types, to stand behind what has them."""
    if has_compute_type(ops):
        return f" computed in {compute_dtype(ops)}"
    return f" with caches in {cache_dtype(ops)}" if ops != attention_ops(ops) else ""


def is_reduced_precision(ops: str, weights_dtype: str) -> bool:
    """Whether a set's graphs are another function than the model's own in float32."""
    return weights_dtype not in DTYPES or cache_dtype(ops) != "float32"


def _kind(ops: str) -> str:
    return ops.partition("-")[2]
