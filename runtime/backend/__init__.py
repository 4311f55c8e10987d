"""What runs a model: ONNX Runtime's sessions and buffers."""
