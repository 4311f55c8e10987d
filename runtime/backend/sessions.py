"""ONNX Runtime sessions on a device, and the thread pool that they share."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specedge.declared import whole
from specedge.errors import BundleError, DeviceError, MissingExtraError, SpecEdgeError

from .memory import is_out_of_memory

DEVICES = ("cpu",)


def onnxruntime() -> Any:
    """The onnxruntime module, or an error that says how to install it."""
    try:
        return importlib.import_module("onnxruntime")
    except ImportError as error:
        if _was_interrupted(error):
            raise KeyboardInterrupt from error
        how = "pip install 'specedge[cpu]', or 'specedge[gpu]' for NVIDIA GPUs"
        if isinstance(error, ModuleNotFoundError) and error.name == "onnxruntime":
            raise MissingExtraError(f"ONNX Runtime is not installed: {how}") from error
        raise MissingExtraError(
            f"ONNX Runtime is installed but cannot be loaded ({_first_line(error)}); install what "
            f"is missing, or again: {how}"
        ) from error


def _was_interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind it: C++ that is interrupted while it loads says ImportError."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def open_session(path: Path, device: str, threads: int | None, share_threads: bool) -> Any:
    """A session for one graph.

    Each ONNX Runtime session has its own pool, whose workers spin after a run, so draft and target
    would steal each other's cores; one pool for the process serves both. It lives as long as its
    process, and sessions with pools of their own cannot be made beside it; `share_threads` False is
    for hosts that need them.

    Raises MemoryError where ONNX Runtime has not enough of it.
    """
    check_device(device)
    if threads is not None:
        try:
            threads = whole("threads", threads, 1, max(os.cpu_count() or 1, 1))
        except ValueError as error:
            raise DeviceError(f"{error}; there is no use in more threads than cores") from error
    ort = onnxruntime()
    options = ort.SessionOptions()
    options.log_severity_level = 4  # failures arrive as exceptions
    if share_threads:
        _make_pool(ort, threads)
        options.use_per_session_threads = False
    else:
        options.intra_op_num_threads = threads or 0
        options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        return ort.InferenceSession(
            os.fspath(path), options, providers=["CPUExecutionProvider"], enable_fallback=False
        )
    except Exception as error:
        if not _is_of_onnxruntime(error):
            raise
        if is_out_of_memory(error):
            raise MemoryError from error
        if "per_session_threads" in str(error):
            raise DeviceError(
                "this process already has ONNX Runtime's shared thread pool; "
                "load with share_threads=True"
            ) from error
        raise BundleError(
            f"{path}: ONNX Runtime {ort.__version__} cannot load it ({_first_line(error)}); "
            "export the pair again, or upgrade ONNX Runtime"
        ) from error


def check_device(device: str) -> None:
    """Raise DeviceError for a device that there is none of."""
    if device not in DEVICES:
        raise DeviceError(f"device must be one of {', '.join(DEVICES)}, got '{device}'")


@contextmanager
def translated_errors(what: str) -> Iterator[None]:
    """Turn an exception of ONNX Runtime, and no other, into ours, or into a MemoryError."""
    try:
        yield
    except Exception as error:
        if not _is_of_onnxruntime(error):
            raise
        if is_out_of_memory(error):
            raise MemoryError from error
        raise SpecEdgeError(f"{what} failed in ONNX Runtime: {_first_line(error)}") from error


def _is_of_onnxruntime(error: Exception) -> bool:
    """Whether ONNX Runtime raised it: by its type, or, as some have built-in types, by its place.

    An app's signal handler runs inside a call, too, but in a frame of its own.
    """
    if _is_named_so(type(error).__module__):
        return True
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    return trace is not None and _is_named_so(trace.tb_frame.f_globals.get("__name__", ""))


def _is_named_so(module: str) -> bool:
    return module.partition(".")[0] == "onnxruntime"


_pool_threads: list[int | None] = []  # what the process's pool was made with, once it is made
_pool_lock = threading.Lock()


def _make_pool(ort: Any, threads: int | None) -> None:
    with _pool_lock:
        _make_pool_once(ort, threads)


def _make_pool_once(ort: Any, threads: int | None) -> None:
    if not _pool_threads:
        try:
            ort.set_global_thread_pool_sizes(threads or 0, 1)
        except Exception as error:
            if threads is not None:
                raise DeviceError(
                    f"cannot use {threads} threads: this process already made ONNX Runtime's "
                    "shared thread pool; leave threads out"
                ) from error
        _pool_threads.append(threads)
    if threads is not None and threads != _pool_threads[0]:
        raise DeviceError(
            f"cannot use {threads} threads: this process's shared pool was made with "
            f"{_pool_threads[0] or 'the default number'}; leave threads out, or use a new process"
        )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
