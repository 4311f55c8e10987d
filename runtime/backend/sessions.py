"""ONNX Runtime sessions on a device, and the thread pools that they use."""

from __future__ import annotations

import os
import re
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from specedge.bundle.op_sets import QDQ
from specedge.bundle.precision import HALF_DTYPES, OLDEST_ONNXRUNTIME
from specedge.cpu_count import cpu_count, default_threads
from specedge.errors import BundleError, DeviceError
from specedge.int8_products import UNSIGNED_OPTION
from specedge.option_specs import check_integer

from .buffers import Buffers, HostBuffers
from .cuda import engines, sessions, tensorrt, tensorrt_rtx
from .cuda.buffers import CudaBuffers
from .cuda.execution import capture_lock
from .memory import is_out_of_memory, return_freed_memory
from .ort import first_line, is_for_want_of_own_threads, is_of_onnxruntime, onnxruntime

CUDA = "CUDAExecutionProvider"
DEVICES = {  # and what ONNX Runtime calls them
    "cpu": "CPUExecutionProvider",
    "cuda": CUDA,
    "tensorrt": tensorrt.PROVIDER,
    "rtx": tensorrt_rtx.PROVIDER,
}


@dataclass(frozen=True)
class Device:
    """What sessions run on, "cpu", "cuda", "tensorrt" or "rtx", of several GPUs with a number, such
    as "cuda:1"; with so many CPU threads, by default one a core that this process may use.

    The workers of a session's own pool spin after a pass, and would take the cores of the other
    model's, so they are told to stop when a pass ends. `share_threads` makes one pool that serves
    every session instead: faster where passes take a few milliseconds. It lives as long as its
    process, in which no session can have a pool of its own from then on. `usual` is the number
    where `threads` is None and no pool has another one yet; None: the default.

    With `unsigned` products of bytes are of unsigned ones alone: right
    on AVX2 without VNNI, which saturates else, and twice as slow where there is VNNI.

    Raises DeviceError for a device that there is none of, or a number of threads.
    """

    name: str = "cpu"
    threads: int | None = None
    share_threads: bool = False
    usual: int | None = None
    unsigned: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"cpu|(cuda|tensorrt|rtx)(:\d{1,2})?", self.name):
            raise DeviceError(
                f"device must be one of {', '.join(DEVICES)}, a GPU's perhaps with its number as "
                f"in 'cuda:1', got '{self.name}'"
            )
        if self.threads is not None:
            try:
                threads = check_integer("threads", self.threads, 1, cpu_count())
            except ValueError as error:
                raise DeviceError(f"{error}; this process may use no more CPUs") from error
            object.__setattr__(self, "threads", threads)

    @property
    def kind(self) -> str:
        """Its name without a number."""
        return self.name.partition(":")[0]

    @property
    def index(self) -> int:
        """Which of several GPUs it is."""
        return int(self.name.partition(":")[2] or 0)

    @property
    def is_cpu(self) -> bool:
        """Whether sessions share the host's memory."""
        return self.kind == "cpu"

    @property
    def supports_engines(self) -> bool:
        """Whether sessions are of engines, built ahead of time of graphs of fixed lengths."""
        return self.kind in ("tensorrt", "rtx")

    def platform(self, gpu: str | None = None) -> engines.EnginePlatform:
        """What its engines hang on, for the GPU that is here or one that is named."""
        if self.kind == "rtx":
            return tensorrt_rtx.platform(onnxruntime(), self.index, gpu)
        if gpu is not None:
            raise DeviceError(f"TensorRT builds for the GPU that is here alone, not for '{gpu}'")
        return tensorrt.platform(onnxruntime(), self.index)

    @property
    def provider(self) -> str:
        """What ONNX Runtime calls it."""
        return DEVICES[self.kind]

    @property
    def preferred_ops(self) -> tuple[str, ...]:
        """The op sets that it has kernels for, the fastest first; none of the CPU's own order."""
        attentions = ("onnx",) if self.supports_engines else ("gqa", "onnx")
        halves = tuple(f"{ops}-{kind}" for kind in HALF_DTYPES for ops in attentions)
        if self.supports_engines:
            halves = (f"onnx-{QDQ}", *halves)
        if self.kind == "rtx":  # which has no attention in float32
            return halves
        return (*halves, "onnx-fp32", "onnx")

    def buffers(self, session: Any) -> Buffers:
        """What a session's passes are bound to."""
        if self.is_cpu:
            return HostBuffers()
        open_memory = partial(sessions.open_memory, self.provider, self.index)
        return CudaBuffers(session, self.index, None if self.supports_engines else open_memory)

    def open(self, path: Path) -> Any:
        """A session for a graph, or an engine. MemoryError where ONNX Runtime has too little."""
        ort = onnxruntime()
        try:
            with self._no_capture():
                session = self._open(ort, os.fspath(path))
            return_freed_memory()
            return session
        except Exception as error:
            if not is_of_onnxruntime(error):
                raise
            if is_out_of_memory(error):
                raise MemoryError from error
            if self.supports_engines:
                raise DeviceError(
                    f"{path}: {self.name} cannot load this engine ({first_line(error)}); delete "
                    f"its folder and build it again: specedge build --device {self.name}"
                ) from error
            if "accuracy_level for operator QMoE" in str(error):
                raise BundleError(
                    f"{path}: its experts of 4 bits need ONNX Runtime "
                    f"{OLDEST_ONNXRUNTIME['experts']} or later, and {ort.__version__} is "
                    "installed; upgrade it, or take --ops onnx where the bundle has that"
                ) from error
            raise BundleError(
                f"{path}: ONNX Runtime {ort.__version__} cannot load it ({first_line(error)}); "
                "export the pair again, or upgrade ONNX Runtime"
            ) from error

    def _no_capture(self) -> AbstractContextManager[None]:
        return nullcontext() if self.is_cpu else capture_lock(self.index).shared()

    def _open(self, ort: Any, path: str) -> Any:
        options = ort.SessionOptions()
        options.log_severity_level = 4  # failures arrive as exceptions
        if self.supports_engines:
            compiler = tensorrt_rtx if self.kind == "rtx" else tensorrt
            return compiler.open_session(ort, path, self.index)
        if not self.is_cpu:
            return sessions.open_session(ort, path, self.name, self.provider, self.index, options)
        if self.unsigned:
            options.add_session_config_entry(UNSIGNED_OPTION, "1")
        # A pattern is a block for all of a pass, beside those of the first pass without it: 27 MB
        # of 135 million parameters in int8, for no time that could be measured.
        options.enable_mem_pattern = False
        providers = ["CPUExecutionProvider"]
        if not self.share_threads:
            options.intra_op_num_threads = self.threads or self.usual or default_threads()
            options.add_session_config_entry("session.force_spinning_stop", "1")
            try:
                return ort.InferenceSession(path, options, providers, enable_fallback=False)
            except Exception as error:
                if not is_for_want_of_own_threads(error):
                    raise
        _make_pool(ort, self.threads, self.usual)
        options.use_per_session_threads = False
        return ort.InferenceSession(path, options, providers, enable_fallback=False)


_pool_threads: list[int | None] = []  # of the process's pool; None is the default, or not known
_pool_lock = threading.Lock()


def has_pool() -> bool:
    """Whether the process's pool is made, as far as is known."""
    return bool(_pool_threads)


def _make_pool(ort: Any, threads: int | None, usual: int | None) -> None:
    """Make the process's pool, once. DeviceError where it has another number of threads."""
    with _pool_lock:
        if not _pool_threads:
            try:
                ort.set_global_thread_pool_sizes(threads or usual or default_threads(), 1)
                _pool_threads.append(threads or usual)
            except Exception as error:
                if not is_of_onnxruntime(error):
                    raise
                _pool_threads.append(None)  # the app has made it
        if threads is not None and threads != (made := _pool_threads[0]):
            raise DeviceError(
                f"cannot use threads={threads}: this process already has ONNX Runtime's shared "
                f"thread pool{f', of {made}' if made else ''}; leave threads out, or use a new "
                "process"
            )
