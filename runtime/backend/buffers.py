"""Arrays in device memory that a session's passes read and write in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Buffers(Protocol):
    """Allocator of one session's arrays."""

    def zeros(self, shape: Sequence[int], dtype: str) -> Any:
        """Allocate an array of zeros that passes are bound to."""

    def persistent(self, shape: Sequence[int], dtype: str) -> Any:
        """Allocate an array whose contents outlast any number of passes, such as a cache."""

    def staging(self, shape: Sequence[int], dtype: str) -> Any:
        """Allocate an array that the host writes before a pass."""

    def constant(self, values: Sequence[Any] | Array, dtype: str) -> Any:
        """Return an array that is not written again."""

    def write(self, array: Any, values: Sequence[float] | Array) -> None:
        """Set the contents of an array."""

    def fetch(self, array: Any) -> Array:
        """Return the contents of an array in host memory, valid until the next pass writes it."""

    def bind(self, binding: Any, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        """Bind arrays to a session's inputs and outputs by tensor name."""

    def run_options(self, captured: bool) -> Any:
        """Return ONNX Runtime's run options of one binding."""

    def run(self, session: Any, binding: Any, options: Any) -> None:
        """Run one pass and wait for its end."""

    def release(self) -> AbstractContextManager[None]:
        """Return a context in which arrays and their session may be freed."""


class HostBuffers:
    """Arrays in host memory, which sessions on the CPU use without copies."""

    def zeros(self, shape: Sequence[int], dtype: str) -> Array:
        return np.zeros(shape, dtype)

    persistent = staging = zeros

    def constant(self, values: Sequence[Any] | Array, dtype: str) -> Array:
        return np.array(values, dtype)

    def write(self, array: Array, values: Sequence[float] | Array) -> None:
        array[:] = values

    def fetch(self, array: Array) -> Array:
        return array

    def bind(self, binding: Any, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        for name, array in inputs.items():
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def run_options(self, captured: bool) -> None:
        return None

    def run(self, session: Any, binding: Any, options: None) -> None:
        session.run_with_iobinding(binding, options)

    def release(self) -> AbstractContextManager[None]:
        return nullcontext()
