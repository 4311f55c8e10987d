"""TensorRT-RTX: NVIDIA's plug-in provider, its engines and sessions."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from specedge.diagnosis import plug_in
from specedge.diagnosis.doctor import why_not
from specedge.errors import DeviceError

from ..ort import first_line, inference_session, is_onnxruntime_error
from .engines import EnginePlatform

GPUS = ("sm86", "sm89", "sm120", "sm121")  # supported by TensorRT-RTX 1.7.1


def platform(ort: Any, index: int, gpu: str | None = None) -> EnginePlatform:
    """Return the engine platform of a GPU of this machine, or of the architecture `gpu`."""
    if gpu is not None and gpu not in GPUS:
        raise DeviceError(f"TensorRT-RTX compiles for {', '.join(GPUS)}, not for '{gpu}'")
    device = _device(ort, index)
    architecture = gpu or device.ep_metadata.get("target_architecture")
    if not architecture or not re.fullmatch(r"sm\d+", architecture):
        raise DeviceError(f"rtx:{index} does not report its architecture; specify one with --gpu")
    return EnginePlatform(
        "rtx", plug_in.RTX.version[1], plug_in.tensorrt_rtx_version(), architecture
    )


def compile_graph(
    ort: Any, graph: Path, target: Path, platform: EnginePlatform, index: int
) -> None:
    """Compile a graph into one engine.

    Raises:
        DeviceError: The graph does not become a single engine.
    """
    options = _options(ort)
    options.add_provider_for_devices([_device(ort, index)], {"nv_target_sm": platform.gpu})
    try:
        compiler = ort.ModelCompiler(options, os.fspath(graph))
        compiler.compile_to_file(os.fspath(target))
    except Exception as error:
        if not is_onnxruntime_error(error):
            raise
        raise DeviceError(
            f"{graph}: TensorRT-RTX cannot compile it ({first_line(error)}); it supports the "
            "graph variants onnx-fp16, onnx-bf16 and, for integer weights, onnx-qdq: export the "
            "bundle again with --compute fp16, bf16 or qdq"
        ) from error


def open_session(ort: Any, path: str, index: int) -> Any:
    """Open a session of an engine. Raises ONNX Runtime's errors."""
    options = _options(ort)
    options.add_provider_for_devices([_device(ort, index)], {})
    return inference_session(path, options)


def _options(ort: Any) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4  # errors arrive as exceptions
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    return options


def _device(ort: Any, index: int) -> Any:
    """Return a GPU that the plug-in supports.

    Raises:
        DeviceError: There is no such GPU; the message has the remedy.
    """
    try:
        supported = plug_in.RTX.devices(ort)
    except ModuleNotFoundError as error:
        if error.name != plug_in.RTX.module:
            raise
        raise DeviceError(
            f"rtx needs NVIDIA's plug-in {plug_in.RTX.packages[0]}: pip install 'specedge[rtx]'"
        ) from error
    except Exception as error:
        if not is_onnxruntime_error(error):
            raise
        raise DeviceError(why_not("rtx") or f"rtx: {first_line(error)}") from error
    if index >= len(supported):
        raise DeviceError(
            why_not(f"rtx:{index}")
            or f"rtx:{index} does not exist: the plug-in supports {len(supported)} GPUs here"
        )
    return supported[index]
