"""Mistakes of an exporter, each planted into a traced graph; those that it cannot have change none.

Every fault is a function of the graph of either graph variant.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from specedge.exporter.graph.nodes import add_constant, insert_node

DIFFERS = (
    r"^target: (logits|(present\.\d+\.|Attention|Group)\S* (\S+ )?head \d+) at position \d+ differs"
)
Fault = Callable[[ir.Graph], None]


def attention_nodes(graph: ir.Graph) -> list[ir.Node]:
    return [n for n in graph if n.op_type in ("Attention", "GroupQueryAttention")]


def set_attribute(node: ir.Node, name: str, change: Callable[[Any], Any]) -> None:
    attribute = node.attributes[name]
    kind = ir.AttrFloat32 if attribute.type == ir.AttributeType.FLOAT else ir.AttrInt64
    node.attributes[name] = kind(name, change(attribute.value))


def insert_before(
    graph: ir.Graph,
    node: ir.Node,
    index: int,
    op_type: str,
    array: np.ndarray,
    **attributes: Any,
) -> None:
    """Put an operator with a constant between a node and one of its inputs."""
    name, source = f"{node.name}.fault", node.inputs[index]
    inputs = [source, add_constant(graph, array, name)]
    node.replace_input_with(
        index, insert_node(node, op_type, inputs, f"{name}.output", source, **attributes)
    )


def add_before(graph: ir.Graph, node: ir.Node, index: int, amount: int) -> None:
    dtype = node.inputs[index].dtype.numpy()
    insert_before(graph, node, index, "Add", np.full([1], amount, dtype))


def wrong_scale(graph: ir.Graph, factor: float = 1.001) -> None:
    for node in attention_nodes(graph):
        set_attribute(node, "scale", lambda scale: factor * scale)


def wrong_scale_of_one_layer(graph: ir.Graph) -> None:
    nodes = attention_nodes(graph)
    for node in nodes[len(nodes) // 2 :][:1]:
        set_attribute(node, "scale", lambda scale: 1.001 * scale)


def missing_softcap(graph: ir.Graph) -> None:
    for node in attention_nodes(graph):
        node.attributes.pop("softcap", None)


def missing_softcap_of_logits(graph: ir.Graph) -> None:
    """tanh(logits / softcap) softcap without the tanh."""
    last = graph.outputs[0].producer()
    before = last.inputs[0].producer()
    if before is not None and before.op_type == "Tanh":
        last.replace_input_with(0, before.inputs[0])


def window_off_by_one(graph: ir.Graph) -> None:
    """The mask's one window constant, or the node's own."""
    for node in attention_nodes(graph):
        if "local_window_size" in node.attributes:
            set_attribute(node, "local_window_size", lambda size: size + 1 if size > 0 else size)
    for node in [n for n in graph if n.op_type == "Greater"]:
        add_before(graph, node, 0, 1)


def position_off_by_one(graph: ir.Graph) -> None:
    for node in [node for node in graph if node.op_type == "Clip"][:1]:  # ALiBi has none
        add_before(graph, node, 0, 1)


def swapped_heads(graph: ir.Graph, layer: int = 0) -> None:
    """A layer's key heads move on by one place."""
    name = f"past_key_values.{layer}.key"
    node = next(n for n in graph if any(x is not None and x.name == name for x in n.inputs))
    cache = node.inputs[0 if node.op_type == "TensorScatter" else 3]
    heads, size = cache.shape[1], cache.shape[3]
    if heads == 1:
        return
    if node.op_type == "TensorScatter":
        insert_before(graph, node, 1, "Gather", np.roll(np.arange(heads), 1), axis=1)
    else:
        columns = np.roll(np.arange(heads * size), size)
        insert_before(graph, node, 1, "Gather", columns, axis=2)


def stale_row(graph: ir.Graph) -> None:
    """Each query sees one row too many: stale, until it is overwritten."""
    for node in [n for n in graph if n.op_type == "LessOrEqual"]:
        add_before(graph, node, 1, 1)
    grouped = [n for n in attention_nodes(graph) if n.op_type == "GroupQueryAttention"]
    for cast in dict.fromkeys(node.inputs[5].producer() for node in grouped):
        last = cast.inputs[0].producer()  # of the row that a traced graph duplicates, until removed
        add_before(graph, last if last.op_type == "Add" else cast, 0, 1)


def wrong_epsilon(graph: ir.Graph) -> None:
    """Multiply the epsilon by ten, such as 1e-5 for 1e-6."""
    for node in _norms(graph):
        set_attribute(node, "epsilon", lambda epsilon: 10 * epsilon)


def wrong_epsilon_of_one_norm(graph: ir.Graph) -> None:
    norms = _norms(graph)
    for node in norms[len(norms) // 2 :][:1]:
        set_attribute(node, "epsilon", lambda epsilon: 10 * epsilon)


def _norms(graph: ir.Graph) -> list[ir.Node]:
    return [node for node in graph if "epsilon" in node.attributes]


def dropped_bias(graph: ir.Graph, part: str) -> None:
    """The last layer's bias of queries, keys or values is zero."""
    found = [
        (node, i)
        for node in graph
        for i, value in enumerate(node.inputs)
        if value is not None and str(value.name).endswith(f".{part}_proj.bias")
    ]
    for node, i in found[-1:]:
        zeros = np.zeros_like(node.inputs[i].const_value.numpy())
        node.replace_input_with(i, add_constant(graph, zeros, f"{node.name}.fault"))


def scaled_matrix(graph: ir.Graph) -> None:
    """Scale the feed-forward output of one layer by 1.001."""
    nodes = _feed_forward(graph)
    for node in nodes[len(nodes) // 2 :][:1]:
        insert_before(graph, node, 0, "Mul", np.array([1.001], np.float32))


def swapped_layers(graph: ir.Graph) -> None:
    """Two layers' feed-forward parts write with each other's matrix."""
    nodes = _feed_forward(graph)
    if len(nodes) > 1:
        first, last = nodes[0], nodes[-1]
        one, other = first.inputs[1], last.inputs[1]
        first.replace_input_with(1, other)
        last.replace_input_with(1, one)


def _feed_forward(graph: ir.Graph) -> list[ir.Node]:
    """The products that reduce most, one a layer; the first of all reads the residual."""
    matrices = [(n, n.inputs[1].const_value) for n in graph if n.op_type in ("MatMul", "Gemm")]
    products = [(m.shape[0], n) for n, m in matrices if m is not None and len(m.shape) == 2]
    widths = [width for width, _ in products]
    return [node for width, node in products if width == max(widths) > widths[0]]


FAULTS: dict[str, Fault] = {
    "scale off by 1%": partial(wrong_scale, factor=1.01),
    "scale off by 0.1%": wrong_scale,
    "scale of one layer off by 0.1%": wrong_scale_of_one_layer,
    "shifted position": position_off_by_one,
    "swapped heads": swapped_heads,
    "missing softcap": missing_softcap,
    "missing softcap of the logits": missing_softcap_of_logits,
    "window off by one": window_off_by_one,
    "epsilon tenfold": wrong_epsilon,
    "epsilon of one norm tenfold": wrong_epsilon_of_one_norm,
    "no bias of queries": partial(dropped_bias, part="q"),
    "no bias of keys": partial(dropped_bias, part="k"),
    "no bias of values": partial(dropped_bias, part="v"),
    "stale row": stale_row,
    "feed-forward matrix off by 0.1%": scaled_matrix,
    "two layers' matrices swapped": swapped_layers,
}
