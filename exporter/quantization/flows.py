"""Where the columns of a product go in a graph: through shapes, a cache and attention.

Attention is linear in v, so a column of v's product that is divided is a channel of what attention
gives that is divided, and nothing else is, if all that reads the column is on that way. Here
columns are numbers that take the way of the values, [1, T, N] at first, with `ROWS` for T; along T
they are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ..graph.nodes import producer
from .matrices import vector

ROWS = 7  # for any T: nothing that is reshaped to a fixed number of rows has so many


@dataclass(frozen=True)
class End:
    """Where a way ends: a node's input, or with no node the caller; and which columns it reads."""

    node: ir.Node | None
    index: int
    columns: np.ndarray


@dataclass(frozen=True)
class Cache:
    """A cache that columns are written to: the graph's input, and the column of each number.

    [heads, D]
    """

    name: str
    columns: np.ndarray


@dataclass
class Flow:
    """Where a product's columns go: biases that are added to all of them, caches, and ends."""

    ends: list[End] = field(default_factory=list)
    biases: list[tuple[ir.Node, int]] = field(default_factory=list)
    caches: list[Cache] = field(default_factory=list)


def follow(product: ir.Node, num_columns: int) -> Flow:
    """The whole way of a product's columns."""
    flow = Flow()
    waiting = [(product.outputs[0], np.tile(np.arange(num_columns), (1, ROWS, 1)))]
    while waiting:
        value, columns = waiting.pop()
        if value.is_graph_output() and producer(value, "TensorScatter") is None:
            flow.ends.append(End(None, 0, columns))
        for node, index in value.uses():
            _, pass_through = _NODES.get(node.op_type, (0, _ends))
            given = pass_through(node, index, columns, flow)
            if given:
                waiting += zip(node.outputs, given, strict=False)
            else:
                flow.ends.append(End(node, index, columns))
    return flow


def origin(value: ir.Value | None) -> ir.Node | None:
    """The product from which a value may come by such a way."""
    while value is not None and (node := value.producer()) is not None:
        if node.op_type == "MatMul":
            return node
        if node.op_type not in _NODES:
            return None
        index, _ = _NODES[node.op_type]
        is_biased = node.op_type == "Add" and vector(node.inputs[index]) is not None
        value = node.inputs[index + is_biased]
    return None


def _ends(node: ir.Node, index: int, columns: np.ndarray, flow: Flow) -> list[np.ndarray]:
    """Nothing goes through a node that is not known."""
    return []


def _add(node: ir.Node, index: int, columns: np.ndarray, flow: Flow) -> list[np.ndarray]:
    """A bias right behind the product."""
    bias = vector(node.inputs[1 - index])
    if bias is None or producer(node.inputs[index], "MatMul") is None:
        return []
    flow.biases.append((node, 1 - index))
    return [columns]


def _reshape(node: ir.Node, index: int, columns: np.ndarray, flow: Flow) -> list[np.ndarray]:
    dims = _numbers(node, 1)
    if index or dims is None:
        return []
    if "allowzero" not in node.attributes or not node.attributes["allowzero"].as_int():
        dims = [columns.shape[i] if dim == 0 else dim for i, dim in enumerate(dims)]
    known = int(np.prod([dim for dim in dims if dim != -1]))
    fits = columns.size % known == 0 if -1 in dims else columns.size == known
    return [columns.reshape(dims)] if fits else []


def _transpose(node: ir.Node, index: int, columns: np.ndarray, flow: Flow) -> list[np.ndarray]:
    order = node.attributes.get("perm")
    return [columns.transpose(None if order is None else list(order.as_ints()))]


