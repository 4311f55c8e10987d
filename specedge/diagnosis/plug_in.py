"""Plug-ins with execution providers: their packages, registration and versions."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class PlugIn:
    """Plug-in of ONNX Runtime with an execution provider.

    Attributes:
        packages: Packages that contain it, one for each version of CUDA.
        module: Module of the packages.
        provider: Name of the provider.
        matched_runtimes: Release of ONNX Runtime by release of the plug-in; empty if it supports a
            range of releases.
    """

    packages: tuple[str, ...]
    module: str
    provider: str
    matched_runtimes: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_installed(self) -> bool:
        """True if Python finds the module."""
        return util.find_spec(self.module) is not None

    @property
    def version(self) -> tuple[str, str]:
        """Name and version of the installed package."""
        for name in self.packages:
            with contextlib.suppress(metadata.PackageNotFoundError):
                return name, metadata.version(name)
        return self.packages[0], "unknown"

    def mismatch(self, ort: Any) -> tuple[str, str] | None:
        """Return the cause and the fix if the plug-in does not match ONNX Runtime."""
        name, version = self.version
        runtime = self.matched_runtimes.get(_release(version))
        if not self.matched_runtimes or runtime == _release(ort.__version__):
            return None
        cause = (
            f"the plug-in {name} {version} does not match ONNX Runtime {ort.__version__}, which "
            "may give wrong results (onnxruntime issue 32855)"
        )
        matched = ", ".join(f"{p} with {r}" for p, r in self.matched_runtimes.items())
        return cause, f"install releases that match ({matched}), or pip uninstall {name}"

    def devices(self, ort: Any) -> list[Any]:
        """Register the plug-in with ONNX Runtime and return the GPUs that it supports.

        Raises:
            ModuleNotFoundError: The plug-in is not installed.
            Exception: ONNX Runtime's error if the plug-in cannot be loaded.
        """
        module = importlib.import_module(self.module)
        if not self._registered_devices(ort):
            # The wheel contains the CUDA runtime under a name that loaders do not search for.
            for library in Path(module.get_library_path()).parent.glob("libcudart.so.*"):
                with contextlib.suppress(OSError):
                    ctypes.CDLL("libcudart.so.13")
                    break
                ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
            with contextlib.suppress(ort.capi._pybind_state.InvalidArgument):  # registered before
                ort.register_execution_provider_library(self.provider, module.get_library_path())
        return self._registered_devices(ort)

    def _registered_devices(self, ort: Any) -> list[Any]:
        return [device for device in ort.get_ep_devices() if device.ep_name == self.provider]


RTX = PlugIn(
    ("onnxruntime-ep-nv-tensorrt-rtx-cu13",),
    "onnxruntime_ep_nv_tensorrt_rtx",
    "NvTensorRTRTXExecutionProvider",
)
# Names are those of plugin-ep-cuda/ in onnxruntime's sources; matched versions those of the notes
# of its releases plugin-ep-cuda/v0.2.0 and v0.4.0. PyPI has no such package (November 2026).
CUDA = PlugIn(
    ("onnxruntime-ep-cuda13", "onnxruntime-ep-cuda12"),
    "onnxruntime_ep_cuda",
    "CUDAExecutionProvider",
    {"0.2": "1.30", "0.4": "1.32"},
)


def tensorrt_rtx_version() -> str:
    """Return the version of the TensorRT-RTX library in its plug-in."""
    folder = Path(importlib.import_module(RTX.module).get_library_path()).parent
    libraries = [
        match[1]
        for path in folder.glob("*tensorrt_rtx*")
        if (match := re.search(r"(?:\.so\.|_rtx_)(\d+[._]\d+[._]\d+)", path.name))
    ]
    return max(libraries, default="unknown").replace("_", ".")


def _release(version: str) -> str:
    return ".".join(version.split(".")[:2])
