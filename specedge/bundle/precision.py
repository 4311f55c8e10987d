"""What a model of each precision is stored in, computes in and may be off by: one table for the
exporter, the runtime and the audit.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import BundleError

DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}  # what the format knows, and its bytes

HALF_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}  # what matrices can be stored in
BLOCK_BITS = {"int8-block": 8, "int4": 4}  # bits of weights that have a scale for every 32 of them
QUANTIZED_DTYPES = ("int8", *BLOCK_BITS)  # what weights can be rounded to, their inputs to int8
PRECISION_CHOICES = ("fp32", *HALF_DTYPES, *QUANTIZED_DTYPES)  # of an export
GPTQ, NEAREST = "gptq", "nearest"
ROUNDINGS = (GPTQ, NEAREST)  # how weights are rounded to these
# What weights need. Before 1.30 bytes cannot be multiplied rightly on every processor; before 1.31
# QMoE's rows do not keep their bits, and those of 4 bits it cannot multiply as bytes.
OLDEST_ONNXRUNTIME = {"float": "1.28", "integers": "1.30", "experts": "1.31"}


@dataclass(frozen=True)
class Precision:
    """Types of a model that computes in `compute`.

    Weights are stored in the first of `weights` that is the checkpoint's own and loses no bit.
    A graph's error may be `multiple` times that of PyTorch in the same precision, and `floor` of
    the largest value: sums in another order differ by some ulps.
    """

    compute: str
    weights: tuple[str, ...]
    cache: str
    multiple: float
    floor: float


FLOAT32 = Precision(
    compute="float32",
    weights=("float32", "float16", "bfloat16"),
    cache="float32",
    multiple=8.0,
    floor=16 * 2.0**-24,
)
PRECISIONS = {FLOAT32.compute: FLOAT32}


def precision_of(what: str, compute: str, cache: str) -> Precision:
    """The row of a model; BundleError for one that this specedge neither exports nor runs."""
    found = PRECISIONS.get(compute)
    if found is None or found.cache != cache:
        known = ", ".join(f"{p.compute} with caches in {p.cache}" for p in PRECISIONS.values())
        raise BundleError(
            f"{what} computes in {compute} with caches in {cache}, this specedge runs {known}; use "
            "a specedge that runs it, or export the pair again"
        )
    return found
