"""Arrays that a session reads and writes where they lie, on the device that computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Buffers(Protocol):
    """Allocates, binds and fetches arrays of one session, each of the type of its memory."""

    def zeros(self, shape: Sequence[int], dtype: str) -> Any:
        """An array that passes can be bound to."""

    def kept(self, shape: Sequence[int], dtype: str) -> Any:
        """An array whose contents outlast any number of passes, whatever they are bound to."""

    def given(self, shape: Sequence[int], dtype: str) -> Any:
        """An array that the host writes before a pass."""

    def constant(self, values: Sequence[int], dtype: str) -> Any:
        """An array that nobody writes again."""

    def write(self, array: Any, values: Sequence[float] | Array) -> None:
        """Set what an array holds."""

    def fetch(self, array: Any) -> Array:
        """What an array holds, in the host's memory; valid until the next pass writes it."""

    def bind(self, binding: Any, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        """Let passes of a session's binding read and write these, by the names of the graph."""

    def options(self, captured: bool) -> Any:
        """What ONNX Runtime is told of each run of a binding."""

    def run(self, session: Any, binding: Any, options: Any) -> None:
        """Run a pass of a session; it is over when this returns."""

    def freeing(self) -> AbstractContextManager[None]:
        """Held while arrays and their session are given back."""


class HostBuffers:
    """Arrays of a session on the CPU, whose memory is the host's: none is copied."""

    def zeros(self, shape: Sequence[int], dtype: str) -> Array:
        return np.zeros(shape, dtype)

    def kept(self, shape: Sequence[int], dtype: str) -> Array:
        return np.zeros(shape, dtype)

    def given(self, shape: Sequence[int], dtype: str) -> Array:
        return np.zeros(shape, dtype)

    def constant(self, values: Sequence[int], dtype: str) -> Array:
        return np.array(values, dtype)

    def write(self, array: Array, values: Sequence[float] | Array) -> None:
        array.reshape(-1)[:] = values

    def fetch(self, array: Array) -> Array:
        return array

    def bind(self, binding: Any, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        for name, array in inputs.items():
            binding.bind_input(name, "cpu", 0, *_described(array))
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, *_described(array))

    def options(self, captured: bool) -> None:
        return None

    def run(self, session: Any, binding: Any, options: None) -> None:
        session.run_with_iobinding(binding, options)

    def freeing(self) -> AbstractContextManager[None]:
        return nullcontext()


def _described(array: Array) -> tuple[Any, ...]:
    return array.dtype.type, array.shape, array.ctypes.data
