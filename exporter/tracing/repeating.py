"""A deep model is traced with one layer of each kind, whose nodes are then repeated for the others.

PyTorch takes 0.6 to 0.9 s a layer and op set to trace, decompose and translate. What is repeated is
the graph as it was translated, before any optimizer has seen a weight, so all that depends on
weights is done to the whole graph, as it would be to one that was traced whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from ..quiet import quiet
from . import like_layers, tracing
from .attention import BufferLayer, operator
from .families import registered
from .geometry import Geometry
from .layers import Layer
from .like_layers import LikeLayers, UnlikeError, first_of, forwarding
from .repeated_nodes import DOMAIN, ENTER, LEAVE, repeat

DEEP = 8  # layers; fewer are traced in seconds


def trace(model: nn.Module, geometry: Geometry, ops: str, layers: list[Layer]) -> ir.Model:
    """The model as a graph with T symbolic, whose initializers share the model's memory."""
    if len(geometry.layers) > DEEP:
        with contextlib.suppress(Exception):  # if it cannot be traced, tracing it whole says why
            return _repeated(model, geometry, ops, layers)
    return tracing.trace(model, geometry, ops, layers)


def _repeated(model: nn.Module, geometry: Geometry, ops: str, layers: list[Layer]) -> ir.Model:
    """Trace one layer of each kind and repeat it. Raises UnlikeError where that cannot be."""
    like = _like_layers(model, geometry, ops, layers)
    if len(layers) != len(like.layers) or 2 * len(like.kept) > len(like.layers):
        raise UnlikeError(f"{len(like.kept)} kinds of {len(like.layers)} layers")
    few = replace(geometry, layers=tuple(geometry.layers[i] for i in like.kept))

    def whole(graph: ir.Graph) -> None:
        repeat(graph, like, geometry)
        _order_initializers(graph, like.names)

    with _only(model, like):
        return tracing.trace(model, few, ops, [layers[i] for i in like.kept], whole)


def _like_layers(model: nn.Module, geometry: Geometry, ops: str, layers: list[Layer]) -> LikeLayers:
    whole = tracing.Traceable(model, geometry.context_length, ops, layers)
    with quiet(), registered(model):
        return like_layers.find(model, geometry, whole)


class _Skipped(nn.Module):
    """Stands where a layer was, and hands on what it gets."""

    def __init__(self, layer: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        object.__setattr__(self, "_layer", layer)
        object.__setattr__(self, "forward", forward)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_layer"), name)


@contextlib.contextmanager
def _only(model: nn.Module, like: LikeLayers) -> Iterator[None]:
    """Let the model have one layer of each kind, between marks, and caches for these alone."""
    found = model.get_submodule(like.name)
    assert isinstance(found, nn.ModuleList)

    def handed_on(*args: Any, **kwargs: Any) -> Any:
        hidden = args[like.hidden] if isinstance(like.hidden, int) else kwargs[like.hidden]
        return hidden if like.rest is None else (hidden, *like.rest)

    with contextlib.ExitStack() as stack:
        stack.enter_context(forwarding(model, _with_few_caches(model, like)))
        for i, layer in enumerate(like.layers):
            if i in like.kept:
                stack.enter_context(forwarding(layer, _marked(layer, i, like.hidden)))
            else:
                stack.callback(found.__setitem__, i, layer)
                found[i] = _Skipped(layer, handed_on)
        yield


def _with_few_caches(model: nn.Module, like: LikeLayers) -> Callable[..., Any]:
    """The model's forward, given buffers of the layers that are kept."""
    forward = model.forward

    def run(*, past_key_values: Any, **options: Any) -> Any:
        given = dict(zip(like.kept, past_key_values.layers, strict=True))
        filled = [given[i] if i in given else _unused(given[k]) for i, k in enumerate(like.first)]
        return forward(past_key_values=type(past_key_values)(layers=filled), **options)

    return run


def _unused(layer: Any) -> Any:
    return BufferLayer(layer.keys, layer.values)


def _marked(layer: nn.Module, index: int, hidden: int | str) -> Callable[..., Any]:
    """A layer's forward with a node before it and one behind it."""
    forward = layer.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        given: list[Any] = list(args)
        where: Any = given if isinstance(hidden, int) else kwargs
        where[hidden] = _mark(ENTER, where[hidden], index)
        returned = forward(*given, **kwargs)
        left = _mark(LEAVE, first_of(returned), index)
        return (left, *returned[1:]) if isinstance(returned, tuple) else left

    return run


def _mark(kind: str, x: torch.Tensor, index: int) -> torch.Tensor:
    return operator(f"{DOMAIN}::{kind}", (x,), x, x.shape, layer=index)


def _order_initializers(graph: ir.Graph, names: list[str]) -> None:
    """Parameters in the model's order, as in a graph that was traced whole; the rest behind."""
    order = {f"model.{name}": place for place, name in enumerate(names)}
    values = sorted(graph.initializers.values(), key=lambda v: order.get(v.name or "", len(order)))
    graph.initializers.clear()
    for value in values:
        graph.register_initializer(value)
