"""ONNX Runtime sessions on a device, and their thread pools."""

from __future__ import annotations

import os
import re
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from specedge.attention_kernels import batch_invariant_attention
from specedge.bundle.graph_variants import QDQ
from specedge.bundle.precision import HALF_DTYPES, OLDEST_ONNXRUNTIME
from specedge.constant_folding import FOLDING_LIMIT
from specedge.cpu_count import cpu_count, default_threads
from specedge.diagnosis.probe import PROVIDERS
from specedge.errors import BundleError, DeviceError
from specedge.int8_products import UNSIGNED_OPTION
from specedge.option_specs import check_integer

from .buffers import Buffers, HostBuffers
from .cuda import engines, sessions, tensorrt, tensorrt_rtx
from .cuda.buffers import CudaBuffers
from .cuda.execution import capture_lock
from .memory import is_out_of_memory, return_freed_memory
from .ort import first_line, inference_session, is_onnxruntime_error, onnxruntime

# By default, the CPU rounds the inputs of products with dequantized weights to 8 bits.
FLOAT_PRODUCTS = "session.qdq_matmulnbits_accuracy_level", "0"


@dataclass(frozen=True)
class Device:
    """Device that sessions run on.

    After a pass, the threads of a session's own pool stop spinning, since they would occupy the
    cores that the other model's session needs. With `share_threads`, all sessions use one pool,
    which is faster for passes of a few milliseconds; it exists until the process ends, and later
    sessions cannot have their own pools.

    Attributes:
        name: "cpu", "cuda", "tensorrt" or "rtx", optionally with a GPU number, as in "cuda:1".
        threads: CPU threads; None for one per available core.
        share_threads: Share one thread pool in the process.
        default_threads: CPU threads if `threads` is None and no pool exists.
        unsigned: Compute int8 products unsigned: exact on AVX2 without VNNI, which saturates
            otherwise, but half as fast with VNNI.

    Raises:
        DeviceError: The device or the number of threads does not exist.
    """

    name: str = "cpu"
    threads: int | None = None
    share_threads: bool = False
    default_threads: int | None = None
    unsigned: bool = False

    def __post_init__(self) -> None:
        if not re.fullmatch(r"cpu|(cuda|tensorrt|rtx)(:\d{1,2})?", self.name):
            raise DeviceError(
                f"device must be one of {', '.join(PROVIDERS)}, for a GPU optionally with its "
                f"number, as in 'cuda:1', got '{self.name}'"
            )
        if self.threads is not None:
            try:
                threads = check_integer("threads", self.threads, 1, cpu_count())
            except ValueError as error:
                raise DeviceError(f"{error}; this process may not use more CPUs") from error
            object.__setattr__(self, "threads", threads)

    @property
    def type(self) -> str:
        """Name without a number."""
        return self.name.partition(":")[0]

    @property
    def index(self) -> int:
        """Number of the GPU."""
        return int(self.name.partition(":")[2] or 0)

    @property
    def is_cpu(self) -> bool:
        """True if sessions use host memory."""
        return self.type == "cpu"

    @property
    def supports_engines(self) -> bool:
        """True if sessions run engines, built from fixed-shape graphs."""
        return self.type in ("tensorrt", "rtx")

    def platform(self, gpu: str | None = None) -> engines.EnginePlatform:
        """Return the platform of engines, for this machine's GPU or a named architecture."""
        if self.type == "rtx":
            return tensorrt_rtx.platform(onnxruntime(), self.index, gpu)
        if gpu is not None:
            raise DeviceError(
                f"TensorRT builds engines for this machine's GPU only, not for '{gpu}'"
            )
        return tensorrt.platform(onnxruntime(), self.index)

    @property
    def provider(self) -> str:
        """Name of ONNX Runtime's execution provider."""
        return PROVIDERS[self.type]

    @property
    def preferred_ops(self) -> tuple[str, ...]:
        """Supported graph variants of a GPU, the fastest first."""
        attentions = ("onnx",) if self.supports_engines else ("gqa", "onnx")
        halves = tuple(f"{ops}-{dtype}" for dtype in HALF_DTYPES for ops in attentions)
        if self.supports_engines:
            halves = (f"onnx-{QDQ}", *halves)
        if self.type == "rtx":  # has no float32 attention
            return halves
        return (*halves, "onnx-fp32", "onnx")

    def buffers(self, session: Any) -> Buffers:
        """Return the buffers of a session."""
        if self.is_cpu:
            return HostBuffers()
        open_memory = partial(sessions.open_memory, self.provider, self.index)
        return CudaBuffers(session, self.index, None if self.supports_engines else open_memory)

    def open(self, path: Path) -> Any:
        """Open a session of a graph or an engine.

        Raises:
            MemoryError: ONNX Runtime ran out of memory.
            DeviceError: The device cannot load it.
            BundleError: This ONNX Runtime cannot load it.
        """
        ort = onnxruntime()
        try:
            with self._no_capture(), batch_invariant_attention():
                session = self._open(ort, os.fspath(path))
            return_freed_memory()
            return session
        except Exception as error:
            if not is_onnxruntime_error(error):
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
                    f"{path}: its 4-bit experts need ONNX Runtime "
                    f"{OLDEST_ONNXRUNTIME['experts']} or later, but {ort.__version__} is "
                    "installed; upgrade it, or use --ops onnx if the bundle has it"
                ) from error
            raise BundleError(
                f"{path}: ONNX Runtime {ort.__version__} cannot load it ({first_line(error)}); "
                "export the pair again, or upgrade ONNX Runtime"
            ) from error

    def _no_capture(self) -> AbstractContextManager[None]:
        return nullcontext() if self.is_cpu else capture_lock(self.index).shared()

    def _open(self, ort: Any, path: str) -> Any:
        options = ort.SessionOptions()
        options.add_session_config_entry(*FOLDING_LIMIT)
        if self.supports_engines:
            compiler = tensorrt_rtx if self.type == "rtx" else tensorrt
            return compiler.open_session(ort, path, self.index)
        if not self.is_cpu:
            return sessions.open_session(ort, path, self.name, self.provider, self.index, options)
        if self.unsigned:
            options.add_session_config_entry(UNSIGNED_OPTION, "1")
        options.add_session_config_entry(*FLOAT_PRODUCTS)
        # A memory pattern allocates one more block for a whole pass, 27 MB for 135 million int8
        # parameters, without a measurable speed-up.
        options.enable_mem_pattern = False
        create_pool = partial(_create_pool, ort, self.threads, self.default_threads)
        if self.share_threads:
            create_pool()
            options.use_per_session_threads = False
        else:
            options.intra_op_num_threads = self.threads or self.default_threads or default_threads()
            options.add_session_config_entry("session.force_spinning_stop", "1")
        return inference_session(path, options, [self.provider], create_pool)


_pool_threads: list[int | None] = []  # of the process's pool; None is the default or unknown
_pool_lock = threading.Lock()


def has_pool() -> bool:
    """Return True if the process's thread pool is known to exist."""
    return bool(_pool_threads)


def _create_pool(ort: Any, threads: int | None, fallback: int | None) -> None:
    """Create the process's thread pool once.

    Raises:
        DeviceError: It exists with another number of threads.
    """
    with _pool_lock:
        if not _pool_threads:
            try:
                ort.set_global_thread_pool_sizes(threads or fallback or default_threads(), 1)
                _pool_threads.append(threads or fallback)
            except Exception as error:
                if not is_onnxruntime_error(error):
                    raise
                _pool_threads.append(None)  # the app created it
        if threads is not None and threads != (existing := _pool_threads[0]):
            raise DeviceError(
                f"cannot use threads={threads}: this process already has ONNX Runtime's shared "
                f"thread pool{f', of {existing}' if existing else ''}; omit threads, or use a "
                "new process"
            )
