"""Runtime of requests on NumPy, ONNX Runtime and tokenizers, without torch or transformers."""
