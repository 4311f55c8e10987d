"""Child process of the diagnosis, for probes that may crash or hang.

It prints each result immediately as a line of JSON, so that a crash does not lose earlier results.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from specedge import int8_products

from . import driver, plug_in
from .packages import missing_libraries

GRAPH = Path(__file__).with_name("probe.onnx")  # y = Relu(x w + b), in float32
PROVIDERS = {  # execution providers by device
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "rtx": plug_in.RTX.provider,
}
PLUG_INS = {"rtx": plug_in.RTX, "cuda": plug_in.CUDA}
OPTIONS = {"tensorrt": {"trt_builder_optimization_level": "0"}}  # the fastest engine build

Tell = Callable[..., None]


def main() -> None:
    """Run the probe named on the command line; stdout has its results only."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        _answer(channel, *sys.argv[1:])
    finally:
        channel.close()


def _answer(channel: IO[str], question: str, *arguments: str) -> None:
    def tell(**answers: Any) -> None:
        channel.write(json.dumps(answers) + "\n")
        channel.flush()

    questions: dict[str, Callable[..., None]] = {
        "runtime": _probe_runtime,
        "driver": lambda tell: tell(**driver.query()),
        "device": _probe_device,
    }
    try:
        questions[question](tell, *arguments)
    except Exception as error:
        tell(error=_shorten(str(error)) or type(error).__name__)
    tell(stage="closing")


def _shorten(message: str) -> str:
    """Return an error message of ONNX Runtime without its source locations."""
    if cuda_error := re.search(r"CUDA (failure|error) \d+: [^;\n]*", message):
        return cuda_error.group().strip()
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    text = re.sub(r"/onnxruntime_src/\S+:\d+ .*?\) (?=[A-Z])", "", lines[0]) if lines else ""
    return re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)[:500]


def _probe_runtime(tell: Tell) -> None:
    tell(stage="importing onnxruntime")
    try:
        ort = importlib.import_module("onnxruntime")
    except ModuleNotFoundError as error:
        if error.name != "onnxruntime":
            raise
        tell(absent=True)
        return
    if not hasattr(ort, "InferenceSession"):
        tell(hollow=[str(folder) for folder in getattr(ort, "__path__", [])])
        return
    tell(
        version=ort.__version__,
        cuda=getattr(ort, "cuda_version", None) or None,
        providers=ort.get_available_providers(),
        folder=ort.__path__[0],
    )


def _probe_device(tell: Tell, name: str, index: str) -> None:
    """Run a graph on a device and compare its output with NumPy's."""
    tell(stage="importing onnxruntime")
    ort = importlib.import_module("onnxruntime")
    options = ort.SessionOptions()
    options.log_severity_level = 2
    providers: list[Any] | None = None
    plugged = PLUG_INS.get(name)
    if plugged and (name == "rtx" or plugged.is_installed):
        tell(stage="loading the plug-in", plug_in=" ".join(plugged.version))
        if mismatch := plugged.mismatch(ort):
            tell(mismatch=mismatch)
            return
        options.add_provider_for_devices([plugged.devices(ort)[int(index)]], {})
    else:
        number = {"device_id": index} if int(index) else {}
        providers = [(PROVIDERS[name], OPTIONS.get(name, {}) | number)]
    if providers and name in ("cuda", "tensorrt"):
        tell(stage="loading libraries")
        ort.preload_dlls()
        with contextlib.suppress(Exception):  # a package that loads its libraries, if installed
            importlib.import_module("tensorrt_libs")
        tell(missing=missing_libraries(name))
    if name != "cpu":
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    tell(stage="opening a session")
    start = time.perf_counter()
    session = ort.InferenceSession(os.fspath(GRAPH), options, providers, enable_fallback=False)
    opened = time.perf_counter()
    if (first := session.get_providers()[0]) != PROVIDERS[name]:
        raise RuntimeError(f"ONNX Runtime ran it on {first} instead")
    tell(stage="running a graph")
    output = _run(session, _inputs())
    tell(milliseconds=[1e3 * (opened - start), 1e3 * (time.perf_counter() - opened)])
    tell(wrong=_difference(output))
    if name == "cpu":
        tell(products=_check_products(ort))


def _inputs() -> np.ndarray:
    """Return x of the graph: small integers, which are exact also in TF32. -> [4, 32]"""
    rows, columns = np.indices((4, 32))
    return ((3 * rows + 2 * columns) % 5 - 2).astype(np.float32)


def constants() -> tuple[np.ndarray, np.ndarray]:
    """Return w [32, 32] and b [32] of the graph."""
    rows, columns = np.indices((32, 32))
    weights = (7 * rows + 5 * columns) % 17 - 8
    return weights.astype(np.float32), (11 * np.arange(32) % 13 - 6).astype(np.float32)


def _difference(output: np.ndarray) -> str | None:
    """Describe the first difference between the graph's output and NumPy's, if any."""
    weights, bias = constants()
    expected = np.maximum(_inputs() @ weights + bias, 0)
    if output.shape != expected.shape:
        return f"shape {list(output.shape)}, expected {list(expected.shape)}"
    places = np.argwhere(output != expected)
    if not len(places):
        return None
    row, column = map(int, places[0])
    return (
        f"{len(places)} of {expected.size} numbers: y[{row}, {column}] is "
        f"{output[row, column]:g}, expected {expected[row, column]:g}"
    )


def _check_products(ort: Any) -> str:
    """Return the mode with exact int8 products: "as they are", "unsigned" or "never"."""
    for name, value in (("as they are", "0"), ("unsigned", "1")):
        options = ort.SessionOptions()
        options.add_session_config_entry(int8_products.UNSIGNED_OPTION, value)
        session = ort.InferenceSession(
            os.fspath(int8_products.PRODUCT_GRAPH), options, [PROVIDERS["cpu"]]
        )
        if int8_products.are_exact(partial(_run, session)):
            return name
    return "never"


def _run(session: Any, x: np.ndarray) -> Any:
    return session.run(None, {"x": x})[0]


if __name__ == "__main__":
    main()
