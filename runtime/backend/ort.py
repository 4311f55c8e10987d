"""ONNX Runtime: its module, sessions, and translation of its errors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from specedge.errors import MissingExtraError, SpecEdgeError
from specedge.telemetry import disabled_telemetry

from .memory import is_out_of_memory


def onnxruntime() -> Any:
    """Import the onnxruntime module.

    Raises:
        MissingExtraError: It is not installed or broken; the message has the command to install it.
    """
    command = "pip install 'specedge[cpu]', or 'specedge[gpu]' for NVIDIA GPUs"
    try:
        with disabled_telemetry():
            module = importlib.import_module("onnxruntime")
    except ImportError as error:
        if _was_interrupted(error):
            raise KeyboardInterrupt from error
        if isinstance(error, ModuleNotFoundError) and error.name == "onnxruntime":
            raise MissingExtraError(f"ONNX Runtime is not installed: {command}") from error
        raise MissingExtraError(
            f"ONNX Runtime is installed but cannot be loaded ({first_line(error)}); install the "
            f"missing library, or reinstall: {command}"
        ) from error
    if not hasattr(module, "InferenceSession"):  # an empty folder
        raise MissingExtraError(
            "ONNX Runtime's files are missing, as happens when one of several packages that "
            f"share them is uninstalled; uninstall the others, too, and install one: {command}"
        )
    return module


def inference_session(
    source: Any,
    options: Any,
    providers: list[Any] | None = None,
    prepare_pool: Callable[[], None] = lambda: None,
) -> Any:
    """Open a session, in the shared thread pool if the process has one, after `prepare_pool`.

    Raises:
        Exception: ONNX Runtime's error.
    """
    open_session = onnxruntime().InferenceSession
    options.log_severity_level = 4  # errors arrive as exceptions
    try:
        return open_session(source, options, providers, enable_fallback=False)
    except Exception as error:
        if "per_session_threads" not in str(error):
            raise
    prepare_pool()
    options.use_per_session_threads = False
    return open_session(source, options, providers, enable_fallback=False)


def _was_interrupted(error: BaseException | None) -> bool:
    """Return True if Ctrl-C caused an ImportError, as C++ modules report it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


@contextmanager
def translated_errors(action: str) -> Iterator[None]:
    """Convert exceptions of ONNX Runtime, and no others, to SpecEdgeError or MemoryError."""
    try:
        yield
    except Exception as error:
        if not is_onnxruntime_error(error):
            raise
        if is_out_of_memory(error):
            raise MemoryError from error
        raise SpecEdgeError(f"{action} failed in ONNX Runtime: {first_line(error)}") from error


def is_onnxruntime_error(error: Exception) -> bool:
    """Return True if ONNX Runtime raised an error, by its type or by the frame that raised it.

    A signal handler of the application that runs during a call has a frame of its own.
    """
    if _is_onnxruntime_module(type(error).__module__):
        return True
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    return trace is not None and _is_onnxruntime_module(
        trace.tb_frame.f_globals.get("__name__", "")
    )


def _is_onnxruntime_module(module: str) -> bool:
    return module.partition(".")[0] == "onnxruntime"


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
