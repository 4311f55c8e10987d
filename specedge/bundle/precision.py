"""Storage and compute types with their error bounds, shared by exporter, runtime and audit."""

from __future__ import annotations

from ..errors import BundleError

DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}  # bytes per element
CACHE_DTYPES = {**DTYPES, "int8": 1}  # bytes per element of a cache

HALF_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}  # storage types of matrices
BLOCK_BITS = {"int8-block": 8, "int4": 4}  # bits of block-wise types (block 32)
KEEP = "keep"  # quantized weights of the checkpoint
QUANTIZED_DTYPES = ("int8", *BLOCK_BITS, KEEP)  # types of quantized weights; activations are int8
PRECISION_CHOICES = ("fp32", *HALF_DTYPES, *QUANTIZED_DTYPES)
GPTQ, NEAREST = "gptq", "nearest"
ROUNDINGS = (GPTQ, NEAREST)
# Oldest version by operators and by types of weights and caches. Before 1.27 attention on the CPU
# fails with int8 caches; before 1.30 int8 products are not exact on every processor, which a load
# tests; before 1.31 QMoE is not batch-invariant and has no 4-bit weights with int8 activations.
OLDEST_ONNXRUNTIME = {
    "gqa": "1.23", "onnx": "1.28", "integers": "1.30", "int8_caches": "1.27", "experts": "1.31",
    "batched": "1.32",
}  # fmt: skip


DTYPE = "float32"  # of activations and caches in graph variants whose names have no type
# Float32 error of a correct graph: a multiple of PyTorch's, and a part of the largest value, since
# sums in another order differ by some ulps.
ERROR_MULTIPLE = 16.0
ERROR_FLOOR = 16 * 2.0**-24


def check_dtypes(name: str, compute: str, cache: str) -> None:
    """Raise BundleError if the compute type or cache type of a model is not supported."""
    if (compute, cache) != (DTYPE, DTYPE):
        raise BundleError(
            f"{name} computes in {compute} with caches in {cache}; this version of specedge "
            f"supports {DTYPE} with caches in {DTYPE}; upgrade specedge, or export the bundle again"
        )
