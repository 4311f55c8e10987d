"""Large matrices stay in the checkpoint's files: the model holds placeholders without memory.

A placeholder [R, C] is a strided view of about R + C NaNs, so that a computation that reads it by
mistake shows. Its address identifies the matrix, and the strides of a view of it identify the
matrix's axes: so views are resolved with axes split, reordered, and one of them sliced.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from specedge.errors import ExportError

from .lazy_tensors import LazyTensor, materialize

SMALLEST = 1 << 20  # bytes in float32; smaller weights are loaded eagerly
HUGE = 1 << 26  # numbers; larger matrices are widened some rows at a time
PIECE = 1 << 20  # numbers of these: more are new pages of memory for each
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NAN = 0x7FC00000
_WIDTHS: dict[type, str] = {nn.Linear: "out_features", nn.Embedding: "embedding_dim", Conv1D: "nf"}


class WeightSources:
    """Stored matrices by the addresses of their placeholders."""

    def __init__(self) -> None:
        self._addresses: list[int] = []  # sorted
        self._behind: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def placeholder(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the float32 placeholder of a stored matrix; a copy of a small one. [R, C]"""
        if matrix.ndim < 2 or matrix.dtype not in FLOATS or 4 * matrix.numel() < SMALLEST:
            return materialize(matrix).to(torch.float32, copy=True)
        strides = _placeholder_strides(matrix.shape)
        size = 1 + sum((n - 1) * s for n, s in zip(matrix.shape, strides, strict=True))
        # Each has bits of its own, so that no optimizer takes two of them for one tensor.
        bits = torch.full((size,), _NAN + len(self._behind) + 1, dtype=torch.int32)
        tensor = bits.view(torch.float32).as_strided(matrix.shape, strides)
        bisect.insort(self._addresses, tensor.data_ptr())
        self._behind[tensor.data_ptr()] = (tensor, matrix)
        return tensor

    def close(self) -> None:
        """Release the files; the model cannot be used afterwards."""
        self._addresses.clear()
        self._behind.clear()

    def find(self, array: np.ndarray) -> torch.Tensor | None:
        """Return the matrix behind a placeholder or a view of one; None for other arrays.

        Raises ExportError for a view that cannot be resolved.
        """
        index = bisect.bisect_right(self._addresses, array.ctypes.data) - 1
        start = self._addresses[index] if index >= 0 else 0
        placeholder, matrix = self._behind.get(start, (None, None))
        offset = (array.ctypes.data - start) // 4
        if placeholder is None or matrix is None or offset >= _num_elements(placeholder):
            return None
        return _resolve_view(array, offset, placeholder, matrix)

    def stored_matrix(self, parameter: torch.Tensor | None) -> torch.Tensor | None:
        """Return the stored matrix behind a model's parameter."""
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
        """Let the model compute with the stored values, in `dtype`, while the context lasts.

        Narrower values are cast for one module's call at a time, or all `at_once`. With
        `only_shapes` files are not read: products with the matrices become zeros.
        """
        memory, zeros = BufferPool(), functools.cache(torch.zeros)
        with contextlib.ExitStack() as stack:
            for module in model.modules():
                behind = {n: self.stored_matrix(p) for n, p in module._parameters.items()}
                stored_weights = {n: stored for n, stored in behind.items() if stored is not None}
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


