"""Float64 arithmetic, and float32 arithmetic with random rounding, of a PyTorch model.

In float64 mode values computed only from constants stay float32: rotary tables, position biases,
one plus a norm's weight, and scalars in the code. Everything from the embedding on is float64, even
where the model's code casts to float32, as in norms and softmax. The result is the exact result of
the float32 model, with which a graph with the same constants agrees to the last digits.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from ..checkpoint.placeholders import WeightSources
from ..internals import tree_any, tree_map
from ..libraries import quiet
from ..tracing.families import eager_functions

_LARGEST = float(np.finfo(np.float32).max)  # masks may contain larger float64 values
_MAX_SIZE = 2.0**100  # of perturbed values; masks contain larger and infinite ones
_OFFSETS = 1000  # number of offsets at which random numbers may begin
ROUNDINGS = 4  # batch size: PyTorch's own rounding, and three random perturbations
_FUSED = "scaled_dot_product_attention"
_PRODUCTS = {"linear", "addmm", "baddbmm", "bmm", "softmax", "gelu", "tanh", _FUSED}
_ARITHMETIC = {"matmul", "add", "sub", "mul", "div", "truediv", "pow", "rsqrt", "exp"}
# Maximum argument by which silu multiplies the absolute error of its sigmoid, a unit of 1.
_CURVES = {"silu": 18.0, "sigmoid": 1.0}
_SUMS = {"mean", "layer_norm", "rms_norm"}
_CASTS = {torch.Tensor.float, torch.Tensor.double}


class Float64Mode(TorchFunctionMode):
    """Float64 arithmetic in every call that reads a float64 tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.rounding = True  # round scalars in the code to float32

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "embedding":
            return func(*args, **kwargs).double()
        if func is torch.Tensor.copy_:
            return func(*args, **kwargs)
        if not tree_any(_is_float64, (args, kwargs)):
            args, kwargs = tree_map(_to_float32_argument, (args, kwargs))
            return func(*args, **kwargs)
        if func in _CASTS:
            return args[0]
        if getattr(func, "__name__", "") == _FUSED:
            kwargs.setdefault("scale", args[0].shape[-1] ** -0.5)
        inplace = func.__name__.endswith("_") or func.__name__ == "__setitem__"
        first, rest = (args[:1], args[1:]) if inplace else ((), args)
        rest, kwargs = tree_map(self._widened, (rest, kwargs))
        return func(*first, *rest, **kwargs)

    def _widened(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x.double() if x.dtype == torch.float32 else x
        if isinstance(x, float) and self.rounding and abs(x) <= _LARGEST:
            return float(np.float32(x))
        return torch.float64 if x is torch.float32 else x


class RoundingNoiseMode(TorchFunctionMode):
    """Float32 results with random perturbations of the size of rounding errors.

    Perturbations are up to sqrt(n) roundings for sums of n terms, as in a plain loop (Higham,
    Accuracy and Stability, 4.2), a unit in the last place of 1 for sigmoids, as in fast kernels
    such as ONNX Runtime's MoE node, and a unit in the last place for other results. The first
    sequence of a batch is not perturbed. The error of a single run may be small by chance, for
    example if it depends on the rounding of one large channel; several perturbations show the
    range of float32 errors.
    """

    def __init__(self) -> None:
        super().__init__()
        self._random = torch.Generator().manual_seed(0)
        self._units = torch.empty(0)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "").strip("_")
        if not isinstance(result, torch.Tensor) or result.dtype != torch.float32 or not result.ndim:
            return result
        # Position tables have a single sequence; they are equal in all implementations.
        if name in _PRODUCTS or (name in _ARITHMETIC and len(result) == ROUNDINGS):
            self._perturb(result, result, result.shape)
        elif name in _CURVES:
            size = args[0].clamp(-_CURVES[name], _CURVES[name]) if _CURVES[name] > 1 else 1.0
            self._perturb(result, result.abs() + abs(size), result.shape)
        elif name in _SUMS and len(result) == len(args[0]) == ROUNDINGS:
            roundings = args[0].shape[-1] ** 0.5 / 2
            self._perturb(result, roundings * result, (*result.shape[:-1], 1))
        return result

    def _perturb(self, result: torch.Tensor, size: torch.Tensor, shape: tuple[int, ...]) -> None:
        """Perturb a new result by up to a unit in the last place of `size`; keep infinite values.

        Random numbers are reused at random offsets, since drawing them takes most of the time.
        """
        first = len(result) // ROUNDINGS
        shape = (len(result) - first, *shape[1:])
        count = math.prod(shape)
        if count + _OFFSETS > len(self._units):
            self._units = torch.empty(0)
            units = torch.rand(count + _OFFSETS, generator=self._random)
            self._units = units.mul_(2).sub_(1)
        at = int(torch.randint(_OFFSETS, (), generator=self._random))
        units = self._units[at : at + count].view(shape)
        size = size[first:].clamp(-_MAX_SIZE, _MAX_SIZE)
        result[first:].addcmul_(size, units, value=2.0**-23)


def _is_float64(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype == torch.float64


def _to_float32_argument(x: Any) -> Any:
    """Convert an argument of a computation of constants to float32 and its range."""
    if isinstance(x, float) and abs(x) > _LARGEST:
        return x if math.isinf(x) else math.copysign(_LARGEST, x)
    return torch.float32 if x is torch.float64 else x


@contextlib.contextmanager
def eager_passes(
    model: torch.nn.Module, sources: WeightSources, exact: bool | None = None
) -> Iterator[None]:
    """Run passes of a model in PyTorch, with the values of its placeholders.

    Args:
        model: Model, whose large matrices may be placeholders.
        sources: Their values.
        exact: True to compute in float64, False in float32 with random rounding; None in float32.
    """
    mode: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if exact is not None:
        mode = exact_arithmetic(model) if exact else RoundingNoiseMode()
    weights = sources.materialized(model, torch.float64 if exact else torch.float32)
    with torch.no_grad(), quiet(), eager_functions(model), weights, mode:
        yield


@contextlib.contextmanager
def exact_arithmetic(model: torch.nn.Module) -> Iterator[None]:
    """Compute in float64 while the context lasts.

    Scalars of GELU are not rounded, since it is a single node of the graph. Where a model divides
    scores by a scale, the graph multiplies by its inverse in float32, and so does this mode.
    """
    with Float64Mode() as mode, contextlib.ExitStack() as stack:
        for module in model.modules():
            if (scale := getattr(module, "scale_attn", None)) is not None:
                stack.callback(setattr, module, "scale_attn", scale)
                module.scale_attn = 1 / torch.tensor(1 / float(scale)).double()
            if "GELU" in type(module).__name__:
                before = module.register_forward_pre_hook(
                    lambda *x: setattr(mode, "rounding", False)
                )
                after = module.register_forward_hook(lambda *x: setattr(mode, "rounding", True))
                stack.callback(before.remove)
                stack.callback(after.remove)
        yield
