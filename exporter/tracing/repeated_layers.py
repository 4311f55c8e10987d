"""Graphs of deep models from traces of their first layers.

A model whose layers are of few kinds is traced with the layers in which all kinds have appeared.
Two nodes mark where each of them begins and ends. The nodes in between are copied for each further
layer of that kind, which reads its own weights, found by parameter name, and caches.

Two layers are of one kind if their modules have the same classes, attributes and shapes, their
attention calls are equal, and the model passes the same arguments to them. Models that do not call
their layers one after another, or share weights between them, are traced as a whole.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
import torch.onnx.ops
from torch import nn

from specedge.errors import ExportError

from ..checkpoint.decoder_layers import layer_list, per_layer_values
from .attention import LayerAttention
from .hidden_states import hidden_states_index, join_hidden_states
from .named_weights import register_weight, restore_weights

DOMAIN, BEGIN, END = "specedge", "BeginLayer", "EndLayer"
_SHARED, _AFTER = -1, -2  # owners of values outside of layers
# Fields of every module, and methods that the exporter replaces for all modules of a class.
_IGNORED_FIELDS = frozenset((*vars(nn.Module()), "forward"))
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype)


class NotRepeatableError(Exception):
    """Error of a graph whose layers cannot be separated."""


class LayerCalls:
    """Recorder of the arguments of each layer of a model, while its hooks are registered."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[tuple[nn.Module, Any]] = []
        self._values: list[list[Any]] = []  # kept alive, so that addresses stay unique
        self._inputs: list[Any] = []  # hidden states before and after each call
        self._outputs: list[Any] = []
        try:
            _, self.layers = layer_list(model)
        except (ExportError, AttributeError):
            self.layers = nn.ModuleList()

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record calls while the context lasts."""
        with contextlib.ExitStack() as stack:
            for layer in self.layers:
                hook = layer.register_forward_pre_hook(self._record, with_kwargs=True)
                stack.enter_context(hook)
                stack.enter_context(layer.register_forward_hook(self._record_output))
            yield

    def _record(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = [*args, *(x for pair in sorted(kwargs.items()) for x in pair)]
        position = hidden_states_index(values)
        described = [i if i == position else _describe(x) for i, x in enumerate(values)]
        self.calls.append((layer, (len(args), tuple(described))))
        self._values.append(values)
        self._inputs.append(values[position] if position >= 0 else None)

    def _record_output(self, _: nn.Module, __: Any, output: Any) -> None:
        self._outputs.append(output[0] if isinstance(output, tuple) else output)

    @property
    def are_in_sequence(self) -> bool:
        """True if each layer was called once, with the output of the previous one."""
        pairs = zip(self._outputs, self._inputs[1:], strict=False)
        is_chain = all(output is following for output, following in pairs)
        return is_chain and [layer for layer, _ in self.calls] == list(self.layers)


def find_kinds(
    model: nn.Module, calls: LayerCalls, attention: Sequence[LayerAttention]
) -> tuple[int, ...]:
    """Return the first layer of the kind of each layer; empty if layers cannot be separated."""
    layers = list(calls.layers)
    if not calls.are_in_sequence or len(attention) != len(layers):
        return ()
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    if any(uses[id(p)] > 1 for layer in layers for p in layer.parameters()):
        return ()
    indices = _index_attributes(layers)
    described = [
        (
            _describe_module(layer, indices),
            attention[i],
            calls.calls[i][1],
            per_layer_values(model, i),
        )
        for i, layer in enumerate(layers)
    ]
    return tuple(described.index(description) for description in described)


def _index_attributes(layers: Sequence[nn.Module]) -> set[tuple[str, str]]:
    """Return the attributes, by module and name, that are the index of each layer."""
    candidates: set[tuple[str, str]] | None = None
    for i, layer in enumerate(layers):
        equal = {
            (name, key)
            for name, module in layer.named_modules()
            for key, value in _attributes(module)
            if type(value) is int and value == i
        }
        candidates = equal if candidates is None else candidates & equal
    return candidates or set()


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module that its computation may depend on."""
    return ((key, value) for key, value in vars(module).items() if key not in _IGNORED_FIELDS)


