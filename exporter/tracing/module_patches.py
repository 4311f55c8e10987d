"""Replacement of modules that trace to many nodes by equivalent ones that trace to one node.

Equivalence is tested numerically on sample inputs, not assumed by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from .. import internals
from . import rotary
from .attention import onnx_operator

_CLOSE = 1e-6


def freeze_rotary(model: nn.Module, context_length: int) -> bool:
    """Freeze rotary frequencies that depend on the sequence length, at the end of the context.

    Returns True if shorter sequences would have other frequencies (longrope).
    """
    changed = False
    for module, layer_type in list(internals.dynamic_rotary_modules(model)):
        before, positions = (
            internals.inverse_frequencies(module, layer_type),
            torch.arange(context_length)[None],
        )
        module(torch.zeros(1), positions, **({"layer_type": layer_type} if layer_type else {}))
        changed |= not torch.equal(before, internals.inverse_frequencies(module, layer_type))
        internals.freeze_frequencies(module, layer_type)
    return changed


@contextlib.contextmanager
def patched_modules(
    model: nn.Module, context_length: int, num_rows: int | None = None
) -> Iterator[None]:
    """Replace modules of the model while the context lasts.

    Rotary tables have `num_rows` rows, by default one for each position.
    """
    with contextlib.ExitStack() as stack:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if replacement := _replacement(child):
                    stack.callback(setattr, parent, name, child)
                    setattr(parent, name, replacement)
        rotary.patch_rotary(model, context_length, num_rows or context_length, stack)
        yield


def _replacement(module: nn.Module) -> nn.Module | None:
    if isinstance(module, Conv1D):
        return _Product(module.weight, module.bias)
    if list(module.parameters()) or list(module.children()):
        return _rms_norm(module)
    # A tanh GELU in single steps becomes one node.
    gelu = nn.GELU("tanh")
    is_gelu = "GELU" in type(module).__name__
    return gelu if is_gelu and _is_equal(module, gelu, torch.linspace(-8, 8, 4001)) else None


class _Product(nn.Module):
    """Product with a matrix, and a bias: MatMul and Add."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x, self.weight) + self.bias


class _RmsNorm(nn.Module):
    """RMS norm as one node."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return onnx_operator(
            "RMSNormalization", (x, self.weight), x, x.shape, axis=-1, epsilon=self.epsilon
        )


def _rms_norm(module: nn.Module) -> nn.Module | None:
    """Return a replacement of an RMS norm with its weight, or with one plus its weight (gemma)."""
    parameters = dict(module.named_parameters())
    values = (getattr(module, name, None) for name in ("variance_epsilon", "eps"))
    epsilon = next((value for value in values if isinstance(value, float)), None)
    if list(parameters) != ["weight"] or module.weight.ndim != 1 or epsilon is None:
        return None
    size = module.weight.shape
    x = torch.randn(4, *size, generator=torch.Generator().manual_seed(0))
    for weight in (module.weight, 1 + module.weight):
        if _is_equal(module, lambda x, w=weight: nn.functional.rms_norm(x, size, w, epsilon), x):
            return _RmsNorm(weight.detach(), epsilon)
    return None


def _is_equal(module: Any, other: Any, x: torch.Tensor) -> bool:
    try:
        with torch.no_grad():
            return torch.allclose(module(x), other(x), rtol=_CLOSE, atol=_CLOSE)
    except Exception:  # an unrelated module
        return False
