"""The nodes of a traced layer, repeated for the layers that are like it."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor

from .geometry import Geometry
from .like_layers import LikeLayers, UnlikeError

GRAPH = ir.AttributeType.GRAPH
DOMAIN, ENTER, LEAVE = "specedge", "Enter", "Leave"  # of the marks around a traced layer


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


def repeat(graph: ir.Graph, like: LikeLayers, geometry: Geometry) -> None:
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
    marks = {(n.op_type, n.attributes["layer"].as_int()): n for n in graph if n.domain == DOMAIN}
    if {*marks} != {(kind, i) for kind in (ENTER, LEAVE) for i in like.kept}:
        raise UnlikeError("the marks around the layers are not in the graph")
    found = {i: _Block(marks[ENTER, i], marks[LEAVE, i]) for i in like.kept}
    owner: dict[ir.Value, int] = {}
    for place, (i, block) in enumerate(found.items()):
        block.caches = list(graph.inputs[2 + 2 * place : 4 + 2 * place])
        block.after = list(graph.outputs[1 + 2 * place : 3 + 2 * place])
        block.weights = _weights(graph, like, i)
        owner |= dict.fromkeys((*block.caches, *block.weights.values()), i)
    for node in graph:
        owners = {owner[x] for x in node.inputs if x in owner}
        if node.domain == DOMAIN:
            i = node.attributes["layer"].as_int()
            if owners != (set() if node.op_type == ENTER else {i}):
                raise UnlikeError("a layer reads what is another's")
            if node.op_type == ENTER:
                owner[node.outputs[0]] = i
        elif len(owners) > 1 or any(a.type == GRAPH for a in node.attributes.values()):
            raise UnlikeError("a node depends on two layers, or holds a graph that may")
        elif owners:
            found[(i := owners.pop())].nodes.append(node)
            owner |= dict.fromkeys(node.outputs, i)
    ends = [(value, i) for i, block in found.items() for value in block.after]
    if graph.outputs[0] in owner or any(owner.get(value) != i for value, i in ends):
        raise UnlikeError("an output is not of its layer")
    return found


def _weights(graph: ir.Graph, like: LikeLayers, index: int) -> dict[str, ir.Value]:
    """A layer's parameters and buffers; constants that its code makes are the same in all."""
    names = {name: f"model.{like.name}.{index}.{name}" for name in like.tensors[index]}
    known = graph.initializers
    return {name: known[full] for name, full in names.items() if full in known}


def _values(
    graph: ir.Graph, block: _Block, like: LikeLayers, index: int, hidden: ir.Value
) -> dict[ir.Value, ir.Value]:
    """What a layer's nodes read in the place of the traced one's: its weights, cache and input."""
    tensors = like.tensors[index]
    values = {block.enter.outputs[0]: hidden}
    for name, value in block.weights.items():
        values[value] = _weight(graph, f"model.{like.name}.{index}.{name}", value, tensors[name])
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


def _weight(graph: ir.Graph, name: str, like: ir.Value, tensor: torch.Tensor) -> ir.Value:
    value = _like(like, name)
    value.const_value = TorchTensor(tensor, name=name)
    if value.const_value.shape != like.shape or value.const_value.dtype != like.dtype:
        raise UnlikeError(f"{name} has another shape or type than {like.name}")
    graph.register_initializer(value)
    return value


def _like(value: ir.Value, name: str) -> ir.Value:
    return ir.Value(name=name, shape=value.shape, type=value.type)
