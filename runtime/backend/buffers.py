"""Arrays that a session reads and writes where they lie, on the device that computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Buffers:
    """Allocates, binds and fetches arrays; the CPU's memory is the host's, so none is copied."""

    device = "cpu"

    def zeros(self, shape: Sequence[int], dtype: str) -> Array:
        """An array that passes can be bound to."""
        return np.zeros(shape, dtype)

    def write(self, array: Array, values: Sequence[int]) -> None:
        """Set what an array holds."""
        array.reshape(-1)[:] = values

    def fetch(self, array: Array) -> Array:
        """What an array holds, in the host's memory; valid until the next pass writes it."""
        return array

    def bind(self, binding: Any, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        """Let passes of a session's binding read and write these, by the names of the graph."""
        for name, array in inputs.items():
            binding.bind_input(name, self.device, 0, *_described(array))
        for name, array in outputs.items():
            binding.bind_output(name, self.device, 0, *_described(array))


def _described(array: Array) -> tuple[Any, ...]:
    return array.dtype.type, array.shape, array.ctypes.data
