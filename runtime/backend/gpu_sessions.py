"""Sessions of ONNX Runtime's CUDA provider: no node falls back to the CPU, and errors name it."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from specedge.errors import DeviceError

from .memory import is_out_of_memory

_NO_FALLBACK = "session.disable_cpu_ep_fallback"
_PLACEMENT = "session.record_ep_graph_assignment_info"


def opened(ort: Any, path: str, name: str, provider: str, index: int, options: Any) -> Any:
    """A session that captures passes as graphs of CUDA. DeviceError where it cannot be one."""
    if provider not in ort.get_available_providers():
        raise DeviceError(
            f"{name}: the ONNX Runtime that is installed has no {provider}; "
            "pip uninstall onnxruntime, then pip install 'specedge[gpu]'"
        )
    options.add_session_config_entry(_NO_FALLBACK, "1")
    try:
        providers = [(provider, _provider_options(index) | {"enable_cuda_graph": "1"})]
        return ort.InferenceSession(path, options, providers, enable_fallback=False)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if (reason := _reason(ort, path, provider, index)) is None:
            raise
        raise DeviceError(f"{name}: {reason}") from error


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


def _reason(ort: Any, path: str, provider: str, index: int) -> str | None:
    """Why a session that forbids the CPU cannot be, by one that allows it."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry(_PLACEMENT, "1")
    providers = [(provider, _provider_options(index)), "CPUExecutionProvider"]
    try:
        session = ort.InferenceSession(path, options, providers, enable_fallback=False)
    except Exception as error:
        found = re.search(r"CUDA failure \d+: [^;]+|Invalid [^;:]*device[^;]*", str(error))
        return None if found is None else f"{found[0].strip()}; run 'specedge doctor' for the cure"
    if provider not in session.get_providers():
        return "its libraries cannot be loaded; run 'specedge doctor', which names them"
    elsewhere = {name: count for name, count in placed(session).items() if name[0] != provider}
    if not elsewhere:
        return None
    listed = ", ".join(f"{count} {op}" for (_, op), count in sorted(elsewhere.items()))
    return f"{path} has nodes that the device has no kernels for: {listed}; take another op set"


def placed(session: Any) -> Counter[tuple[str, str]]:
    """How many nodes of each operator each provider has, by a session that records it."""
    found: Counter[tuple[str, str]] = Counter()
    for part in session.get_provider_graph_assignment_info():
        found.update((part.ep_name, node.op_type) for node in part.get_nodes())
    return found
