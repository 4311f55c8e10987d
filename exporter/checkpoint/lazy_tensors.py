"""Lazy tensors whose values stay in files: views and concatenations are recorded, not computed.

transformers renames, transposes and concatenates matrices when it loads a checkpoint. Lazy tensors
pass through that without being read; their values are in memory only during a computation. The
recorded views also show which rows of a checkpoint's quantized tensors a tensor consists of.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from specedge.errors import CheckpointError

from ..internals import make_wrapper_tensor, tree_map_only
from .quantized_tensors import QuantizedTensor

_aten = torch.ops.aten
_VIEWS = {
    _aten.alias.default,
    _aten.detach.default,
    _aten.permute.default,
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.squeeze.dim,
    _aten.t.default,
    _aten.transpose.int,
    _aten.unsqueeze.default,
}
_SHAPES = {_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default}
_COPIES = {_aten.index_select.default}
_JOINS = {_aten.cat.default, _aten.stack.default}
_origins = itertools.count(1)


class LazyTensor(torch.Tensor):
    """Tensor whose values `read` returns in type `stored`; its visible type is `dtype`.

    Operators without a lazy implementation read the values.
    """

    compute: Callable[..., torch.Tensor]  # returns the values from those of `parts`
    parts: tuple[torch.Tensor, ...]
    stored: torch.dtype
    origin: int
    mapped: bool  # True if reading is free: the values are an existing tensor or a view of one
    quantized: QuantizedTensor | None  # the quantized tensor whose rows it has, in order

    @staticmethod
    def __new__(
        cls,  # noqa: ANN001
        like: torch.Tensor,
        compute: Callable[..., torch.Tensor],
        stored: torch.dtype | None = None,
        origin: int | None = None,
        mapped: bool = False,
        parts: tuple[torch.Tensor, ...] = (),
        quantized: QuantizedTensor | None = None,
    ) -> LazyTensor:
        """Create a tensor with the shape, strides and type of `like`, possibly a meta tensor.

        With `parts`, `compute` only moves their values.
        """
        result: LazyTensor = make_wrapper_tensor(cls, like)
        result.compute, result.parts, result.quantized = compute, parts, quantized
        result.stored, result.mapped = stored or like.dtype, mapped
        # Larger than any real address.
        result.origin = next(_origins) << 48 if origin is None else origin
        return result

    def read(self) -> torch.Tensor:
        """Return the values in type `stored`."""
        return self.compute(*map(materialize, self.parts))

    def data_ptr(self) -> int:
        """Return an identity in place of an address, equal for equal values."""
        return self.origin + self.storage_offset() * self.itemsize

    def __repr__(self, **kwargs: object) -> str:  # type: ignore[override]
        return f"LazyTensor({tuple(self.shape)}, {self.stored})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten._to_copy.default:
            return _cast(args[0], kwargs.get("dtype"))
        if func is _aten.clone.default:
            return _copy(args[0])
        if func in _JOINS:
            return _join(func, args, kwargs)
        if func in _VIEWS or func in _SHAPES or func in _COPIES:
            return _view(func, args, kwargs)
        if func._schema.is_mutable and isinstance(args[0], LazyTensor):
            raise RuntimeError(f"{func} would write to a matrix of the checkpoint")
        args, kwargs = tree_map_only(LazyTensor, lambda t: t.read().to(t.dtype), (args, kwargs))
        return func(*args, **kwargs)


def lazy_rows(
    tensor: QuantizedTensor,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> LazyTensor:
    """Return the values of a quantized tensor, in another shape with equal rows."""
    like = torch.empty(shape or tensor.shape, dtype=dtype, device="meta")

    def read() -> torch.Tensor:
        return torch.from_numpy(tensor.values()).to(dtype).reshape(like.shape)

    return LazyTensor(like, read, quantized=tensor)


def as_lazy(tensor: torch.Tensor) -> LazyTensor:
    """Wrap a memory-mapped or resident tensor."""
    return LazyTensor(_meta(tensor), lambda: tensor, mapped=True)


def materialize(tensor: Any) -> Any:
    """Return a lazy tensor's values in their stored type; another value unchanged."""
    return tensor.read() if isinstance(tensor, LazyTensor) else tensor


