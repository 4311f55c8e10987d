"""ONNX Runtime itself: the module, and its exceptions as ours."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from specedge.errors import MissingExtraError, SpecEdgeError
from specedge.telemetry import disabled_telemetry

from .memory import is_out_of_memory


def onnxruntime() -> Any:
    """The onnxruntime module, or an error that says how to install it."""
    how = "pip install 'specedge[cpu]', or 'specedge[gpu]' for NVIDIA GPUs"
    try:
        with disabled_telemetry():
            module = importlib.import_module("onnxruntime")
    except ImportError as error:
        if _was_interrupted(error):
            raise KeyboardInterrupt from error
        if isinstance(error, ModuleNotFoundError) and error.name == "onnxruntime":
            raise MissingExtraError(f"ONNX Runtime is not installed: {how}") from error
        raise MissingExtraError(
            f"ONNX Runtime is installed but cannot be loaded ({first_line(error)}); install what "
            f"is missing, or again: {how}"
        ) from error
    if not hasattr(module, "InferenceSession"):  # its folder is there, and its files are gone
        raise MissingExtraError(
            "ONNX Runtime's files are gone, as they are when one of two of its packages is "
            f"uninstalled; uninstall the others, too, and install one: {how}"
        )
    return module


def inference_session(source: Any, options: Any, providers: list[Any] | None = None) -> Any:
    """A session, which has no threads of its own where the process's sessions share theirs.

    Raises what ONNX Runtime raises.
    """
    make = onnxruntime().InferenceSession
    try:
        return make(source, options, providers, enable_fallback=False)
    except Exception as error:
        if not is_for_want_of_own_threads(error):
            raise
    options.use_per_session_threads = False
    return make(source, options, providers, enable_fallback=False)


def is_for_want_of_own_threads(error: Exception) -> bool:
    """Whether a session failed since, beside a shared pool, none has threads of its own."""
    return "per_session_threads" in str(error)


def _was_interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind it: C++ that is interrupted while it loads says ImportError."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


@contextmanager
def translated_errors(what: str) -> Iterator[None]:
    """Turn an exception of ONNX Runtime, and no other, into ours, or into a MemoryError."""
    try:
        yield
    except Exception as error:
        if not is_of_onnxruntime(error):
            raise
        if is_out_of_memory(error):
            raise MemoryError from error
        raise SpecEdgeError(f"{what} failed in ONNX Runtime: {first_line(error)}") from error


def is_of_onnxruntime(error: Exception) -> bool:
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


def first_line(error: Exception) -> str:
    """The beginning of what an exception says."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
