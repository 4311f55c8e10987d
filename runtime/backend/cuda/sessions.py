"""Sessions of ONNX Runtime's CUDA provider, without fallback to the CPU."""

from __future__ import annotations

import contextlib
import io
import os
from collections import Counter
from typing import Any

from specedge.diagnosis import plug_in
from specedge.diagnosis.doctor import why_not
from specedge.diagnosis.packages import missing_libraries, version_numbers
from specedge.diagnosis.probe import GRAPH
from specedge.errors import DeviceError

from ..memory import is_out_of_memory
from ..ort import first_line, inference_session, is_onnxruntime_error, onnxruntime

_CPU = "CPUExecutionProvider"
_NO_FALLBACK = "session.disable_cpu_ep_fallback"
_PLACEMENT = "session.record_ep_graph_assignment_info"
# Bits of the provider option `sdpa_kernel`, onnxruntime's AttentionBackend.
_OPTIONAL_CUDNN = (1, 28)  # first version with the provider option `enable_cudnn`
_FLOAT32_NORMS = (1, 27)  # first version whose fused norms accumulate in float32 by default
_FLASH_ATTENTION, _EFFICIENT_ATTENTION, _UNFUSED_ATTENTION = 1, 2, 16


def open_session(ort: Any, path: str, name: str, provider: str, index: int, options: Any) -> Any:
    """Open a session that captures passes as CUDA graphs.

    Raises:
        DeviceError: The device does not work, or has no kernels for some nodes.
    """
    if plug_in.CUDA.is_installed:
        _check_plug_in(ort, name, index)
    else:
        load_libraries(ort)
        # Without its libraries, ONNX Runtime prints messages before it fails.
        is_incomplete = provider not in ort.get_available_providers() or missing_libraries("cuda")
        if is_incomplete and (reason := why_not(name)):
            raise DeviceError(reason)
    options.add_session_config_entry(_NO_FALLBACK, "1")
    options.intra_op_num_threads = 1  # no node runs on the CPU
    graphs = {"enable_cuda_graph": "1"}
    try:
        return inference_session(path, options, _providers(ort, options, provider, index, graphs))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if nodes := _nodes_on_cpu(ort, path, provider, index):
            raise DeviceError(
                f"{name}: ONNX Runtime has no CUDA kernels for these nodes of {path}: {nodes}; "
                "choose another graph variant with --ops"
            ) from error
        if reason := why_not(name):
            raise DeviceError(reason) from error
        raise


def open_memory(provider: str, index: int) -> Any:
    """Open a session that runs no pass, so that no replayed pass writes to its arrays."""
    ort = onnxruntime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return inference_session(os.fspath(GRAPH), options, _providers(ort, options, provider, index))


def load_libraries(ort: Any, cudnn: bool = False) -> None:
    """Load CUDA from NVIDIA's Python packages, which are not on the library search path.

    Output is suppressed: ONNX Runtime prints libraries without a package, which may be installed
    elsewhere.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        ort.preload_dlls(cudnn=cudnn)


def _check_plug_in(ort: Any, name: str, index: int) -> None:
    """Raise DeviceError if the plug-in does not match ONNX Runtime, or does not support the GPU."""
    if mismatch := plug_in.CUDA.mismatch(ort):
        raise DeviceError(f"{name}: {'; '.join(mismatch)}")
    try:
        num_devices = len(plug_in.CUDA.devices(ort))
    except Exception as error:
        if not is_onnxruntime_error(error):
            raise
        raise DeviceError(why_not(name) or f"{name}: {first_line(error)}") from error
    if index >= num_devices:
        reason = why_not(name)
        raise DeviceError(reason or f"{name}: the plug-in supports {num_devices} GPUs here")


def _providers(
    ort: Any, options: Any, provider: str, index: int, extra: dict[str, str] | None = None
) -> list[Any] | None:
    """Return the providers of a session, or add the plug-in's device to its options."""
    settings = _provider_options() | (extra or {})
    if plug_in.CUDA.is_installed:
        options.add_provider_for_devices([plug_in.CUDA.devices(ort)[index]], settings)
        return None
    number = {"device_id": str(index)} if index else {}  # ONNX Runtime warns about an explicit 0
    return [(provider, number | settings)]


def _provider_options() -> dict[str, str]:
    """Return provider options without TF32, cuDNN and excess memory.

    From compute capability 9.0 on, attention selects cuDNN if it is installed, even if disabled,
    and fails; `sdpa_kernel` excludes it. In float16, norms of old versions return zeros for large
    sums unless the mode is strict (onnxruntime issue 29034).
    """
    version = version_numbers(onnxruntime().__version__)
    options = {"enable_cudnn": "0"} if version >= _OPTIONAL_CUDNN else {}
    if version < _FLOAT32_NORMS:
        options["enable_skip_layer_norm_strict_mode"] = "1"
    return options | {
        "use_tf32": "0",
        "sdpa_kernel": str(_FLASH_ATTENTION | _EFFICIENT_ATTENTION | _UNFUSED_ATTENTION),
        "arena_extend_strategy": "kSameAsRequested",
    }


def _nodes_on_cpu(ort: Any, path: str, provider: str, index: int) -> str | None:
    """Return the nodes that a session with fallback runs on the CPU; None if it does not open."""
    options = ort.SessionOptions()
    options.add_session_config_entry(_PLACEMENT, "1")
    providers = _providers(ort, options, provider, index)
    try:
        session = inference_session(path, options, providers and [*providers, _CPU])
    except Exception:
        return None
    if provider not in session.get_providers():
        return None
    placements = node_placements(session)
    elsewhere = {op: count for (name, op), count in placements.items() if name != provider}
    return ", ".join(f"{count} {op}" for op, count in sorted(elsewhere.items()))


def node_placements(session: Any) -> Counter[tuple[str, str]]:
    """Count a session's nodes by provider and operator, if the session records placements.

    ONNX Runtime 1.23 cannot.
    """
    counts: Counter[tuple[str, str]] = Counter()
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return counts
    for part in session.get_provider_graph_assignment_info():
        counts.update((part.ep_name, node.op_type) for node in part.get_nodes())
    return counts
