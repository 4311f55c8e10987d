"""Questions about this machine that could end the process that asks them: see `child.ask`.

Each is answered in lines of JSON, as far as it gets, so that a crash loses only what it prevented.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import importlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from specedge import int8_products
from specedge.runtime.backend.cuda import driver, tensorrt_rtx

from . import shared_library

GRAPH = Path(__file__).with_name("probe.onnx")  # y = Relu(x w + b), in float32
PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "rtx": tensorrt_rtx.PROVIDER,
}
OPTIONS = {"tensorrt": {"trt_builder_optimization_level": "0"}}  # the quickest build of an engine

Tell = Callable[..., None]


def main() -> None:
    """Answer the question on the command line; stdout is for the answer alone."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        _answer(channel, *sys.argv[1:])
    finally:
        channel.close()


def _answer(channel: IO[str], question: str, *arguments: str) -> None:
    def tell(**facts: Any) -> None:
        channel.write(json.dumps(facts) + "\n")
        channel.flush()

    questions: dict[str, Callable[..., None]] = {
        "runtime": runtime,
        "driver": lambda tell: tell(**driver.query()),
        "device": device,
    }
    try:
        questions[question](tell, *arguments)
    except Exception as error:
        tell(error=short(str(error)) or type(error).__name__)
    tell(stage="closing")


def short(message: str) -> str:
    """What a message of ONNX Runtime's says, without the places in its source."""
    if found := re.search(r"CUDA (failure|error) \d+: [^;\n]*", message):
        return found.group().strip()
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    text = re.sub(r"/onnxruntime_src/\S+:\d+ .*?\) (?=[A-Z])", "", lines[0]) if lines else ""
    return re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)[:500]


def runtime(tell: Tell) -> None:
    """What the module `onnxruntime` is."""
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


def device(tell: Tell, name: str, index: str = "0") -> None:
    """Whether a device, of several GPUs one by its number, runs a graph, and what it is made of."""
    tell(stage="importing onnxruntime")
    ort = importlib.import_module("onnxruntime")
    options = ort.SessionOptions()
    options.log_severity_level = 2
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    number = {"device_id": index} if int(index) else {}
    providers: list[Any] = [(PROVIDERS[name], OPTIONS.get(name, {}) | number)]
    if name == "rtx":
        if not _plug_in(tell, ort, options, int(index)):
            return
        providers = []
    elif PROVIDERS[name] not in ort.get_available_providers():
        tell(lacking=True)
        return
    elif name != "cpu":
        _libraries(tell, ort, name)
    if name == "cpu":
        options = ort.SessionOptions()
    tell(stage="opening a session")
    start = time.perf_counter()
    session = ort.InferenceSession(
        os.fspath(GRAPH), options, providers or None, enable_fallback=False
    )
    opened = time.perf_counter()
    if (first := session.get_providers()[0]) != PROVIDERS[name]:
        raise RuntimeError(f"ONNX Runtime ran it on {first} instead")
    tell(stage="running a graph")
    found = _run(session, inputs())
    tell(milliseconds=[1e3 * (opened - start), 1e3 * (time.perf_counter() - opened)])
    tell(wrong=difference(found))
    if name == "cpu":
        tell(products=_products(ort))


def inputs() -> np.ndarray:
    """x, of small whole numbers, so that TF32 is exact, too. [4, 32]"""
    rows, columns = np.indices((4, 32))
    return ((3 * rows + 2 * columns) % 5 - 2).astype(np.float32)


def constants() -> tuple[np.ndarray, np.ndarray]:
    """w [32, 32] and b [32] of the graph."""
    rows, columns = np.indices((32, 32))
    weights = (7 * rows + 5 * columns) % 17 - 8
    return weights.astype(np.float32), (11 * np.arange(32) % 13 - 6).astype(np.float32)


def difference(found: np.ndarray) -> str | None:
    """Where the graph's output is not NumPy's."""
    weights, bias = constants()
    wanted = np.maximum(inputs() @ weights + bias, 0)
    places = np.argwhere(found != wanted) if found.shape == wanted.shape else None
    if places is None:
        return f"shape {list(found.shape)}, wanted {list(wanted.shape)}"
    if not len(places):
        return None
    row, column = map(int, places[0])
    return (
        f"{len(places)} of {wanted.size} numbers: y[{row}, {column}] is "
        f"{found[row, column]:g}, wanted {wanted[row, column]:g}"
    )


def _products(ort: Any) -> str:
    """How products of bytes are right here: "as they are", "unsigned" or "never"."""
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


def _plug_in(tell: Tell, ort: Any, options: Any, index: int) -> bool:
    """Take up NVIDIA's plug-in, with one of its GPUs; False where it is not installed."""
    tell(stage="loading the plug-in")
    try:
        found = tensorrt_rtx.devices(ort)
    except ModuleNotFoundError as error:
        if error.name != tensorrt_rtx.MODULE:
            raise
        tell(lacking=True)
        return False
    if index >= len(found):
        shown = f"{len(found)} GPUs" if found else "no GPU"
        raise RuntimeError(f"{tensorrt_rtx.MODULE} shows {shown} that it would run on")
    options.add_provider_for_devices(found[index : index + 1], {})
    return True


def _libraries(tell: Tell, ort: Any, name: str) -> None:
    """Load what a provider needs, and say what cannot be."""
    tell(stage="loading libraries")
    ort.preload_dlls()
    if name == "tensorrt":
        with contextlib.suppress(Exception):  # its package loads its libraries; there may be none
            importlib.import_module("tensorrt_libs")
    folder = Path(ort.__file__).parent / "capi"
    library = folder / f"libonnxruntime_providers_{name}.so"
    if sys.platform != "linux" or not library.exists():
        return
    wanted = shared_library.needed(library)
    missing = missing_of(wanted)
    tell(missing=missing, found={m: place for m in missing if (place := _place(m))})
    if name == "tensorrt":
        tell(tensorrt=_other_versions("libnvinfer.so", wanted))
    else:
        tell(codes=shared_library.gpu_codes(library))


def missing_of(wanted: Iterable[str]) -> dict[str, str]:
    """The libraries that do not load, with the loader's reason; those alone that it names."""
    found: dict[str, str] = {}
    for name in wanted:
        try:
            ctypes.CDLL(name)
        except OSError as error:
            culprit, _, reason = str(error).partition(": ")
            found.setdefault(os.path.basename(culprit), reason or str(error))
    return found


def _place(library: str) -> str | None:
    """The folder of a package that has a library where nothing looks for it."""
    for folder in filter(None, sys.path):
        for pattern in ("nvidia/*/lib", "tensorrt_libs"):
            for path in glob.iglob(os.path.join(glob.escape(folder), pattern, library)):
                return os.path.dirname(path)
    return None


def _other_versions(start: str, wanted: Iterable[str]) -> list[str]:
    """The versions of a library that are here and not the wanted one."""
    names = [f"{start}.{number}" for number in range(8, 14)]
    others = [name for name in names if name not in wanted]
    return [name for name in others if _place(name) or not missing_of([name])]


if __name__ == "__main__":
    main()
