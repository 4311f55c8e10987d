"""NVIDIA GPUs by ONNX Runtime's CUDA, TensorRT and TensorRT-RTX providers.

This package has not run on NVIDIA hardware. Its host code is tested against stand-in CUDA
libraries, which count calls and enforce the rules of graph capture but compute nothing
(`tests/gpu/standin`). `docs/devices.md` lists what is tested and what is not.
"""
