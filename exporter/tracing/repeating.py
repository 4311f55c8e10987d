"""A deep model is traced with one layer of each kind, whose nodes are then repeated for the others.

PyTorch takes 0.6 to 0.9 s a layer and op set to trace, decompose and translate. What is repeated is
the graph as it was translated, before any optimizer has seen a weight, so all that depends on
weights is done to the whole graph, as it would be to one that was traced whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor
from torch import nn

from ..quiet import quiet
from . import like_layers, tracing
from .attention import operator
from .families import registered
from .geometry import Geometry
from .layers import Layer
from .like_layers import LikeLayers, UnlikeError, first_of, forwarding

DEEP = 8  # layers; fewer are traced in seconds
_DOMAIN, _ENTER, _LEAVE = "specedge", "Enter", "Leave"  # of the marks around a traced layer


def trace(model: nn.Module, geometry: Geometry, ops: str, layers: list[Layer]) -> ir.Model:
    """Trace a model as a graph with T symbolic, whose initializers share the model's memory."""
    if len(geometry.layers) > DEEP:
        with contextlib.suppress(UnlikeError):
            return _repeated(model, geometry, ops, layers)
    return tracing.trace(model, geometry, ops, layers)


def _repeated(model: nn.Module, geometry: Geometry, ops: str, layers: list[Layer]) -> ir.Model:
    """Trace one layer of each kind and repeat it. Raises UnlikeError where that cannot be."""
    whole = tracing.Traceable(model, geometry.context_length, ops, layers)
    with quiet(), registered(model):
        like = like_layers.find(model, geometry, whole)
    if len(layers) != len(like.layers) or 2 * len(like.kept) > len(like.layers):
        raise UnlikeError(f"{len(like.kept)} kinds of {len(like.layers)} layers")
    few = replace(geometry, layers=tuple(geometry.layers[i] for i in like.kept))

    def complete(graph: ir.Graph) -> None:
        _repeat(graph, like, geometry)
        _order_initializers(graph, like.names)

    with _only(model, like):
        return tracing.trace(model, few, ops, [layers[i] for i in like.kept], complete)


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
        filled = [given[first] for first in like.first]  # a skipped layer leaves its own alone
        return forward(past_key_values=type(past_key_values)(layers=filled), **options)

    return run


def _marked(layer: nn.Module, index: int, hidden: int | str) -> Callable[..., Any]:
    """A layer's forward with a node before it and one behind it."""
    forward = layer.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        given: list[Any] = list(args)
        where: Any = given if isinstance(hidden, int) else kwargs
        where[hidden] = _mark(_ENTER, where[hidden], index)
        returned = forward(*given, **kwargs)
        left = _mark(_LEAVE, first_of(returned), index)
        return (left, *returned[1:]) if isinstance(returned, tuple) else left

    return run


def _mark(kind: str, x: torch.Tensor, index: int) -> torch.Tensor:
    return operator(f"{_DOMAIN}::{kind}", (x,), x, x.shape, layer=index)


@dataclass
class _Block:
    """A traced layer: the nodes that depend on its input, its weights or its cache, and its ends.

    What its nodes need of nothing of its own is made once for all layers, and not among them.
    """

    enter: ir.Node
    leave: ir.Node
    nodes: list[ir.Node] = field(default_factory=list)
    weights: dict[str, ir.Value] = field(default_factory=dict)  # by their names in the layer
    caches: list[ir.Value] = field(default_factory=list)
    after: list[ir.Value] = field(default_factory=list)  # the caches when the layer is done


def _repeat(graph: ir.Graph, like: LikeLayers, geometry: Geometry) -> None:
    """Make a graph of all layers of one that has the first of each kind between marks.

    Its caches are those of the layers that it has. Raises UnlikeError where a layer's nodes are not
    its own; the graph is of no use then.
    """
    blocks = _blocks(graph, like)
    ends: list[tuple[ir.Value, ir.Value]] = []  # each cache as it is given, and when all is done
    given: dict[int, ir.Value] = {}  # what each traced layer gets
    hidden, anchor = _input(blocks[like.kept[0]].enter), blocks[like.kept[0]].leave
    for i, first in enumerate(like.first):
        block = blocks[first]
        values: dict[ir.Value, ir.Value] = {}  # of a copy, by those of the traced layer
        if i == first:
            given[i], anchor = hidden, block.leave
        else:
            values = _values(graph, block, like, i, hidden)
            nodes = [_copy(node, values, i) for node in block.nodes]
            graph.insert_after(anchor, nodes)
            anchor = nodes[-1]
        hidden = values.get(_input(block.leave), _input(block.leave))
        pairs = zip(block.caches, block.after, strict=True)
        ends += [(values.get(a, a), values.get(b, b)) for a, b in pairs]
    _join(graph, blocks, given, hidden)
    graph.inputs[2:], graph.outputs[1:] = [a for a, _ in ends], [b for _, b in ends]
    for name, (before, after) in zip(geometry.cache_names(), ends, strict=True):
        before.name, after.name = name, name.replace("past_key_values", "present")


