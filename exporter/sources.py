"""Large matrices stay in the checkpoint's files: the model holds stand-ins that take no memory.

A stand-in [R, C] is one row of NaN seen R times, so a computation that reads it by mistake shows.
Its address says which matrix it stands for, its strides whether it was transposed on the way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

SMALLEST = 1 << 20  # bytes in float32; what is smaller is in the model itself
HUGE = 1 << 26  # numbers; larger matrices are widened some rows at a time
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NAN = 0x7FC00000
_WIDTHS: dict[type, str] = {nn.Linear: "out_features", nn.Embedding: "embedding_dim", Conv1D: "nf"}


class Sources:
    """The stored matrices, by the addresses of their stand-ins."""

    def __init__(self) -> None:
        self._stored: dict[int, tuple[np.ndarray, torch.Tensor]] = {}

    def stand_in(self, stored: torch.Tensor) -> torch.Tensor:
        """What a float32 model holds in a stored matrix's place; of a small one a copy. [R, C]"""
        if stored.ndim != 2 or stored.dtype not in FLOATS or 4 * stored.numel() < SMALLEST:
            return stored.clone()
        # Each has bits of its own, so that no optimizer takes two of them for one tensor.
        bits = torch.full(stored.shape[1:], _NAN + len(self._stored) + 1, dtype=torch.int32)
        tensor = bits.view(torch.float32).expand(stored.shape)
        self._stored[tensor.data_ptr()] = (tensor.numpy(), stored)
        return tensor

    def close(self) -> None:
        """Let go of the files; the model is of no use any more."""
        self._stored.clear()

    def find(self, array: np.ndarray) -> torch.Tensor | None:
        """The stored matrix behind a stand-in, transposed if the stand-in is; None for others."""
        if array.ctypes.data not in self._stored:
            return None
        known, stored = self._stored[array.ctypes.data]
        for seen, matrix in ((known, stored), (known.T, stored.T)):
            if (array.shape, array.strides) == (seen.shape, seen.strides):
                return matrix
        raise AssertionError(f"the trace made {array.shape} of a matrix {known.shape}")

    def behind(self, parameter: torch.Tensor | None) -> torch.Tensor | None:
        """The stored matrix behind a model's parameter."""
        if parameter is None or parameter.dtype != torch.float32:
            return None
        return self.find(parameter.detach().numpy())

    def _held(self, module: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """What is behind a module's stand-ins; and what is large and of another type."""
        held = {}
        for name, parameter in module._parameters.items():
            if (stored := self.behind(parameter)) is not None:
                held[name] = stored
            elif parameter is not None and dtype != torch.float32 and parameter.nbytes >= SMALLEST:
                held[name] = parameter.detach()
        return held

    @contextlib.contextmanager
    def reading(
        self,
        model: nn.Module,
        dtype: torch.dtype = torch.float32,
        at_once: bool = False,
        only_shapes: bool = False,
    ) -> Iterator[None]:
        """The model computes with the stored numbers, in `dtype`, while the context lasts.

        Narrower ones are widened for one module's call at a time, or all `at_once`. Where
        `only_shapes` matter, files are left unread: what they are multiplied with becomes zeros.
        """
        memory = Memory()
        with contextlib.ExitStack() as stack:
            for module in model.modules():
                held = self._held(module, dtype)
                if only_shapes and type(module) in _WIDTHS and "weight" in held:
                    _give_zeros(module, stack)
                elif not at_once and _is_huge(module, held, dtype):
                    _compute_in_pieces(module, held["weight"], dtype, stack)
                elif at_once or all(t.dtype == dtype for t in held.values()):
                    _put(module, {n: t.to(dtype) for n, t in held.items()}, stack)
                else:
                    _put_for_each_call(module, held, dtype, memory, stack)
                if dtype != torch.float32:
                    _widen_small(module, held, dtype, stack)
            yield


class Memory:
    """Memory for one widened matrix after another: new pages cost more than the widening."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    @contextlib.contextmanager
    def taken(self, size: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Room for so many numbers while the context lasts; huge ones are not kept. [size]"""
        fitting = [b for b in self._free if b.numel() >= size]
        new = torch.empty(0 if fitting else size, dtype=dtype)
        buffer = min(fitting, key=torch.numel) if fitting else new
        self._free = [b for b in self._free if b is not buffer]
        yield buffer[:size]
        if buffer.numel() <= HUGE:
            self._free.append(buffer)


def _put(module: nn.Module, held: dict[str, torch.Tensor], stack: contextlib.ExitStack) -> None:
    for name, tensor in held.items():
        stack.callback(module._parameters.__setitem__, name, module._parameters[name])
        module._parameters[name] = nn.Parameter(tensor, requires_grad=False)


def _widen_small(
    module: nn.Module,
    held: dict[str, torch.Tensor],
    dtype: torch.dtype,
    stack: contextlib.ExitStack,
) -> None:
    """What is in the model itself: parameters that are not `held`, and buffers."""
    _put(
        module,
        {n: p.to(dtype) for n, p in module._parameters.items() if p is not None and n not in held},
        stack,
    )
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_floating_point():
            stack.callback(module._buffers.__setitem__, name, buffer)
            module._buffers[name] = buffer.to(dtype)


def _give_zeros(module: nn.Module, stack: contextlib.ExitStack) -> None:
    """Let a module give zeros in the shape of its output. [..., C] or [...] -> [..., R]"""
    width = getattr(module, _WIDTHS[type(module)])

    def zeros(input: torch.Tensor) -> torch.Tensor:
        shape = input.shape if type(module) is nn.Embedding else input.shape[:-1]
        return torch.zeros(*shape, width)

    module.forward = zeros
    stack.callback(delattr, module, "forward")


def _is_huge(module: nn.Module, held: dict[str, torch.Tensor], dtype: torch.dtype) -> bool:
    """Whether a module is a vocabulary's matrix, too large to be widened whole."""
    weight = held.get("weight")
    simple = type(module) in (nn.Linear, nn.Embedding) and list(held) == ["weight"]
    return simple and weight is not None and weight.dtype != dtype and weight.numel() > HUGE


def _compute_in_pieces(
    module: nn.Module, weight: torch.Tensor, dtype: torch.dtype, stack: contextlib.ExitStack
) -> None:
    """Let a module look up or multiply with a few rows of its matrix at a time. [R, C]"""

    def embedded(input: torch.Tensor) -> torch.Tensor:
        return weight[input].to(dtype)

    def multiplied(input: torch.Tensor) -> torch.Tensor:
        rows = weight.split(max(1, HUGE // weight.shape[1] // 8))
        output = torch.cat([nn.functional.linear(input, part.to(dtype)) for part in rows], -1)
        return output if module.bias is None else output + module.bias

    module.forward = embedded if type(module) is nn.Embedding else multiplied
    stack.callback(delattr, module, "forward")


def _put_for_each_call(
    module: nn.Module,
    held: dict[str, torch.Tensor],
    dtype: torch.dtype,
    memory: Memory,
    stack: contextlib.ExitStack,
) -> None:
    calls: list[contextlib.ExitStack] = []

    def before(*args: object) -> None:
        calls.append(call := contextlib.ExitStack())
        wide = {n: call.enter_context(memory.taken(t.numel(), dtype)) for n, t in held.items()}
        _put(module, {n: wide[n].view(t.shape).copy_(t) for n, t in held.items()}, call)

    def after(*args: object) -> None:
        calls.pop().close()

    stack.callback(module.register_forward_pre_hook(before).remove)
    stack.callback(module.register_forward_hook(after, always_call=True).remove)