def is_quantized(tensor: torch.Tensor) -> bool:
    """Return True if the values are moved from quantized tensors."""
    return isinstance(tensor, LazyTensor) and (
        tensor.quantized is not None or any(map(is_quantized, tensor.parts))
    )


def in_stored_type(tensor: LazyTensor) -> torch.Tensor:
    """Return the tensor in its stored type, as a plain tensor if reading it is free."""
    if tensor.mapped:
        return tensor.read()
    return _same(tensor, _meta(tensor).to(tensor.stored), tensor.origin)


def cast_lazily(tensor: LazyTensor, dtype: torch.dtype) -> LazyTensor:
    """Cast to a narrower type when read; reading raises CheckpointError on overflow."""
    read_wide = tensor.read

    def read() -> torch.Tensor:
        wide = read_wide()
        narrow = wide.to(dtype)
        if torch.isinf(narrow).any() and not torch.isinf(wide).any():
            raise CheckpointError(
                f"a weight of {float(wide.abs().max()):.3g} exceeds the range of {dtype}; choose "
                "another type"
            )
        return narrow

    return LazyTensor(_meta(tensor), read, dtype)


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    base = torch.empty(0, dtype=tensor.dtype, device="meta")
    return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _cast(tensor: LazyTensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return the tensor in another type, lazily if that type represents all stored values."""
    dtype = dtype or tensor.dtype
    if torch.promote_types(tensor.stored, dtype) != dtype:
        return tensor.read().to(dtype)
    return _same(tensor, _meta(tensor).to(dtype), tensor.origin)


def _copy(tensor: LazyTensor) -> LazyTensor:
    """Return the same values with contiguous strides."""
    return _same(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))


def _same(tensor: LazyTensor, like: torch.Tensor, origin: int | None = None) -> LazyTensor:
    """Return the same values with the strides and the visible type of `like`."""
    return LazyTensor(
        like, lambda values: values, tensor.stored, origin, tensor.mapped, parts=(tensor,)
    )


def _join(func: Any, args: Any, kwargs: Any) -> LazyTensor:
    parts, *rest = args
    like = func([_meta(part) for part in parts], *rest, **kwargs)
    dtypes = {part.stored if isinstance(part, LazyTensor) else part.dtype for part in parts}
    dtype = next(iter(dtypes)) if len(dtypes) == 1 else like.dtype
    # One part that is not a float is sufficient for `weight_files.check_types` to reject the whole.
    stored = next((dtype for dtype in dtypes if not dtype.is_floating_point), dtype)

    def join(*values: torch.Tensor) -> torch.Tensor:
        if len(dtypes) > 1:
            values = tuple(value.to(dtype) for value in values)
        joined: torch.Tensor = func(list(values), *rest, **kwargs)
        return joined

    return LazyTensor(like, join, stored, parts=tuple(parts))


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    tensor, *rest = args
    views = func(*tree_map_only(torch.Tensor, _meta, args), **kwargs)
    # After a lazy clone the stored values may not have the strides that a view requires.
    do = _aten.reshape.default if func in _SHAPES else func
    mapped = tensor.mapped and func in _VIEWS
    origin = None if func in _COPIES else tensor.origin

    def view(like: torch.Tensor, index: int | None = None) -> LazyTensor:
        def select(values: torch.Tensor) -> torch.Tensor:
            result = do(values, *rest, **kwargs)
            part: torch.Tensor = result if index is None else result[index]
            return part

        return LazyTensor(like, select, tensor.stored, origin, mapped, parts=(tensor,))

    if isinstance(views, torch.Tensor):
        return view(views)
    return [view(part, i) for i, part in enumerate(views)]
