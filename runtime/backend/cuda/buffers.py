"""Arrays in GPU memory, and in pinned memory that the host writes and kernels read in place."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..buffers import Array
from ..ort import onnxruntime
from . import execution

_NVIDIA = 0x10DE
_PINNED = 5  # OrtDevice::MemType of memory that host and device can access
_BFLOAT16 = 16  # TensorProto.BFLOAT16, which NumPy lacks


@dataclass(eq=False)
class CudaArray:
    """Tensor that sessions are bound to.

    `value` is an OrtValue, `host` a view of its memory if it is pinned, `fetched` the pinned copy
    that `fetch` reuses. `session` owns the memory; other sessions bind it by address.
    """

    value: Any
    shape: tuple[int, ...]
    dtype: str
    host: Array | None = None
    fetched: CudaArray | None = None
    session: Any = None


@dataclass
class CudaRunOptions:
    """Run options of a binding; `captures` is True until its CUDA graph has been captured."""

    value: Any
    captures: bool


class CudaBuffers:
    """Allocator of one session's arrays on a GPU, which are freed when the session is closed.

    The host writes to pinned memory, which kernels read in place without copies and
    synchronization. NumPy arrays are never bound, since ONNX Runtime would copy them at binding.

    A replayed pass writes to the addresses of its capture, even after ONNX Runtime's arena has
    reused that memory for another array of the session. Therefore persistent arrays belong to a
    session that runs no pass, opened by `open_memory`. Without it, arrays belong to the process.
    """

    def __init__(
        self, session: Any, index: int, open_memory: Callable[[], Any] | None = None
    ) -> None:
        self._session, self._index, self._open_memory = session, index, open_memory
        self._num_graphs = 0
        self._lock = execution.capture_lock(index)

    def persistent(self, shape: Sequence[int], dtype: str) -> CudaArray:
        """Allocate an array that replayed passes of other bindings cannot overwrite."""
        with self._lock.shared():
            return self._zeros(self._memory, shape, dtype)

    def zeros(self, shape: Sequence[int], dtype: str) -> CudaArray:
        """Allocate zeros: kernels read unwritten rows, in which a NaN would propagate."""
        with self._lock.shared():
            return self._zeros(self._owner, shape, dtype)

    @property
    def _owner(self) -> Any:
        """Session that owns scratch arrays; None if the process does."""
        return self._session if self._open_memory else None

    def _zeros(self, session: Any, shape: Sequence[int], dtype: str) -> CudaArray:
        allocate = (
            onnxruntime().OrtValue.ortvalue_from_shape_and_type
            if session is None
            else session.create_ortvalue_from_shape_and_type
        )
        value = allocate([*shape], _ort_type(dtype), "cuda", self._index)
        value.update_inplace(np.zeros(shape, "uint16" if dtype == "bfloat16" else dtype))
        return CudaArray(value, tuple(shape), dtype, session=session or self._session)

    def staging(self, shape: Sequence[int], dtype: str) -> CudaArray:
        with self._lock.shared():
            return self._pinned(shape, dtype) or self._zeros(self._owner, shape, dtype)

    def constant(self, values: Sequence[Any] | Array, dtype: str) -> CudaArray:
        host = np.array(values, dtype)
        value = onnxruntime().OrtValue.ortvalue_from_numpy(host)
        return CudaArray(value, host.shape, dtype, host)

    def write(self, array: CudaArray, values: Sequence[float] | Array) -> None:
        if array.host is not None:
            array.host.reshape(-1)[:] = np.ravel(values)
        else:
            with self._lock.shared():
                array.value.update_inplace(np.array(values, array.dtype).reshape(array.shape))

    def fetch(self, array: CudaArray) -> Array:
        """Copy an array to the host; the result is valid until the next fetch."""
        with self._lock.shared():
            if array.fetched is None and array.session is self._session:
                array.fetched = self._pinned(array.shape, array.dtype)
            if array.fetched is None or array.fetched.host is None:
                contents: Array = array.value.numpy()
                return contents
            array.fetched.value.update_inplace(array.value)
            return array.fetched.host

    def bind(
        self, binding: Any, inputs: Mapping[str, CudaArray], outputs: Mapping[str, CudaArray]
    ) -> None:
        for name, array in inputs.items():
            if array.session in (None, self._session):
                binding.bind_ortvalue_input(name, array.value)
            else:
                binding.bind_input(name, *self._address(array))
        for name, array in outputs.items():
            if array.session in (None, self._session):
                binding.bind_ortvalue_output(name, array.value)
            else:
                binding.bind_output(name, *self._address(array))

    def _address(self, array: CudaArray) -> tuple[Any, ...]:
        return "cuda", self._index, _ort_type(array.dtype), array.shape, array.value.data_ptr()

    def run_options(self, captured: bool) -> CudaRunOptions:
        """Return run options with a separate CUDA graph id for each captured binding."""
        options = onnxruntime().RunOptions()
        self._num_graphs += captured
        number = self._num_graphs if captured else -1
        options.add_run_config_entry("gpu_graph_id", str(number))
        return CudaRunOptions(options, captured)

    def run(self, session: Any, binding: Any, options: CudaRunOptions) -> None:
        """Run a pass in the thread of its GPU; the first captured run holds the capture lock."""
        with self._lock.exclusive() if options.captures else nullcontext():
            execution.run(self._index, session, binding, options.value)
        options.captures = False

    def release(self) -> AbstractContextManager[None]:
        return self._lock.shared()

    @cached_property
    def _memory(self) -> Any:
        return self._open_memory and self._open_memory()

    def _pinned(self, shape: Sequence[int], dtype: str) -> CudaArray | None:
        """Allocate zeros in pinned memory; None if this ONNX Runtime does not offer it."""
        if self._allocate_pinned is None or dtype == "bfloat16":
            return None
        value = self._allocate_pinned([*shape], dtype)
        size = max(int(np.prod(shape)) * np.dtype(dtype).itemsize, 1)
        memory = (ctypes.c_byte * size).from_address(value.data_ptr())
        host: Array = np.ndarray(shape, dtype, memoryview(memory))
        host[...] = 0
        return CudaArray(value, tuple(shape), dtype, host)

    @cached_property
    def _allocate_pinned(self) -> Any:
        """Allocator of OrtValues in pinned memory, by private APIs of ONNX Runtime.

        Memory allocated by the public API of version 1.31 outlives the session.
        """
        ort = onnxruntime()
        try:
            device = ort.capi._pybind_state.OrtDevice(1, _PINNED, _NVIDIA, self._index)
            session = self._session._sess
            session.create_ortvalue_from_shape_and_type([1], np.int64, device)
        except Exception:
            return None

        def allocate(shape: list[int], dtype: str) -> Any:
            value = session.create_ortvalue_from_shape_and_type(shape, _ort_type(dtype), device)
            return ort.OrtValue(value, session=session)

        return allocate


def _ort_type(dtype: str) -> Any:
    return _BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype).type
