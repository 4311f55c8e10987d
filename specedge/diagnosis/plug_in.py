"""Plug-in with the provider of TensorRT-RTX: its package, registration and versions."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import re
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGE = "onnxruntime-ep-nv-tensorrt-rtx-cu13"
MODULE = "onnxruntime_ep_nv_tensorrt_rtx"
PROVIDER = "NvTensorRTRTXExecutionProvider"


def devices(ort: Any) -> list[Any]:
    """Register the plug-in with ONNX Runtime and return the GPUs that it supports.

    Raises:
        ModuleNotFoundError: The plug-in is not installed.
        Exception: ONNX Runtime's error if the plug-in cannot be loaded.
    """
    module = importlib.import_module(MODULE)
    if not _registered_devices(ort):
        folder = Path(module.get_library_path()).parent
        # The wheel contains the CUDA runtime under a name that loaders do not search for.
        for library in folder.glob("libcudart.so.*"):
            with contextlib.suppress(OSError):
                ctypes.CDLL("libcudart.so.13")
                break
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
        with contextlib.suppress(ort.capi._pybind_state.InvalidArgument):  # registered before
            ort.register_execution_provider_library(PROVIDER, module.get_library_path())
    return _registered_devices(ort)


def _registered_devices(ort: Any) -> list[Any]:
    return [device for device in ort.get_ep_devices() if device.ep_name == PROVIDER]


def versions() -> tuple[str, str]:
    """Return the versions of the plug-in and of the TensorRT-RTX library in it."""
    folder = Path(importlib.import_module(MODULE).get_library_path()).parent
    libraries = [
        match[1]
        for path in folder.glob("*tensorrt_rtx*")
        if (match := re.search(r"(?:\.so\.|_rtx_)(\d+[._]\d+[._]\d+)", path.name))
    ]
    return metadata.version(PACKAGE), max(libraries, default="unknown").replace("_", ".")
