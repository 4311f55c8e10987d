"""NVIDIA's plug-in for TensorRT-RTX, taken up by this process's ONNX Runtime."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from .packages import PLUG_IN

MODULE = "onnxruntime_ep_nv_tensorrt_rtx"
PROVIDER = "NvTensorRTRTXExecutionProvider"


def devices(ort: Any) -> list[Any]:
    """The GPUs that it would run on, as ONNX Runtime has them.

    ModuleNotFoundError where it is not installed; ONNX Runtime's errors where it does not load.
    """
    module = importlib.import_module(MODULE)
    if not _shown(ort):
        folder = Path(module.get_library_path()).parent
        # The wheel brings CUDA's runtime under a name by which no loader finds it.
        for library in folder.glob("libcudart.so.*"):
            with contextlib.suppress(OSError):
                ctypes.CDLL("libcudart.so.13")
                break
            ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
        with contextlib.suppress(ort.capi._pybind_state.InvalidArgument):  # it was taken up before
            ort.register_execution_provider_library(PROVIDER, module.get_library_path())
    return _shown(ort)


def _shown(ort: Any) -> list[Any]:
    return [one for one in ort.get_ep_devices() if one.ep_name == PROVIDER]


def versions() -> tuple[str, str]:
    """The plug-in's version, and that of the TensorRT-RTX in it."""
    folder = Path(importlib.import_module(MODULE).get_library_path()).parent
    found = [
        match[1]
        for path in folder.glob("*tensorrt_rtx*")
        if (match := re.search(r"(?:\.so\.|_rtx_)(\d+[._]\d+[._]\d+)", path.name))
    ]
    return metadata.version(PLUG_IN), max(found, default="unknown").replace("_", ".")
