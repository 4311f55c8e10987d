"""Host graphs, for apps that run a bundle by ONNX Runtime alone."""
