"""TensorRT-RTX, NVIDIA's plug-in: engines for a GPU that need not be here, and their sessions."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from specedge.diagnosis import packages, plug_in
from specedge.diagnosis.providers import why_not
from specedge.errors import DeviceError

from .engines import Platform
from .ort import first_line, inference_session, is_of_onnxruntime

GPUS = ("sm86", "sm89", "sm120", "sm121")  # that TensorRT-RTX 1.7.1 compiles for


def platform(ort: Any, index: int, gpu: str | None = None) -> Platform:
    """What engines hang on, for a GPU of this machine or one that is named."""
    if gpu is not None and gpu not in GPUS:
        raise DeviceError(f"TensorRT-RTX compiles for {', '.join(GPUS)}, not for '{gpu}'")
    device = _device(ort, index)
    found = gpu or device.ep_metadata.get("target_architecture")
    if not found or not re.fullmatch(r"sm\d+", found):
        raise DeviceError(f"rtx:{index} does not say which GPU it is; name one with --gpu")
    return Platform("rtx", *plug_in.versions(), found)


def compile_graph(ort: Any, graph: Path, target: Path, where: Platform, index: int) -> None:
    """Write a graph's engine for a platform. DeviceError where not all of it becomes one."""
    options = _options(ort)
    options.add_provider_for_devices([_device(ort, index)], {"nv_target_sm": where.gpu})
    try:
        compiler = ort.ModelCompiler(options, os.fspath(graph))
        compiler.compile_to_file(os.fspath(target))
    except Exception as error:
        if not is_of_onnxruntime(error):
            raise
        raise DeviceError(
            f"{graph}: TensorRT-RTX cannot compile it ({first_line(error)}); it takes the op sets "
            "onnx-fp16, onnx-bf16 and, of integers, onnx-qdq alone: export the pair with --compute "
            "fp16, bf16 or qdq"
        ) from error


def opened(ort: Any, path: str, index: int) -> Any:
    """A session of an engine. ONNX Runtime's errors where it does not load."""
    options = _options(ort)
    options.add_provider_for_devices([_device(ort, index)], {})
    return inference_session(path, options)


def _options(ort: Any) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4  # failures arrive as exceptions
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    return options


def _device(ort: Any, index: int) -> Any:
    """One of the GPUs that the plug-in runs on. DeviceError, with what would help, without it."""
    try:
        found = plug_in.devices(ort)
    except ModuleNotFoundError as error:
        if error.name != plug_in.MODULE:
            raise
        raise DeviceError(
            f"rtx needs NVIDIA's plug-in {packages.PLUG_IN}: pip install 'specedge[rtx]'"
        ) from error
    except Exception as error:
        if not is_of_onnxruntime(error):
            raise
        raise DeviceError(why_not("rtx") or f"rtx: {first_line(error)}") from error
    if index >= len(found):
        raise DeviceError(
            why_not(f"rtx:{index}")
            or f"there is no rtx:{index}, only {len(found)} that the plug-in runs on"
        )
    return found[index]
