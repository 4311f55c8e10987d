"""NVIDIA's driver and the GPUs that it shows, asked through its own two libraries."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

CUDA, MANAGEMENT = (
    ("nvcuda.dll", "nvml.dll") if sys.platform == "win32" else ("libcuda.so.1", "libnvidia-ml.so.1")
)
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76  # attributes of a device
NO_DEVICE = 100


class DriverError(Exception):
    """A call of the driver that failed, with its number."""

    def __init__(self, call: str, number: int, text: str) -> None:
        super().__init__(f"{call} gave error {number}{f' ({text})' if text else ''}")
        self.number = number


def facts() -> dict[str, Any]:
    """What there is: `missing` and `error`, or `cuda`, the newest CUDA that the driver runs,
    `version`, its own, and `gpus`. GPUs that CUDA_VISIBLE_DEVICES hides are not among them.
    """
    try:
        library = ctypes.CDLL(CUDA)
    except OSError as error:
        return {"missing": CUDA, "error": str(error)}
    found: dict[str, Any] = {"version": _version(), "gpus": []}
    try:
        number = ctypes.c_int()
        _call(library, "cuDriverGetVersion", ctypes.byref(number))
        found["cuda"] = f"{number.value // 1000}.{number.value % 1000 // 10}"
        _call(library, "cuInit", 0)
        _call(library, "cuDeviceGetCount", ctypes.byref(number))
        found["gpus"] = [_gpu(library, i) for i in range(number.value)]
    except DriverError as error:
        if error.number != NO_DEVICE:
            found["error"] = str(error)
    except AttributeError as error:
        found["error"] = f"{CUDA} is no whole driver: {error}"
    return found


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
    """NVIDIA's library of facts, ready; None without it, as in some containers."""
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
    """The free memory of a GPU: CUDA would tell only after taking some of it."""
    library, device, memory = _management(), ctypes.c_void_p(), _Memory()
    if (
        library is None
        or library.nvmlDeviceGetHandleByPciBusId_v2(bus, ctypes.byref(device))
        or library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
    ):
        return None
    return int(memory.free)