def _describe_module(layer: nn.Module, indices: set[tuple[str, str]]) -> Any:
    """Describe a layer without its index and the values of its weights."""
    modules = [
        (
            name,
            type(module),
            tuple(
                (key, _describe(_unbound(value, module)))
                for key, value in _attributes(module)
                if (name, key) not in indices
            ),
        )
        for name, module in layer.named_modules()
    ]
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    return modules, [(name, t.shape, t.dtype, t.stride()) for name, t in tensors]


def _unbound(value: Any, module: nn.Module) -> Any:
    """Return the function of a module's own method, and other values unchanged."""
    return value.__func__ if getattr(value, "__self__", None) is module else value


def _describe(value: Any) -> Any:
    """Describe an attribute or argument; objects other than numbers and texts by identity."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple | list | set):
        return type(value), tuple(map(_describe, value))
    if isinstance(value, dict):
        return tuple((key, _describe(x)) for key, x in value.items())
    if isinstance(value, functools.partial):
        return tuple(map(_describe, (value.func, value.args, value.keywords)))
    return id(value)


@contextlib.contextmanager
def marked_layers(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Trace a node at the beginning and at the end of each layer while the context lasts."""
    with contextlib.ExitStack() as stack:
        for i, layer in enumerate(layers):
            hook = layer.register_forward_pre_hook(_begin(i), with_kwargs=True)
            stack.enter_context(hook)
            stack.enter_context(layer.register_forward_hook(_end(i)))
        yield


def _begin(index: int) -> Callable[..., Any]:
    def mark(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = [*args, *kwargs.values()]
        at = hidden_states_index(values)
        values[at] = _mark(BEGIN, index, values[at])
        return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))

    return mark


