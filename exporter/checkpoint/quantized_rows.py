"""Tensors of a model whose rows are rows of a checkpoint's quantized tensors.

The rows may be in another order than in the checkpoint, from several of its tensors, and columns of
the model's tensor. A tensor that was computed, for example by an adapter, has no such rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from .lazy_tensors import LazyTensor
from .quantized_tensors import QuantizedTensor, map_strips


@dataclass(frozen=True)
class QuantizedRows:
    """Rows of quantized tensors, [..., K], or the columns of a matrix, [K, N].

    Attributes:
        tensors: Quantized tensors.
        sources: Index of the tensor of each row, [...].
        rows: Index of each row in its tensor, [...].
        is_transposed: True if the rows are columns.
    """

    tensors: tuple[QuantizedTensor, ...]
    sources: np.ndarray
    rows: np.ndarray
    is_transposed: bool = False

    @property
    def can_be_kept(self) -> bool:
        """True if all tensors are block-wise."""
        return all(tensor.layout is not None for tensor in self.tensors)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the model's tensor."""
        size = self.tensors[0].shape[1]
        return (size, *self.rows.shape) if self.is_transposed else (*self.rows.shape, size)

    def reshape(self, shape: tuple[int, ...]) -> QuantizedRows:
        """Return the same rows in another shape."""
        return replace(self, sources=self.sources.reshape(shape), rows=self.rows.reshape(shape))

    def select(self, index: np.ndarray) -> QuantizedRows:
        """Return the rows with these numbers along the first axis, in the index's shape."""
        return replace(self, sources=self.sources[index], rows=self.rows[index])

    def lazy(self) -> LazyTensor:
        """Return the model's tensor in float32, which is dequantized when it is read."""
        return LazyTensor(torch.empty(self.shape, device="meta"), self._values)

    def _values(self) -> torch.Tensor:
        values = np.empty(self.shape, np.float32)
        by_row = values.T if self.is_transposed else values.reshape(-1, self.shape[-1])
        sources, rows = self.sources.reshape(-1), self.rows.reshape(-1)

        def write(at: slice) -> None:
            for i in np.unique(sources[at]):
                selected = (
                    at if len(self.tensors) == 1 else at.start + np.flatnonzero(sources[at] == i)
                )
                by_row[selected] = self.tensors[i].dequantize(rows[selected])

        map_strips(write, *by_row.shape)
        return torch.from_numpy(values)


def find_rows(tensor: torch.Tensor) -> QuantizedRows | None:
    """Return the rows of quantized tensors that a lazy tensor has; None for another one."""
    tensors: dict[str, QuantizedTensor] = {}
    _collect(tensor, tensors)
    if not tensors or len({source.shape[1] for source in tensors.values()}) > 1:
        return None
    ends = np.cumsum([source.shape[0] for source in tensors.values()])
    starts = dict(zip(tensors, (0, *ends.tolist()), strict=False))
    numbers, columns = (_trace(tensor, starts, is_row) for is_row in (True, False))
    if numbers is None or columns is None:
        return None
    size = next(iter(tensors.values())).shape[1]
    for is_transposed in (False, True) if tensor.ndim == 2 else (False,):
        axis = 0 if is_transposed else tensor.ndim - 1
        if tensor.shape[axis] != size or not _is_constant(numbers, axis):
            continue
        inputs = columns.movedim(axis, -1)
        if all(_is_constant(inputs, i) for i in range(tensor.ndim - 1)) and torch.equal(
            inputs.reshape(-1, size)[0], torch.arange(size, dtype=torch.int32)
        ):
            by_row = numbers.select(axis, 0).numpy()
            sources = np.searchsorted(ends, by_row, "right")
            first_rows = np.array([*starts.values()])
            return QuantizedRows(
                (*tensors.values(),), sources, by_row - first_rows[sources], is_transposed
            )
    return None


def _collect(tensor: torch.Tensor, tensors: dict[str, QuantizedTensor]) -> None:
    """Add the quantized tensors that a lazy tensor is computed from."""
    if isinstance(tensor, LazyTensor):
        if tensor.quantized is not None:
            tensors[tensor.quantized.name] = tensor.quantized
        for part in tensor.parts:
            _collect(part, tensors)


def _trace(tensor: torch.Tensor, starts: dict[str, int], is_row: bool) -> torch.Tensor | None:
    """Return the number of each value's row among all tensors, or of its column, as int32.

    None if values are computed, or are not of a quantized tensor.
    """
    if not isinstance(tensor, LazyTensor):
        return None
    if tensor.quantized is not None:
        count, size = tensor.quantized.shape
        numbers = torch.arange(size, dtype=torch.int32).expand(count, size)
        if is_row:
            start = starts[tensor.quantized.name]
            numbers = torch.arange(start, start + count, dtype=torch.int32)[:, None]
        return numbers.reshape(*tensor.shape[:-1], -1).expand(tensor.shape)
    parts = [_trace(part, starts, is_row) for part in tensor.parts]
    traced = [part for part in parts if part is not None]
    return tensor.compute(*traced) if traced and len(traced) == len(parts) else None


def _is_constant(tensor: torch.Tensor, axis: int) -> bool:
    """Return True if values do not change along an axis."""
    return tensor.stride(axis) == 0 or bool((tensor == tensor.narrow(axis, 0, 1)).all())
