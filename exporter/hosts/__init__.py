"""Host graphs, for applications that run a bundle with ONNX Runtime alone."""
