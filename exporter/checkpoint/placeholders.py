"""Placeholders of large matrices, whose values remain in the checkpoint's files.

A placeholder [R, C] is a view of a single NaN, so that accidental reads are detected.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from .lazy_tensors import LazyTensor, is_quantized, materialize
from .quantized_rows import find_rows

SMALLEST = 1 << 20  # bytes in float32; smaller weights that are not quantized are loaded eagerly
HUGE = 1 << 26  # elements; larger matrices are cast in chunks of rows
PIECE = 1 << 20  # elements of a chunk; larger ones are allocated anew each time
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WIDTHS: dict[type, str] = {nn.Linear: "out_features", nn.Embedding: "embedding_dim", Conv1D: "nf"}


class WeightSources:
    """Map from placeholders to stored matrices."""

    def __init__(self) -> None:
        self._matrices: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by the id of the first
        self._last_read: tuple[LazyTensor, torch.Tensor] | None = None

    def parameter(self, matrix: torch.Tensor) -> nn.Parameter:
        """Return a parameter whose value is a placeholder, or a copy of a small matrix. [R, C]"""
        parameter = nn.Parameter(self.placeholder(matrix), requires_grad=False)
        if _is_large(matrix):
            self._matrices[id(parameter)] = parameter, matrix
        return parameter

    def placeholder(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the float32 placeholder of a stored matrix, or a copy of a small one. [R, C]"""
        if not _is_large(matrix):
            return materialize(matrix).to(torch.float32, copy=True)
        tensor = torch.full((1,), math.nan).expand(matrix.shape)
        self._matrices[id(tensor)] = tensor, matrix
        return tensor

    def view(
        self, tensor: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return a view of a tensor; of a placeholder, that of a view of its matrix."""
        matrix = self.stored_matrix(tensor)
        return function(tensor.detach()) if matrix is None else self.placeholder(function(matrix))

    def close(self) -> None:
        """Release the files; the model cannot be used afterwards."""
        self._matrices.clear()
        self._last_read = None

    def stored_matrix(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """Return the matrix of a parameter or placeholder; None for another tensor."""
        return self._matrices.get(id(tensor), (None, None))[1]

    @contextlib.contextmanager
    def materialized(
        self,
        model: nn.Module,
        dtype: torch.dtype = torch.float32,
        only_shapes: bool = False,
    ) -> Iterator[None]:
        """Replace placeholders by the stored values, in `dtype`, until the context exits.

        Args:
            model: Model with placeholders.
            dtype: Type to compute in.
            only_shapes: Do not read files; matrix products return zeros.
        """
        memory, zeros = BufferPool(), functools.cache(torch.zeros)
        with contextlib.ExitStack() as stack:
            for module in model.modules():
                matrices = {n: self.stored_matrix(p) for n, p in module._parameters.items()}
                stored_weights = {n: matrix for n, matrix in matrices.items() if matrix is not None}
                if only_shapes and type(module) in _WIDTHS and "weight" in stored_weights:
                    _return_zeros(module, stack)
                elif only_shapes:
                    _set_parameters(
                        module, {n: zeros(t.shape) for n, t in stored_weights.items()}, stack
                    )
                elif _is_huge(module, stored_weights, dtype):
                    self._compute_in_chunks(module, stored_weights["weight"], dtype, stack)
                elif all(_is_plain(t, dtype) for t in stored_weights.values()):
                    _set_parameters(module, stored_weights, stack)
                else:
                    _set_parameters_per_call(module, stored_weights, dtype, memory, stack)
            yield

    def _compute_in_chunks(
        self,
        module: nn.Module,
        weight: torch.Tensor,
        dtype: torch.dtype,
        stack: contextlib.ExitStack,
    ) -> None:
        """Patch a module to cast a few rows of its matrix at a time. [R, C]"""

        def widened(rows: torch.Tensor) -> torch.Tensor:
            # Not `to`, which keeps constants in float32 in `exact_model.Float64Mode`.
            return rows.double() if dtype == torch.float64 else rows.to(dtype)

        def embedded(input: torch.Tensor) -> torch.Tensor:
            quantized = find_rows(weight)
            if quantized is None or quantized.is_transposed:
                return widened(materialize(weight)[input])
            return widened(quantized.select(input.numpy()).lazy().read())

        def multiplied(input: torch.Tensor) -> torch.Tensor:
            rows = self._values(weight).split(max(1, PIECE // weight.shape[1]))
            output = torch.cat([nn.functional.linear(input, widened(part)) for part in rows], -1)
            return output if module.bias is None else output + module.bias

        module.forward = embedded if type(module) is nn.Embedding else multiplied
        stack.callback(delattr, module, "forward")

    def _values(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the values of a matrix; if they are computed, keep them for the next call."""
        if not isinstance(matrix, LazyTensor) or matrix.mapped:
            return materialize(matrix)
        if self._last_read is None or self._last_read[0] is not matrix:
            self._last_read = None
            self._last_read = matrix, matrix.read()
        return self._last_read[1]


def _is_large(matrix: torch.Tensor) -> bool:
    is_small = 4 * matrix.numel() < SMALLEST and not is_quantized(matrix)
    return matrix.ndim > 1 and matrix.dtype in FLOATS and not is_small


_NUMPY_DTYPES = {
    torch.float64: np.float64, torch.float16: np.float16, torch.int8: np.int8, torch.uint8: np.uint8
}  # fmt: skip


class BufferPool:
    """Pool of buffers for cast matrices, as allocating pages takes longer than casting."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    @contextlib.contextmanager
    def borrow(self, size: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Lend a buffer until the context exits; huge ones are not reused. [size]"""
        fitting = [b for b in self._free if b.numel() >= size and b.dtype == dtype]
        # Not `torch.empty`, which `exact_model.Float64Mode` intercepts.
        numpy_dtype = _NUMPY_DTYPES.get(dtype, np.float32)
        new = torch.from_numpy(np.empty(0 if fitting else size, numpy_dtype))
        buffer = min(fitting, key=torch.numel) if fitting else new
        self._free = [b for b in self._free if b is not buffer]
        yield buffer[:size]
        if buffer.numel() <= HUGE:
            self._free.append(buffer)


def _is_plain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return True if a tensor needs neither reading nor casting."""
    return tensor.dtype == dtype and not isinstance(tensor, LazyTensor)


def _set_parameters(
    module: nn.Module, stored_weights: dict[str, torch.Tensor], stack: contextlib.ExitStack
) -> None:
    for name, tensor in stored_weights.items():
        stack.callback(module._parameters.__setitem__, name, module._parameters[name])
        module._parameters[name] = nn.Parameter(tensor, requires_grad=False)


def _return_zeros(module: nn.Module, stack: contextlib.ExitStack) -> None:
    """Patch a module to return zeros in the shape of its output. [..., C] or [...] -> [..., R]"""
    width = getattr(module, _WIDTHS[type(module)])

    def zeros(input: torch.Tensor) -> torch.Tensor:
        shape = input.shape if type(module) is nn.Embedding else input.shape[:-1]
        return torch.zeros(*shape, width)

    module.forward = zeros
    stack.callback(delattr, module, "forward")


def _is_huge(
    module: nn.Module, stored_weights: dict[str, torch.Tensor], dtype: torch.dtype
) -> bool:
    """Return True for an embedding or LM head that is too large to be cast as a whole."""
    weight = stored_weights.get("weight")
    simple = type(module) in (nn.Linear, nn.Embedding) and list(stored_weights) == ["weight"]
    return simple and weight is not None and not _is_plain(weight, dtype) and weight.numel() > HUGE


def _set_parameters_per_call(
    module: nn.Module,
    stored_weights: dict[str, torch.Tensor],
    dtype: torch.dtype,
    memory: BufferPool,
    stack: contextlib.ExitStack,
) -> None:
    calls: list[contextlib.ExitStack] = []
    # Other parameters may meet float32 constants before they are cast.
    products = {"weight"} if type(module) in (nn.Linear, Conv1D) else set()

    def before(*args: object) -> None:
        calls.append(call := contextlib.ExitStack())
        wide = {}
        for name, tensor in stored_weights.items():
            weight_dtype = dtype if name in products else torch.float32
            buffer = call.enter_context(memory.borrow(tensor.numel(), weight_dtype))
            wide[name] = buffer.view(tensor.shape).copy_(materialize(tensor))
        _set_parameters(module, wide, call)

    def after(*args: object) -> None:
        calls.pop().close()

    stack.callback(module.register_forward_pre_hook(before).remove)
    stack.callback(module.register_forward_hook(after, always_call=True).remove)
