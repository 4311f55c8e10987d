"""ONNX Runtime sessions, buffers and language models on devices."""