def _end(index: int) -> Callable[..., Any]:
    def mark(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return _mark(END, index, output)
        return (_mark(END, index, output[0]), *output[1:])

    return mark


def _mark(op_type: str, index: int, x: torch.Tensor) -> torch.Tensor:
    return torch.onnx.ops.symbolic(
        f"{DOMAIN}::{op_type}",
        (x,),
        attrs={"layer": index},
        dtype=x.dtype,
        shape=x.shape,
        version=1,
    )


def check_constants(graph: ir.Graph, prefix: str, weights: Mapping[str, ir.Tensor]) -> None:
    """Check that layers have no constants that may be derived from their weights.

    Args:
        graph: Traced graph.
        prefix: Name of the list of layers, before the index in a weight's name.
        weights: Weights and buffers of the whole model, by name.

    Raises:
        NotRepeatableError: A layer has such a constant.
    """
    for name, value in graph.initializers.items():
        assert value.const_value is not None
        is_constant = name.startswith(f"{prefix}.") and name not in weights
        if is_constant and value.const_value.size > 1:
            raise NotRepeatableError(f"a layer has the constant {name}")


class LayerGraph:
    """Optimized graph of the first layers of a model, which is extended by copies of their nodes.

    Args:
        model: Graph with marked layers, whose weights are hidden.
        prefix: Name of the list of layers.
        weights: Weights and buffers of the whole model, by name.
    """

    def __init__(self, model: ir.Model, prefix: str, weights: Mapping[str, ir.Tensor]) -> None:
        self.graph, self.weights, self._prefix = model.graph, weights, f"{prefix}."
        self._nodes: dict[int, list[ir.Node]] = {}
        self._begins: dict[int, ir.Node] = {}
        self._ends: dict[int, ir.Node] = {}
        self._num_layers_with = Counter(map(self._name_in_layer, weights))
        restore_weights(self.graph, weights)

    def repeat(self, kinds: Sequence[int], hidden_layers: Sequence[int] = ()) -> None:
        """Add the layers that were not traced, and remove the marks.

        Args:
            kinds: First layer of the kind of each layer.
            hidden_layers: Layers whose hidden states the graph returns, instead of its second
                output, that of the final norm.

        Raises:
            NotRepeatableError: The nodes of the layers cannot be separated.
        """
        self._assign_nodes()
        num_traced = len(self._begins)
        before = self._ends[num_traced - 1]
        ends = (self._ends[layer] for layer in range(num_traced))
        states = [node.inputs[0] for node in (self._begins[0], *ends)]  # by layer that reads them
        for layer in range(num_traced, len(kinds)):
            states.append(self._copy(kinds[layer], layer, states[-1], before))
        before.outputs[0].replace_all_uses_with(states[-1], replace_graph_outputs=True)
        for mark in (*self._begins.values(), *list(self._ends.values())[:-1]):
            mark.outputs[0].replace_all_uses_with(mark.inputs[0])
        self.graph.remove([*self._begins.values(), *self._ends.values()], safe=True)
        if hidden_layers:
            states.append(self.graph.outputs[1])
            join_hidden_states(self.graph, [states[layer] for layer in hidden_layers])
        self.graph.opset_imports.pop(DOMAIN, None)
        self.graph.sort()

    def _assign_nodes(self) -> None:
        """Find the nodes of each layer: those that depend on its input, weights or caches."""
        owners: dict[ir.Value, int] = {}
        for value in (*self.graph.inputs, *self.graph.initializers.values()):
            owners[value] = self._owner_of_leaf(value)
        for node in self.graph:
            read = {owners[x] for x in node.inputs if x is not None} - {_SHARED}
            owner = read.pop() if read else _SHARED
            if read:
                raise NotRepeatableError(f"{node.op_type} {node.name} reads two layers")
            if node.domain == DOMAIN:
                layer = node.attributes["layer"].as_int()
                marks = self._begins if node.op_type == BEGIN else self._ends
                expected = layer if node.op_type == END else _SHARED if layer == 0 else _AFTER
                follows = (
                    node.op_type == END
                    or not layer
                    or node.inputs[0] is self._ends[layer - 1].outputs[0]
                )
                if owner != expected or not follows or layer in marks:
                    raise NotRepeatableError(f"layer {layer} does not follow the previous one")
                marks[layer] = node
                owner = layer if node.op_type == BEGIN else _AFTER
            elif owner >= 0:
                self._nodes.setdefault(owner, []).append(node)
            owners |= dict.fromkeys(node.outputs, owner)

    def _owner_of_leaf(self, value: ir.Value) -> int:
        start, name = "past_key_values.", value.name or ""
        if self._is_weight(value):
            start = self._prefix
        return (
            int(name.removeprefix(start).partition(".")[0]) if name.startswith(start) else _SHARED
        )

    def _is_weight(self, value: ir.Value) -> bool:
        """Return True for a weight or buffer of a layer that other layers have as well.

        Layers may read values of another, such as T5's position biases.
        """
        name = value.name or ""
        is_in_layer = name.startswith(self._prefix) and name in self.weights
        return is_in_layer and self._num_layers_with[self._name_in_layer(name)] > 1

    def _name_in_layer(self, name: str) -> str:
        """Return a weight's name after the index of its layer; "" for weights outside of layers."""
        return name.removeprefix(self._prefix).partition(".")[2] if self._prefix in name else ""

    def _copy(self, source: int, layer: int, hidden: ir.Value, before: ir.Node) -> ir.Value:
        """Copy a layer's nodes with another layer's weights and caches; return its output."""
        begin, end = self._begins[source].outputs[0], self._ends[source].inputs[0]
        caches = [x for x in self.graph.inputs if self._owner_of_leaf(x) == source]
        written = [x for x in self.graph.outputs if str(x.name).startswith(f"present.{source}.")]
        nodes = self._nodes[source]
        inner = {begin, *caches, *(x for node in nodes for x in node.outputs)}
        read = dict.fromkeys(x for node in nodes for x in node.inputs if x is not None)
        outer = [*caches, *(x for x in read if x not in inner)]
        assert end is not None
        copied = ir.GraphView([begin, *outer], [end, *written], nodes=nodes).clone()
        (first, *inputs), (last, *outputs) = list(copied.inputs), list(copied.outputs)
        nodes = list(copied)
        copied.inputs.clear()
        copied.outputs.clear()
        copied.remove(nodes)
        for node in nodes:
            node.name = f"{node.name}.{layer}"
            for value in node.outputs:
                value.name, value.const_value = f"{value.name}.{layer}", None
        for value in (*inputs, *(x for node in nodes for x in node.outputs)):
            value.type = copy.copy(value.type)  # which may be changed in place
            value.metadata_props.clear()
        for new, old in zip((*inputs, *outputs), (*outer, *written), strict=True):
            if old in caches or old in written or self._is_weight(old):
                new.name = str(old.name).replace(f".{source}.", f".{layer}.", 1)
            if old in caches:
                self.graph.inputs.append(new)
            elif old in written:
                self.graph.outputs.append(new)
            elif self._is_weight(old):
                register_weight(self.graph, new, self.weights)
            else:
                new.replace_all_uses_with(old)
        first.replace_all_uses_with(hidden)
        self.graph.insert_before(before, nodes)
        return last
