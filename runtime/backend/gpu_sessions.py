"""Sessions of ONNX Runtime's CUDA provider: no node falls back to the CPU, and errors name it."""

from __future__ import annotations

import contextlib
import io
import os
from collections import Counter
from pathlib import Path
from typing import Any

from specedge.diagnosis.probe import GRAPH, missing_of
from specedge.diagnosis.providers import why_not
from specedge.diagnosis.shared_library import needed
from specedge.errors import DeviceError

from .memory import is_out_of_memory
from .ort import inference_session, onnxruntime

_NO_FALLBACK = "session.disable_cpu_ep_fallback"
_PLACEMENT = "session.record_ep_graph_assignment_info"


def opened(ort: Any, path: str, name: str, provider: str, index: int, options: Any) -> Any:
    """A session that captures passes as graphs of CUDA. DeviceError where it cannot be one."""
    load_libraries(ort)
    if _is_lacking(ort, provider) and (reason := why_not(name)):
        raise DeviceError(reason)
    options.add_session_config_entry(_NO_FALLBACK, "1")
    options.intra_op_num_threads = 1  # for nodes on the CPU, of which there are none
    providers = [(provider, _provider_options(index) | {"enable_cuda_graph": "1"})]
    try:
        return inference_session(path, options, providers)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if nodes := _elsewhere(ort, path, provider, index):
            raise DeviceError(
                f"{name}: {path} has nodes that it has no kernels for: {nodes}; take another op set"
            ) from error
        if reason := why_not(name):
            raise DeviceError(reason) from error
        raise


def _is_lacking(ort: Any, provider: str) -> bool:
    """Whether there is no such provider or it cannot load, of which ONNX Runtime prints lines."""
    if provider not in ort.get_available_providers():
        return True
    library = Path(ort.__file__).with_name("capi") / "libonnxruntime_providers_cuda.so"
    return library.exists() and bool(missing_of(needed(library)))


def memory(provider: str, index: int) -> Any:
    """A session that runs nothing: arrays of it share no memory with passes of others."""
    options = onnxruntime().SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return inference_session(os.fspath(GRAPH), options, [(provider, _provider_options(index))])


def load_libraries(ort: Any, cudnn: bool = False) -> None:
    """Load CUDA from NVIDIA's Python packages, where no search path leads; it prints what is not
    there, which may be elsewhere.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        ort.preload_dlls(cudnn=cudnn)


def _provider_options(index: int) -> dict[str, str]:
    """Sums in float32 are float32's, kernels do not depend on whether cuDNN is installed, and no
    more memory is taken than is asked for.
    """
    number = {"device_id": str(index)} if index else {}  # 0, said, has a warning
    return number | {
        "use_tf32": "0",
        "enable_cudnn": "0",
        "arena_extend_strategy": "kSameAsRequested",
    }


def _elsewhere(ort: Any, path: str, provider: str, index: int) -> str | None:
    """The nodes that a session which may use the CPU leaves to it; None if there is no session."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry(_PLACEMENT, "1")
    providers = [(provider, _provider_options(index)), "CPUExecutionProvider"]
    try:
        session = inference_session(path, options, providers)
    except Exception:
        return None
    if provider not in session.get_providers():
        return None
    found = {name: count for name, count in placed(session).items() if name[0] != provider}
    return ", ".join(f"{count} {op}" for (_, op), count in sorted(found.items()))


def placed(session: Any) -> Counter[tuple[str, str]]:
    """How many nodes of each operator each provider has, by a session that records it."""
    found: Counter[tuple[str, str]] = Counter()
    for part in session.get_provider_graph_assignment_info():
        found.update((part.ep_name, node.op_type) for node in part.get_nodes())
    return found