def _join(
    graph: ir.Graph, blocks: dict[int, _Block], given: dict[int, ir.Value], last: ir.Value
) -> None:
    """Let each traced layer, and what follows the last layer, read the one before; no marks."""
    *_, final = blocks.values()
    final.leave.outputs[0].replace_all_uses_with(last)
    for i, block in blocks.items():
        block.enter.outputs[0].replace_all_uses_with(given[i])
        graph.remove(block.enter, safe=True)
    graph.remove([block.leave for block in blocks.values()], safe=True)


def _input(mark: ir.Node) -> ir.Value:
    assert mark.inputs[0] is not None
    return mark.inputs[0]


def _blocks(graph: ir.Graph, like: LikeLayers) -> dict[int, _Block]:
    """Each traced layer's nodes; UnlikeError if one depends on two layers, or leaves its own."""
    marks = {(n.op_type, n.attributes["layer"].as_int()): n for n in graph if n.domain == _DOMAIN}
    if {*marks} != {(kind, i) for kind in (_ENTER, _LEAVE) for i in like.kept}:
        raise UnlikeError("the marks around the layers are not in the graph")
    found = {i: _Block(marks[_ENTER, i], marks[_LEAVE, i]) for i in like.kept}
    owner: dict[ir.Value, int] = {}
    for place, (i, block) in enumerate(found.items()):
        block.caches = list(graph.inputs[2 + 2 * place : 4 + 2 * place])
        block.after = list(graph.outputs[1 + 2 * place : 3 + 2 * place])
        # Constants that a layer's code makes are the same in all.
        names = {name: f"model.{like.name}.{i}.{name}" for name in like.tensors[i]}
        known = graph.initializers
        block.weights = {name: known[full] for name, full in names.items() if full in known}
        owner |= dict.fromkeys((*block.caches, *block.weights.values()), i)
    for node in graph:
        owners = {owner[x] for x in node.inputs if x in owner}
        if node.domain == _DOMAIN:
            i = node.attributes["layer"].as_int()
            if owners != (set() if node.op_type == _ENTER else {i}):
                raise UnlikeError("a layer reads what is another's")
            if node.op_type == _ENTER:
                owner[node.outputs[0]] = i
        elif len(owners) > 1 or any(
            a.type == ir.AttributeType.GRAPH for a in node.attributes.values()
        ):
            raise UnlikeError("a node depends on two layers, or holds a graph that may")
        elif owners:
            found[(i := owners.pop())].nodes.append(node)
            owner |= dict.fromkeys(node.outputs, i)
    ends = [(value, i) for i, block in found.items() for value in block.after]
    if graph.outputs[0] in owner or any(owner.get(value) != i for value, i in ends):
        raise UnlikeError("an output is not of its layer")
    return found


def _values(
    graph: ir.Graph, block: _Block, like: LikeLayers, index: int, hidden: ir.Value
) -> dict[ir.Value, ir.Value]:
    """What a layer's nodes read in the place of the traced one's: its weights, cache and input."""
    tensors = like.tensors[index]
    values = {block.enter.outputs[0]: hidden}
    for name, value in block.weights.items():
        weight = _like(value, f"model.{like.name}.{index}.{name}")
        weight.const_value = tensor = TorchTensor(tensors[name], name=weight.name)
        if tensor.shape != value.shape or tensor.dtype != value.dtype:
            raise UnlikeError(f"{weight.name} has another shape or type than {value.name}")
        graph.register_initializer(weight)
        values[value] = weight
    for value in block.caches:
        values[value] = _like(value, f"{value.name}.layer{index}")
    return values


def _copy(node: ir.Node, values: dict[ir.Value, ir.Value], index: int) -> ir.Node:
    outputs = [_like(value, f"{value.name}.layer{index}") for value in node.outputs]
    values |= dict(zip(node.outputs, outputs, strict=True))
    return ir.Node(
        node.domain,
        node.op_type,
        [x if x is None else values.get(x, x) for x in node.inputs],
        node.attributes.values(),
        overload=node.overload,
        outputs=outputs,
        version=node.version,
        name=f"{node.name}.layer{index}",
    )


def _like(value: ir.Value, name: str) -> ir.Value:
    # A type of its own: setting a value's dtype changes the type in place.
    return ir.Value(name=name, shape=value.shape, type=copy(value.type))


def _order_initializers(graph: ir.Graph, names: list[str]) -> None:
    """Parameters in the model's order, as in a graph that was traced whole; the rest behind."""
    order = {f"model.{name}": place for place, name in enumerate(names)}
    values = sorted(graph.initializers.values(), key=lambda v: order.get(v.name or "", len(order)))
    graph.initializers.clear()
    for value in values:
        graph.register_initializer(value)
