"""Arrays in a GPU's memory, and those that the host writes and kernels read where they lie."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from . import gpu_thread
from .buffers import Array
from .capture_gate import gate_of
from .ort import onnxruntime

_NVIDIA = 0x10DE
_PINNED = 5  # onnxruntime's OrtDevice::MemType of memory that the host and the device reach
_BFLOAT16 = 16  # ONNX's number of a type that NumPy lacks


@dataclass(eq=False)
class GpuArray:
    """A tensor that sessions are bound to: `value` is an OrtValue, `host` its memory as the host
    sees it, if it does, and `fetched` pinned memory that it was fetched into. `session` is the one
    that it is of: to others ONNX Runtime binds it by its address alone.
    """

    value: Any
    shape: tuple[int, ...]
    dtype: str
    host: Array | None = None
    fetched: GpuArray | None = None
    session: Any = None


@dataclass
class RunOptions:
    """What a run of a binding is told, and whether the next one is to capture its graph."""

    value: Any
    captures: bool


class GpuBuffers:
    """Allocates, binds and fetches arrays of a session: its memory returns when it is closed.

    What the host writes lies in pinned memory, which kernels read in place: no copy, and no call
    that waits. NumPy's own arrays are never bound: they would be copied once, when they are.

    A captured pass writes what it wrote when it was captured, though ONNX Runtime may have given
    that memory away since: arrays made later, of the same session, live to the next pass alone. So
    what is kept is of a session that runs no pass, which `make_memory` opens. Without one arrays
    are the process's: the next ones get that memory, nobody else.
    """

    def __init__(
        self, session: Any, index: int, make_memory: Callable[[], Any] | None = None
    ) -> None:
        self._session, self._index, self._make_memory = session, index, make_memory
        self._num_graphs = 0
        self._gate = gate_of(index)

    def kept(self, shape: Sequence[int], dtype: str) -> GpuArray:
        """An array of which captured passes write no row that they are not bound to write."""
        with self._gate.others():
            return self._zeros(self._memory, shape, dtype)

    def zeros(self, shape: Sequence[int], dtype: str) -> GpuArray:
        """An array on the device. What no pass has written is never used, but read: no NaN."""
        with self._gate.others():
            return self._zeros(self._own, shape, dtype)

    @property
    def _own(self) -> Any:
        """The session that arrays are of which it writes; None: they are the process's."""
        return self._session if self._make_memory else None

    def _zeros(self, session: Any, shape: Sequence[int], dtype: str) -> GpuArray:
        make = (
            onnxruntime().OrtValue.ortvalue_from_shape_and_type
            if session is None
            else session.create_ortvalue_from_shape_and_type
        )
        value = make([*shape], _type(dtype), "cuda", self._index)
        value.update_inplace(np.zeros(shape, "uint16" if dtype == "bfloat16" else dtype))
        return GpuArray(value, tuple(shape), dtype, session=session or self._session)

    def given(self, shape: Sequence[int], dtype: str) -> GpuArray:
        """An array that the host writes before a pass."""
        with self._gate.others():
            return self._pinned(shape, dtype) or self._zeros(self._own, shape, dtype)

    def constant(self, values: Sequence[int], dtype: str) -> GpuArray:
        """An array that kernels' host code reads, and that nobody writes again."""
        host = np.array(values, dtype)
        value = onnxruntime().OrtValue.ortvalue_from_numpy(host)
        return GpuArray(value, host.shape, dtype, host)

    def write(self, array: GpuArray, values: Sequence[float] | Array) -> None:
        """Set what an array holds."""
        if array.host is not None:
            array.host.reshape(-1)[:] = values
        else:
            with self._gate.others():
                array.value.update_inplace(np.array(values, array.dtype).reshape(array.shape))

    def fetch(self, array: GpuArray) -> Array:
        """What an array holds, by one copy; valid until it is fetched again."""
        with self._gate.others():
            return self._fetched(array)

    def _fetched(self, array: GpuArray) -> Array:
        if array.fetched is None and array.session is self._session:
            array.fetched = self._pinned(array.shape, array.dtype)
        if array.fetched is None or array.fetched.host is None:
            found: Array = array.value.numpy()
            return found
        array.fetched.value.update_inplace(array.value)
        return array.fetched.host

    def bind(
        self, binding: Any, inputs: Mapping[str, GpuArray], outputs: Mapping[str, GpuArray]
    ) -> None:
        """Let passes of a session's binding read and write these, by the names of the graph."""
        for name, array in inputs.items():
            if array.session in (None, self._session):
                binding.bind_ortvalue_input(name, array.value)
            else:
                binding.bind_input(name, *self._described(array))
        for name, array in outputs.items():
            if array.session in (None, self._session):
                binding.bind_ortvalue_output(name, array.value)
            else:
                binding.bind_output(name, *self._described(array))

    def _described(self, array: GpuArray) -> tuple[Any, ...]:
        return "cuda", self._index, _type(array.dtype), array.shape, array.value.data_ptr()

    def options(self, captured: bool) -> RunOptions:
        """What a run of a binding is told: its own graph of CUDA, or none.

        A graph that was captured runs whatever else is bound, so each binding has a number.
        """
        options = onnxruntime().RunOptions()
        self._num_graphs += captured
        number = self._num_graphs if captured else -1
        options.add_run_config_entry("gpu_graph_id", str(number))
        return RunOptions(options, captured)

    def run(self, session: Any, binding: Any, options: RunOptions) -> None:
        """Run a pass in the thread of its GPU; the first of a graph captures it."""
        with self._gate.capturing() if options.captures else nullcontext():
            gpu_thread.run(self._index, session, binding, options.value)
        options.captures = False

    def freeing(self) -> AbstractContextManager[None]:
        """Held while arrays and their session are given back."""
        return self._gate.others()

    @cached_property
    def _memory(self) -> Any:
        return self._make_memory and self._make_memory()

    def _pinned(self, shape: Sequence[int], dtype: str) -> GpuArray | None:
        """An array in pinned memory, zeros; None where this ONNX Runtime has no way to it."""
        if self._make_pinned is None or dtype == "bfloat16":
            return None
        value = self._make_pinned([*shape], dtype)
        made = np.zeros(shape, dtype)
        memory = (ctypes.c_byte * max(made.nbytes, 1)).from_address(value.data_ptr())
        host: Array = np.ndarray(shape, dtype, memoryview(memory))
        host[...] = 0
        return GpuArray(value, tuple(shape), dtype, host)

    @cached_property
    def _make_pinned(self) -> Any:
        """What makes OrtValues of a session in pinned memory: private names of ONNX Runtime 1.31.

        Memory made by public names is a process's, and stays when the session is closed.
        """
        ort = onnxruntime()
        try:
            device = ort.capi._pybind_state.OrtDevice(1, _PINNED, _NVIDIA, self._index)
            session = self._session._sess
            session.create_ortvalue_from_shape_and_type([1], np.int64, device)
        except Exception:
            return None

        def make(shape: list[int], dtype: str) -> Any:
            value = session.create_ortvalue_from_shape_and_type(shape, _type(dtype), device)
            return ort.OrtValue(value, session=session)

        return make


def _type(dtype: str) -> Any:
    return _BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype).type
