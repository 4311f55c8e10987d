"""ONNX Runtime's TensorRT provider: options, supported versions, engines and sessions.

Shapes are fixed, so an engine needs no optimization profile. Caches are inputs and outputs of the
network at one address, with static capacity and batch 1, as TensorRT's TensorScatter requires.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specedge.bundle.graph_variants import compute_dtype, is_qdq
from specedge.diagnosis import driver
from specedge.diagnosis.doctor import why_not
from specedge.errors import DeviceError

from ..ort import first_line, inference_session, is_onnxruntime_error
from .engines import EnginePlatform, cache_folder
from .sessions import load_libraries

PROVIDER = "TensorrtExecutionProvider"
VERSIONS = ((10, 15), (10, 16))  # TensorScatter needs 10.15; ONNX Runtime links version 10
_LIBRARY = "nvinfer_10.dll" if os.name == "nt" else "libnvinfer.so.10"


def platform(ort: Any, index: int) -> EnginePlatform:
    """Return the engine platform of this machine's GPU, the only one TensorRT builds for."""
    state = driver.query()
    gpus = state.get("gpus", [])
    if PROVIDER not in ort.get_available_providers() or index >= len(gpus):
        raise DeviceError(why_not(f"tensorrt:{index}") or f"tensorrt:{index} does not exist")
    gpu = "sm{}{}".format(*gpus[index]["capability"])
    jetpack = tegra_version(driver.jetson_release() or "")
    version = check_version(_version())
    return EnginePlatform("tensorrt", ort.__version__, version, gpu, state.get("version"), jetpack)


def check_version(number: int) -> str:
    """Return TensorRT's version from its number.

    Raises:
        DeviceError: The version is not supported.
    """
    major, rest = divmod(number, 10000)
    minor, patch = divmod(rest, 100)
    if (major, minor) not in VERSIONS:
        supported = " or ".join(f"{a}.{b}" for a, b in VERSIONS)
        raise DeviceError(
            f"tensorrt needs TensorRT {supported}, and {major}.{minor}.{patch} is installed: "
            'pip install "tensorrt-cu13>=10.15,<10.17"'
        )
    return f"{major}.{minor}.{patch}"


def tegra_version(release: str) -> str | None:
    """Return the version of a Jetson's system from the first line of its release file."""
    match = re.search(r"R(\d+) \(release\), REVISION: ([\d.]+)", release)
    return f"R{match[1]}.{match[2]}" if match else None


def build_options(index: int, ops: str, engine: Path) -> dict[str, str]:
    """Return the provider's options to build an engine and write it as an EPContext model."""
    compute_type = compute_dtype(ops)
    return run_options(index) | {
        "trt_fp16_enable": "1" if compute_type == "float16" else "0",
        "trt_bf16_enable": "1" if compute_type == "bfloat16" else "0",
        "trt_int8_enable": "1" if is_qdq(ops) else "0",  # required by DequantizeLinear
        "trt_layer_norm_fp32_fallback": "1",
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": ".",  # relative to the EPContext model
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": os.fspath(cache_folder() / "timing"),
        "trt_dump_ep_context_model": "1",
        "trt_ep_context_file_path": os.fspath(engine),
        "trt_ep_context_embed_mode": "0",  # embedded engines are limited to 2 GB
    }


def run_options(index: int) -> dict[str, str]:
    """Return the provider's options to run an engine."""
    return {"device_id": str(index)}


def compile_graph(ort: Any, graph: Path, target: Path, index: int, ops: str) -> None:
    """Compile a graph into one engine for this machine's GPU.

    Raises:
        DeviceError: The graph does not become a single engine.
    """
    (cache_folder() / "timing").mkdir(parents=True, exist_ok=True)
    try:
        _session(ort, os.fspath(graph), build_options(index, ops, target))
    except Exception as error:
        if not is_onnxruntime_error(error):
            raise
        raise DeviceError(
            f"{graph}: TensorRT cannot compile it ({first_line(error)}); choose another graph "
            "variant with --ops"
        ) from error


def open_session(ort: Any, path: str, index: int) -> Any:
    """Open a session of an engine. Raises ONNX Runtime's errors."""
    return _session(ort, path, run_options(index))


def _session(ort: Any, path: str, provider: Mapping[str, str]) -> Any:
    load_libraries(ort, cudnn=True)  # the provider links cuDNN
    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    return inference_session(path, options, [(PROVIDER, provider)])


def _version() -> int:
    """Return TensorRT's version number, such as 101601.

    Raises:
        DeviceError: TensorRT is not installed.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module("tensorrt_libs")  # NVIDIA's package, which loads its libraries
    try:
        return int(ctypes.CDLL(_LIBRARY).getInferLibVersion())
    except OSError as error:
        raise DeviceError(why_not("tensorrt") or f"tensorrt: {error}") from error
