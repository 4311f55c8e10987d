"""Installed packages that provide ONNX Runtime and the libraries of its GPU providers."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from dataclasses import dataclass
from importlib import metadata

# Oldest supported versions, as in pyproject.toml; a test compares them.
FLOORS = {"onnxruntime": "1.23", "onnxruntime-gpu": "1.23"}
RELATED = re.compile(r"(onnxruntime|ort-|nvidia-|tensorrt|torch$|numpy$|tokenizers$)")
_CUDA = {
    "libcudart.so.13": "nvidia-cuda-runtime~=13.0",
    "libcublasLt.so.13": "nvidia-cublas~=13.0",
    "libcublas.so.13": "nvidia-cublas~=13.0",
    "libcurand.so.10": "nvidia-curand~=10.0",
}
_TENSORRT = "tensorrt-cu13>=10.15,<10.17"
LIBRARIES = {  # that ONNX Runtime's providers link on Linux, with the packages that have them
    "cuda": _CUDA,
    "tensorrt": _CUDA
    | {
        "libcudnn.so.9": "nvidia-cudnn-cu13~=9.0",
        "libnvinfer.so.10": _TENSORRT,
        "libnvonnxparser.so.10": _TENSORRT,
    },
}


@dataclass(frozen=True)
class Package:
    """Package that installs the module `onnxruntime`."""

    name: str
    version: str

    @property
    def is_old(self) -> bool:
        """True if the version is older than specedge supports."""
        return version_numbers(self.version) < version_numbers(self.floor)

    @property
    def floor(self) -> str:
        """Oldest supported version."""
        return FLOORS.get(self.name, FLOORS["onnxruntime"])

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def related() -> dict[str, str]:
    """Return the versions of all packages that are related to devices, by name."""
    return {name: d.version for name, d in sorted(_distributions().items()) if RELATED.match(name)}


def runtimes() -> tuple[Package, ...]:
    """Return the packages that install the module `onnxruntime`; there should be one.

    Packages with other names are recognized by their files: onnxruntime-extensions has others.
    """
    return tuple(
        Package(name, distribution.version)
        for name, distribution in sorted(_distributions().items())
        if name in FLOORS
        or (
            name.startswith(("onnxruntime", "ort-"))
            and "onnxruntime/__init__.py" in map(str, distribution.files or ())
        )
    )


def missing_libraries(device: str) -> dict[str, str]:
    """Load the libraries of a device's provider; return the loader's errors by library.

    If a dependency cannot be loaded, it is named instead of the library that needs it.
    """
    errors: dict[str, str] = {}
    for name in LIBRARIES.get(device, {}) if sys.platform == "linux" else ():
        try:
            ctypes.CDLL(name)
        except OSError as error:
            culprit, _, reason = str(error).partition(": ")
            errors.setdefault(os.path.basename(culprit), reason or str(error))
    return errors


def version_numbers(version: str, count: int = 2) -> tuple[int, ...]:
    """Return the first numbers of a version, for comparisons."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:count])


def _distributions() -> dict[str, metadata.Distribution]:
    """Return distributions by name; of equal names the first one, which Python imports."""
    distributions: dict[str, metadata.Distribution] = {}
    for distribution in metadata.distributions():
        if distribution.name and distribution.version:  # missing in incomplete installations
            name = re.sub(r"[-_.]+", "-", distribution.name).lower()
            distributions.setdefault(name, distribution)
    return distributions