def _num_elements(tensor: torch.Tensor) -> int:
    """Return the number of elements of memory that a strided tensor covers."""
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def _placeholder_strides(shape: torch.Size) -> list[int]:
    """Return strides of a placeholder that identify its axes; the largest axis has stride 1.

    An axis of n that is split has its own stride times divisors of n. No stride has a divisor in
    common with those of the larger axes and their sizes.
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
    """Return the part of a matrix that a view shows at an offset in its placeholder."""
    strides = placeholder.stride()
    smallest_first = sorted(range(matrix.ndim), key=lambda axis: -strides[axis])
    seen: list[list[int]] = [[] for _ in strides]  # the array's axes, of each of the matrix's
    for i in sorted(range(array.ndim), key=lambda i: -array.strides[i]):
        if array.shape[i] > 1:
            steps = array.strides[i] // 4
            seen[next(axis for axis in smallest_first if steps % strides[axis] == 0)].append(i)
    lengths = [math.prod(array.shape[i] for i in axes) for axes in seen]
    cut = [axis for axis, n in enumerate(matrix.shape) if lengths[axis] != n]
    axis = cut[0] if cut else 0
    first, rest = divmod(offset, strides[axis])
    expected = [
        math.prod([4 * strides[axis], *(array.shape[j] for j in axes[position + 1 :])])
        for axis, axes in enumerate(seen)
        for position in range(len(axes))
    ]
    order = [i for axes in seen for i in axes]
    if (
        [array.strides[i] for i in order] != expected
        or len(cut) > 1
        or rest
        or (offset and not cut)
        or first + lengths[axis] > matrix.shape[axis]
    ):
        raise ExportError(
            f"its graph takes {list(array.shape)} of a matrix {list(matrix.shape)} in a form "
            "that cannot be resolved to the checkpoint"
        )
    part = matrix.narrow(axis, first, lengths[axis]).reshape([array.shape[i] for i in order])
    part = part.permute([order.index(i) for i in sorted(order)])
    for i in range(array.ndim):
        part = part if i in order else part.unsqueeze(i)
    return part


_KINDS = {
    torch.float64: np.float64, torch.float16: np.float16, torch.int8: np.int8, torch.uint8: np.uint8
}  # fmt: skip


class BufferPool:
    """Pool of buffers for cast matrices: new pages cost more than the cast."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    @contextlib.contextmanager
    def borrow(self, size: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Lend a buffer while the context lasts; huge ones are not kept. [size]"""
        fitting = [b for b in self._free if b.numel() >= size and b.dtype == dtype]
        # Not `torch.empty`: for exact results that gives the model's own type.
        kind = _KINDS.get(dtype, np.float32)
        new = torch.from_numpy(np.empty(0 if fitting else size, kind))
        buffer = min(fitting, key=torch.numel) if fitting else new
        self._free = [b for b in self._free if b is not buffer]
        yield buffer[:size]
        if buffer.numel() <= HUGE:
            self._free.append(buffer)


def _is_plain(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return True if a tensor can be computed with as it is."""
    return tensor.dtype == dtype and not isinstance(tensor, LazyTensor)


def _set_parameters(
    module: nn.Module, stored_weights: dict[str, torch.Tensor], stack: contextlib.ExitStack
) -> None:
    for name, tensor in stored_weights.items():
        stack.callback(module._parameters.__setitem__, name, module._parameters[name])
        module._parameters[name] = nn.Parameter(tensor, requires_grad=False)


def _return_zeros(module: nn.Module, stack: contextlib.ExitStack) -> None:
    """Let a module return zeros in the shape of its output. [..., C] or [...] -> [..., R]"""
    width = getattr(module, _WIDTHS[type(module)])

    def zeros(input: torch.Tensor) -> torch.Tensor:
        shape = input.shape if type(module) is nn.Embedding else input.shape[:-1]
        return torch.zeros(*shape, width)

    module.forward = zeros
    stack.callback(delattr, module, "forward")


def _is_huge(
    module: nn.Module, stored_weights: dict[str, torch.Tensor], dtype: torch.dtype
) -> bool:
    """Return True for a vocabulary's matrix that is too large to be cast whole."""
    weight = stored_weights.get("weight")
    simple = type(module) in (nn.Linear, nn.Embedding) and list(stored_weights) == ["weight"]
    return simple and weight is not None and not _is_plain(weight, dtype) and weight.numel() > HUGE


def _compute_in_chunks(
    module: nn.Module, weight: torch.Tensor, dtype: torch.dtype, stack: contextlib.ExitStack
) -> None:
    """Let a module look up or multiply with a few rows of its matrix at a time. [R, C]"""

    def widened(rows: torch.Tensor) -> torch.Tensor:
        # Not `to`: for exact results that asks for a constant, in the model's own type.
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
    # What else a model has may be added to or divided by constants before it is exact.
    products = {"weight"} if type(module) in (nn.Linear, Conv1D) else set()

    def before(*args: object) -> None:
        calls.append(call := contextlib.ExitStack())
        wide = {}
        for name, tensor in stored_weights.items():
            kind = dtype if name in products else torch.float32
            room = call.enter_context(memory.borrow(tensor.numel(), kind))
            wide[name] = room.view(tensor.shape).copy_(materialize(tensor))
        _set_parameters(module, wide, call)

    def after(*args: object) -> None:
        calls.pop().close()

    stack.callback(module.register_forward_pre_hook(before).remove)
    stack.callback(module.register_forward_hook(after, always_call=True).remove)
