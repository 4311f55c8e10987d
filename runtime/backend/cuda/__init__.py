"""NVIDIA GPUs through ONNX Runtime's CUDA, TensorRT and TensorRT-RTX providers.

The CUDA provider was tested on hardware, the other two were not. Host code is also tested against
mock CUDA libraries, which count calls and enforce the rules of graph capture but compute nothing
(`tests/gpu/standin`). `docs/devices.md` lists the results.
"""
