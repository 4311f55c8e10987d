"""The lean loop: NumPy, ONNX Runtime and tokenizers; never torch, transformers or onnx."""
