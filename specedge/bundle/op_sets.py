"""The names of op sets: what attention is made of and, where it ends in one, a type.

A set computes in that type, or has caches in it. Without one, and beside such caches, it computes
as the CPU does best: in float32, and of integers in integers. `qdq` is float16 with integers as
compilers of engines take them.
"""

from __future__ import annotations

from .precision import DTYPES, HALVES

OPS = ("onnx", "gqa")
ENGINES = "qdq"  # DequantizeLinear alone reads integers
COMPUTED = {"fp32": "float32", **HALVES, ENGINES: "float16"}  # the types, by what names end in
CACHED = {"kv16": "float16"}  # the types of caches alone,
CACHES = {"fp16": "kv16"}  # by what they are asked for as
OP_SETS = (
    *OPS,
    *(
        f"{ops}-{kind}"
        for kind in (*COMPUTED, *CACHED)
        for ops in OPS
        if (ops, kind) != ("gqa", ENGINES)
    ),
)


def attention(ops: str) -> str:
    """What attention is made of in an op set: one of `OPS`."""
    return ops.partition("-")[0]


def computed(ops: str) -> str:
    """The type of an op set's activations."""
    return COMPUTED.get(_kind(ops), "float32")


def cached(ops: str) -> str:
    """The type of an op set's caches."""
    return CACHED.get(_kind(ops)) or computed(ops)


def is_typed(ops: str) -> bool:
    """Whether an op set names the type that it computes in."""
    return _kind(ops) in COMPUTED


def is_for_engines(ops: str) -> bool:
    """Whether an op set is made for compilers of engines alone."""
    return _kind(ops) == ENGINES


def described(ops: str) -> str:
    """What an op set's name says of types, to stand behind what has them."""
    if is_typed(ops):
        return f" computed in {computed(ops)}"
    return f" with caches in {cached(ops)}" if ops != attention(ops) else ""


def is_rounded(ops: str, weights_dtype: str) -> bool:
    """Whether a set's graphs are another function than the model's own in float32."""
    return weights_dtype not in DTYPES or cached(ops) != "float32"


def _kind(ops: str) -> str:
    return ops.partition("-")[2]