def _split(node: ir.Node, index: int, columns: np.ndarray, flow: Flow) -> list[np.ndarray]:
    axis, count = _axis(node), len(node.outputs)
    sizes = _numbers(node, 1) or [columns.shape[axis] // count] * count
    if index or sum(sizes) != columns.shape[axis]:
        return []
    return np.split(columns, np.cumsum(sizes)[:-1], axis)


def _slice(node: ir.Node, index: int, columns: np.ndarray, flow: Flow) -> list[np.ndarray]:
    """Some of the columns, or some of the rows, which are all alike."""
    bounds = [_numbers(node, i) for i in range(1, 5)]
    if index or any(part is None or len(part) != 1 for part in bounds):
        return []
    start, end, axis, step = (part[0] for part in bounds if part)
    if _are_rows(columns, axis):
        return [columns]
    chosen = [slice(None)] * columns.ndim
    chosen[axis] = slice(start, end, step)
    return [columns[tuple(chosen)]]


def _gather(node: ir.Node, index: int, columns: np.ndarray, flow: Flow) -> list[np.ndarray]:
    """A part of the columns, or any rows in a list."""
    axis, at = _axis(node), node.inputs[1]
    if index or at is None or at.shape is None:
        return []
    if _are_rows(columns, axis):
        return [columns] if len(at.shape) == 1 else []
    return [] if at.const_value is None else [columns.take(at.const_value.numpy(), axis)]


def _scatter(node: ir.Node, index: int, columns: np.ndarray, flow: Flow) -> list[np.ndarray]:
    """Rows written to a cache that nothing else reads before."""
    cache = _cache(node.inputs[0], node.outputs[0])
    if index != 1 or cache is None or columns.ndim != 4 or not _are_rows(columns, 2):
        return []
    flow.caches.append(Cache(cache, columns[0, :, 0]))
    return [columns]


def _attention(node: ir.Node, index: int, columns: np.ndarray, flow: Flow) -> list[np.ndarray]:
    """v of a cache, [1, G, S, D] -> [1, H, T, D]"""
    shape = node.inputs[0].shape if node.inputs[0] is not None else None
    if index != 2 or producer(node.inputs[2], "TensorScatter") is None or shape is None:
        return []
    heads = shape[1]
    assert isinstance(heads, int)
    return [columns.repeat(heads // columns.shape[1], 1)]


def _grouped(node: ir.Node, index: int, columns: np.ndarray, flow: Flow) -> list[np.ndarray]:
    """v that the node writes to its cache itself, [1, T, G * D] -> [1, T, H * D]"""
    cache, written = _cache(node.inputs[4], node.outputs[2]), node.outputs[2]
    if index != 2 or cache is None or columns.ndim != 3 or not _are_rows(columns, 1):
        return []
    if written.uses():
        return []
    heads, shared = (node.attributes[name].as_int() for name in ("num_heads", "kv_num_heads"))
    each = columns.reshape(1, ROWS, shared, -1)
    flow.caches.append(Cache(cache, each[0, 0]))
    return [each.repeat(heads // shared, 2).reshape(1, ROWS, -1)]


def _cache(before: ir.Value | None, after: ir.Value) -> str | None:
    """The name of a cache that one node reads as it was, and the caller gets as it is."""
    if before is None or not before.is_graph_input() or not after.is_graph_output():
        return None
    return before.name if len(before.uses()) == 1 else None


def _are_rows(columns: np.ndarray, axis: int) -> bool:
    """Whether an axis is that of tokens, whose columns are all alike."""
    return columns.shape[axis] == ROWS and bool((columns == columns.take([0], axis)).all())


def _axis(node: ir.Node) -> int:
    axis = node.attributes.get("axis")
    return 0 if axis is None else axis.as_int()


def _numbers(node: ir.Node, index: int) -> list[int] | None:
    """A node's constant input."""
    value = node.inputs[index] if index < len(node.inputs) else None
    if value is None or value.const_value is None:
        return None
    return [int(number) for number in value.const_value.numpy().reshape(-1)]


_Pass = Callable[[ir.Node, int, np.ndarray, Flow], list[np.ndarray]]
# What columns go through, by which input, and what comes out.
_NODES: dict[str, tuple[int, _Pass]] = {
    "Add": (0, _add),
    "Reshape": (0, _reshape),
    "Transpose": (0, _transpose),
    "Split": (0, _split),
    "Slice": (0, _slice),
    "Gather": (0, _gather),
    "TensorScatter": (1, _scatter),
    "Attention": (2, _attention),
    "GroupQueryAttention": (2, _grouped),
}
