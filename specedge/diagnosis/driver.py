"""NVIDIA driver: its version and GPUs, queried through libcuda and NVML; Jetson release."""

from __future__ import annotations

import ctypes
import platform
import re
import sys
from pathlib import Path
from typing import Any

CUDA, MANAGEMENT = (
    ("nvcuda.dll", "nvml.dll") if sys.platform == "win32" else ("libcuda.so.1", "libnvidia-ml.so.1")
)
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
NO_DEVICE = 100
TEGRA = Path("/etc/nv_tegra_release")


class DriverError(Exception):
    """Failed call of the driver, with its error number."""

    def __init__(self, call: str, number: int, text: str) -> None:
        super().__init__(f"{call} gave error {number}{f' ({text})' if text else ''}")
        self.number = number


def jetson_number(release: str) -> int:
    """Return the major number of L4T in a Jetson's release, such as 36; 0 if there is none."""
    number = re.match(r"R(\d+)", release)
    return int(number[1]) if number else 0


def jetson_release() -> str | None:
    """Return the first line of a Jetson's release file; None on other machines."""
    if platform.machine() != "aarch64":
        return None
    try:
        return TEGRA.read_text("utf-8", "replace").splitlines()[0].lstrip("# ")
    except (OSError, IndexError):
        return None


def query() -> dict[str, Any]:
    """Return the driver's state.

    Returns:
        `missing`, the library that is not installed, and `error`; or `cuda`, the newest CUDA that
        the driver supports, `version`, its own, and `gpus`, without those that
        CUDA_VISIBLE_DEVICES hides. `error` if a call fails.
    """
    try:
        library = ctypes.CDLL(CUDA)
    except OSError as error:
        return {"missing": CUDA, "error": str(error)}
    state: dict[str, Any] = {"version": _version(), "gpus": []}
    try:
        number = ctypes.c_int()
        _call(library, "cuDriverGetVersion", ctypes.byref(number))
        state["cuda"] = f"{number.value // 1000}.{number.value % 1000 // 10}"
        _call(library, "cuInit", 0)
        _call(library, "cuDeviceGetCount", ctypes.byref(number))
        state["gpus"] = [_gpu(library, i) for i in range(number.value)]
    except DriverError as error:
        if error.number != NO_DEVICE:
            state["error"] = str(error)
    except AttributeError as error:
        state["error"] = f"{CUDA} is incomplete: {error}"
    return state


def _gpu(library: Any, index: int) -> dict[str, Any]:
    device, size, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    _call(library, "cuDeviceGet", ctypes.byref(device), index)
    _call(library, "cuDeviceGetName", name, 256, device)
    _call(library, "cuDeviceTotalMem_v2", ctypes.byref(size), device)
    capability = []
    for attribute in (CAPABILITY_MAJOR, CAPABILITY_MINOR):
        number = ctypes.c_int()
        _call(library, "cuDeviceGetAttribute", ctypes.byref(number), attribute, device)
        capability.append(number.value)
    bus = ctypes.create_string_buffer(32)
    _call(library, "cuDeviceGetPCIBusId", bus, 32, device)
    return {
        "name": name.value.decode(errors="replace"),
        "capability": capability,
        "memory": size.value,
        "free": _free(bus.value),
    }


def _call(library: Any, name: str, *arguments: Any) -> None:
    number = getattr(library, name)(*arguments)
    if number:
        text = ctypes.c_char_p()
        if hasattr(library, "cuGetErrorString"):
            library.cuGetErrorString(number, ctypes.byref(text))
        raise DriverError(name, number, (text.value or b"").decode(errors="replace"))


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


def _management() -> Any:
    """Return NVML, initialized; None if it is absent, as in some containers."""
    try:
        library = ctypes.CDLL(MANAGEMENT)
        return None if library.nvmlInit_v2() else library
    except (OSError, AttributeError):
        return None


def _version() -> str | None:
    library, text = _management(), ctypes.create_string_buffer(96)
    if library is None or library.nvmlSystemGetDriverVersion(text, 96):
        return None
    return text.value.decode(errors="replace")


def _free(bus: bytes) -> int | None:
    """Return the free bytes of a GPU, by NVML, since CUDA would need a context."""
    library, device, memory = _management(), ctypes.c_void_p(), _Memory()
    if (
        library is None
        or library.nvmlDeviceGetHandleByPciBusId_v2(bus, ctypes.byref(device))
        or library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
    ):
        return None
    return int(memory.free)
