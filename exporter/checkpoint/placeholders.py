"""Placeholders of large matrices, whose values remain in the checkpoint's files.

A placeholder [R, C] is a strided view of about R + C NaNs, so that accidental reads are detected.
Its address identifies the matrix, and the strides of a view identify the matrix's axes: views are
resolved even if axes are split or permuted, or one of them is sliced.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from specedge.errors import ExportError

from .lazy_tensors import LazyTensor, materialize

SMALLEST = 1 << 20  # bytes in float32; smaller weights are loaded eagerly
HUGE = 1 << 26  # elements; larger matrices are cast in chunks of rows
PIECE = 1 << 20  # elements of a chunk; larger ones are allocated anew each time
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NAN = 0x7FC00000
_WIDTHS: dict[type, str] = {nn.Linear: "out_features", nn.Embedding: "embedding_dim", Conv1D: "nf"}


class WeightSources:
    """Map from placeholders to stored matrices, by address."""

    def __init__(self) -> None:
        self._addresses: list[int] = []  # sorted
        self._matrices: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def placeholder(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the float32 placeholder of a stored matrix, or a copy of a small one. [R, C]"""
        if matrix.ndim < 2 or matrix.dtype not in FLOATS or 4 * matrix.numel() < SMALLEST:
            return materialize(matrix).to(torch.float32, copy=True)
        strides = _placeholder_strides(matrix.shape)
        size = _num_elements(matrix.shape, strides)
        # Different NaN payloads, so that no optimizer deduplicates two placeholders.
        bits = torch.full((size,), _NAN + len(self._matrices) + 1, dtype=torch.int32)
        tensor = bits.view(torch.float32).as_strided(matrix.shape, strides)
        bisect.insort(self._addresses, tensor.data_ptr())
        self._matrices[tensor.data_ptr()] = (tensor, matrix)
        return tensor

    def close(self) -> None:
        """Release the files; the model cannot be used afterwards."""
        self._addresses.clear()
        self._matrices.clear()

    def find(self, array: np.ndarray) -> torch.Tensor | None:
        """Return the matrix of a placeholder, or of a view of one; None for other arrays.

        Raises ExportError for a view that cannot be resolved.
        """
        index = bisect.bisect_right(self._addresses, array.ctypes.data) - 1
        start = self._addresses[index] if index >= 0 else 0
        placeholder, matrix = self._matrices.get(start, (None, None))
        offset = (array.ctypes.data - start) // 4
        if placeholder is None or matrix is None:
            return None
        if offset >= _num_elements(placeholder.shape, placeholder.stride()):
            return None
        return _resolve_view(array, offset, placeholder, matrix)

    def stored_matrix(self, parameter: torch.Tensor | None) -> torch.Tensor | None:
        """Return the stored matrix of a model's parameter; None if it has no placeholder."""
        if parameter is None or parameter.dtype != torch.float32:
            return None
        return self.find(parameter.detach().numpy())

    @contextlib.contextmanager
    def materialized(
        self,
        model: nn.Module,
        dtype: torch.dtype = torch.float32,
        at_once: bool = False,
        only_shapes: bool = False,
    ) -> Iterator[None]:
        """Replace placeholders by the stored values, in `dtype`, until the context exits.

        Args:
            model: Model with placeholders.
            dtype: Type to compute in.
            at_once: Cast all matrices immediately, instead of each module's during its call.
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
                elif not at_once and _is_huge(module, stored_weights, dtype):
                    _compute_in_chunks(module, stored_weights["weight"], dtype, stack)
                elif at_once or all(_is_plain(t, dtype) for t in stored_weights.values()):
                    _set_parameters(
                        module,
                        {n: materialize(t).to(dtype) for n, t in stored_weights.items()},
                        stack,
                    )
                else:
                    _set_parameters_per_call(module, stored_weights, dtype, memory, stack)
            yield


def _num_elements(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements of memory that a strided tensor spans."""
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


def _placeholder_strides(shape: torch.Size) -> list[int]:
    """Return strides of a placeholder that identify its axes; the largest axis has stride 1.

    Parts of a split axis of size n have its stride times divisors of n. Therefore each stride is
    coprime to the strides and sizes of all larger axes.
    """
    strides, multiples = [0] * len(shape), 1
    for axis in sorted(range(len(shape)), key=lambda axis: -shape[axis]):
        larger = (n for n in itertools.count(2) if math.gcd(n, multiples) == 1)
        strides[axis] = next(larger) if multiples > 1 else 1
        multiples *= strides[axis] * shape[axis]
    return strides


def _resolve_view(
    array: np.ndarray, offset: int, placeholder: torch.Tensor, matrix: torch.Tensor
) -> torch.Tensor:
    """Return the part of a matrix that corresponds to a view of its placeholder.

    `offset` is that of the view, in elements. Raises ExportError if the part is ambiguous.
    """
    strides = placeholder.stride()
    smallest_first = sorted(range(matrix.ndim), key=lambda axis: -strides[axis])
    axes_of: list[list[int]] = [[] for _ in strides]  # axes of the array, by axis of the matrix
    for i in sorted(range(array.ndim), key=lambda i: -array.strides[i]):
        if array.shape[i] > 1:
            steps = array.strides[i] // 4
            axes_of[next(axis for axis in smallest_first if steps % strides[axis] == 0)].append(i)
    lengths = [math.prod(array.shape[i] for i in axes) for axes in axes_of]
    sliced = [axis for axis, n in enumerate(matrix.shape) if lengths[axis] != n]
    axis = sliced[0] if sliced else 0
    first, rest = divmod(offset, strides[axis])
    expected = [
        math.prod([4 * strides[axis], *(array.shape[j] for j in axes[position + 1 :])])
        for axis, axes in enumerate(axes_of)
        for position in range(len(axes))
    ]
    order = [i for axes in axes_of for i in axes]
    if (
        [array.strides[i] for i in order] != expected
        or len(sliced) > 1
        or rest
        or (offset and not sliced)
        or first + lengths[axis] > matrix.shape[axis]
    ):
        raise ExportError(
            f"its graph reads a view {list(array.shape)} of a matrix {list(matrix.shape)} that "
            "cannot be resolved to the checkpoint"
        )
    part = matrix.narrow(axis, first, lengths[axis]).reshape([array.shape[i] for i in order])
    part = part.permute([order.index(i) for i in sorted(order)])
    for i in range(array.ndim):
        part = part if i in order else part.unsqueeze(i)
    return part


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


def _compute_in_chunks(
    module: nn.Module, weight: torch.Tensor, dtype: torch.dtype, stack: contextlib.ExitStack
) -> None:
    """Patch a module to cast a few rows of its matrix at a time. [R, C]"""

    def widened(rows: torch.Tensor) -> torch.Tensor:
        # Not `to`, which keeps constants in float32 in `exact_model.Float64Mode`.
        return rows.double() if dtype == torch.float64 else rows.to(dtype)

    def embedded(input: torch.Tensor) -> torch.Tensor:
        return widened(materialize(weight)[input])

    def multiplied(input: torch.Tensor) -> torch.Tensor:
        rows = materialize(weight).split(max(1, PIECE // weight.shape[1]))
        output = torch.cat([nn.functional.linear(input, widened(part)) for part in rows], -1)
        return output if module.bias is None else output + module.bias

    module.forward = embedded if type(module) is nn.Embedding else multiplied
    stack.callback(delattr, module, "forward")


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
