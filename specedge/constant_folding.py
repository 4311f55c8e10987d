"""Constant folding in ONNX Runtime, which casts and transposes weights when it loads a graph."""

# 0 lifts the limit of 1 GiB of ONNX Runtime 1.27 and later (onnxruntime pull request 28055), above
# which a constant is computed in every pass: with an LM head of 264,000 tokens and 1,024 channels
# in bfloat16, a pass took 1.1 s instead of 0.4 s on a CPU.
FOLDING_LIMIT = ("optimization.constant_folding_max_output_size_in_bytes", "0")
