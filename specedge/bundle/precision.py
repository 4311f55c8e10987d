"""Storage and compute types with their error bounds, shared by exporter, runtime and audit."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import BundleError

DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes per element

HALF_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}  # storage types of matrices
BLOCK_BITS = {"int8-block": 8, "int4": 4}  # bits of block-wise types (block 32)
KEEP = "keep"  # quantized weights of the checkpoint
QUANTIZED_DTYPES = ("int8", *BLOCK_BITS, KEEP)  # types of quantized weights; activations are int8
PRECISION_CHOICES = ("fp32", *HALF_DTYPES, *QUANTIZED_DTYPES)
GPTQ, NEAREST = "gptq", "nearest"
ROUNDINGS = (GPTQ, NEAREST)
# Oldest version by operators and by type of weights. Before 1.30 int8 products are not exact on
# every processor, which a load tests; before 1.31 QMoE is not batch-invariant and has no 4-bit
# weights with int8 activations.
OLDEST_ONNXRUNTIME = {
    "gqa": "1.23", "onnx": "1.28", "integers": "1.30", "experts": "1.31", "batched": "1.32",
}  # fmt: skip


@dataclass(frozen=True)
class Precision:
    """Types of a model and the error bounds of its graphs.

    Attributes:
        compute: Compute type.
        weights: Storage types; weights are stored in the first that is the checkpoint's type and
            loses no bits.
        cache: Type of the caches.
        multiple: Largest error as a multiple of PyTorch's in the same precision.
        floor: Error allowed in addition, relative to the largest value: sums in another order
            differ by some ulps.
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
    multiple=16.0,
    floor=16 * 2.0**-24,
)
PRECISIONS = {FLOAT32.compute: FLOAT32}


def precision_of(name: str, compute: str, cache: str) -> Precision:
    """Return the precision of a model; raise BundleError if it is not supported."""
    precision = PRECISIONS.get(compute)
    if precision is None or precision.cache != cache:
        supported = ", ".join(f"{p.compute} with caches in {p.cache}" for p in PRECISIONS.values())
        raise BundleError(
            f"{name} computes in {compute} with caches in {cache}; this version of specedge "
            f"supports {supported}; upgrade specedge, or export the bundle again"
        )
    return precision
