"""Names of graph variants: the attention operators, optionally followed by a type.

The type is the compute type or the cache type. A graph variant without a compute type is for CPUs:
it computes in float32, with integer products for quantized weights. `qdq` computes in float16 with
DequantizeLinear nodes, as TensorRT requires.
"""

from __future__ import annotations

from .precision import DTYPES, HALF_DTYPES

OPS = ("onnx", "gqa")
QDQ = "qdq"  # only DequantizeLinear reads integers
COMPUTE_TYPES = {"fp32": "float32", **HALF_DTYPES, QDQ: "float16"}  # by suffix
INT8_CACHES = "kv8"  # only GroupQueryAttention reads integers
CACHE_SUFFIXES = {"kv16": "float16", INT8_CACHES: "int8"}  # cache types by suffix
CACHE_TYPES = {"fp16": "kv16", "int8": INT8_CACHES}  # suffixes by value of the option --cache
GRAPH_VARIANTS = (
    *OPS,
    *(
        f"{ops}-{suffix}"
        for suffix in (*COMPUTE_TYPES, *CACHE_SUFFIXES)
        for ops in OPS
        if (ops, suffix) not in (("gqa", QDQ), ("onnx", INT8_CACHES))
    ),
)


def attention_ops(ops: str) -> str:
    """Return the attention operators of a graph variant, one of `OPS`."""
    return ops.partition("-")[0]


def compute_dtype(ops: str) -> str:
    """Return the type of a graph variant's activations."""
    return COMPUTE_TYPES.get(_suffix(ops), "float32")


def cache_dtype(ops: str) -> str:
    """Return the type of a graph variant's caches."""
    return CACHE_SUFFIXES.get(_suffix(ops)) or compute_dtype(ops)


def has_compute_type(ops: str) -> bool:
    """Return True if the name of a graph variant has a compute type."""
    return _suffix(ops) in COMPUTE_TYPES


def has_single_rows(ops: str) -> bool:
    """Return True if attention reads a single token as one row, not as two identical ones.

    ONNX Runtime selects other kernels for one row, whose results are not bitwise equal to those of
    longer passes. Graph variants for GPUs leave the second row to the host, which pads the pass.
    """
    return attention_ops(ops) == "gqa" and compute_dtype(ops) in HALF_DTYPES.values()


def is_qdq(ops: str) -> bool:
    """Return True if a graph variant is only for TensorRT."""
    return _suffix(ops) == QDQ


def has_int8_caches(ops: str) -> bool:
    """Return True if the caches of a graph variant are int8, with static scales."""
    return _suffix(ops) == INT8_CACHES


def describe_dtypes(ops: str) -> str:
    """Return the types of a graph variant as a phrase that follows a noun."""
    if has_compute_type(ops):
        return f" computed in {compute_dtype(ops)}"
    return f" with caches in {cache_dtype(ops)}" if ops != attention_ops(ops) else ""


def is_reduced_precision(ops: str, weights_dtype: str) -> bool:
    """Return True if a graph variant has quantized weights, or caches of 8 or 16 bits."""
    return weights_dtype not in DTYPES or cache_dtype(ops) != "float32"


def _suffix(ops: str) -> str:
    return ops.partition("-")[2]
