"""Data flow of a product's columns through nodes that move values without changing them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ..graph.nodes import GqaInput, operand, producer
from .matrices import constant_vector

NUM_ROWS = 7  # stands for T; unlikely in a constant shape


@dataclass(frozen=True)
class FlowEnd:
    """Last reader of columns: a node's input, or the caller if `node` is None."""

    node: ir.Node | None
    index: int
    columns: np.ndarray


@dataclass(frozen=True)
class FlowCache:
    """Cache that columns are written to: input name, and the column of each value, [heads, D]."""

    name: str
    columns: np.ndarray


@dataclass
class ColumnFlow:
    """Destinations of a product's columns: biases that are added, caches, and ends."""

    ends: list[FlowEnd] = field(default_factory=list)
    biases: list[tuple[ir.Node, int]] = field(default_factory=list)
    caches: list[FlowCache] = field(default_factory=list)


def follow_columns(product: ir.Node, num_columns: int) -> ColumnFlow:
    """Follow all columns of a product."""
    flow = ColumnFlow()
    pending = [(product.outputs[0], np.tile(np.arange(num_columns), (1, NUM_ROWS, 1)))]
    while pending:
        value, columns = pending.pop()
        if value.is_graph_output() and producer(value, "TensorScatter") is None:
            flow.ends.append(FlowEnd(None, 0, columns))
        for node, index in value.uses():
            _, pass_through = _TRANSFER_FUNCTIONS.get(node.op_type, (0, _stop))
            outputs = pass_through(node, index, columns, flow)
            if outputs:
                pending += zip(node.outputs, outputs, strict=False)
            else:
                flow.ends.append(FlowEnd(node, index, columns))
    return flow


def producing_product(value: ir.Value | None) -> ir.Node | None:
    """Return the product whose columns a value may consist of; None if there is none."""
    while value is not None and (node := value.producer()) is not None:
        if node.op_type == "MatMul":
            return node
        if node.op_type not in _TRANSFER_FUNCTIONS:
            return None
        index, _ = _TRANSFER_FUNCTIONS[node.op_type]
        is_biased = node.op_type == "Add" and constant_vector(node.inputs[index]) is not None
        value = node.inputs[index + is_biased]
    return None


def _stop(node: ir.Node, index: int, columns: np.ndarray, flow: ColumnFlow) -> list[np.ndarray]:
    """End the flow at an unsupported node."""
    return []


def _add(node: ir.Node, index: int, columns: np.ndarray, flow: ColumnFlow) -> list[np.ndarray]:
    """Follow columns through a bias after the product."""
    bias = constant_vector(node.inputs[1 - index])
    if bias is None or producer(node.inputs[index], "MatMul") is None:
        return []
    flow.biases.append((node, 1 - index))
    return [columns]


def _reshape(node: ir.Node, index: int, columns: np.ndarray, flow: ColumnFlow) -> list[np.ndarray]:
    dims = _numbers(node, 1)
    if index or dims is None:
        return []
    if "allowzero" not in node.attributes or not node.attributes["allowzero"].as_int():
        dims = [columns.shape[i] if dim == 0 else dim for i, dim in enumerate(dims)]
    num_known = int(np.prod([dim for dim in dims if dim != -1]))
    fits = columns.size % num_known == 0 if -1 in dims else columns.size == num_known
    return [columns.reshape(dims)] if fits else []


def _transpose(
    node: ir.Node, index: int, columns: np.ndarray, flow: ColumnFlow
) -> list[np.ndarray]:
    order = node.attributes.get("perm")
    return [columns.transpose(None if order is None else list(order.as_ints()))]


def _split(node: ir.Node, index: int, columns: np.ndarray, flow: ColumnFlow) -> list[np.ndarray]:
    axis, count = _axis(node), len(node.outputs)
    sizes = _numbers(node, 1) or [columns.shape[axis] // count] * count
    if index or sum(sizes) != columns.shape[axis]:
        return []
    return np.split(columns, np.cumsum(sizes)[:-1], axis)


def _slice(node: ir.Node, index: int, columns: np.ndarray, flow: ColumnFlow) -> list[np.ndarray]:
    """Follow columns through a slice of columns, or of rows, whose columns are equal."""
    bounds = [_numbers(node, i) for i in range(1, 5)]
    if index or any(part is None or len(part) != 1 for part in bounds):
        return []
    start, end, axis, step = (part[0] for part in bounds if part)
    if _are_rows(columns, axis):
        return [columns]
    chosen = [slice(None)] * columns.ndim
    chosen[axis] = slice(start, end, step)
    return [columns[tuple(chosen)]]


def _gather(node: ir.Node, index: int, columns: np.ndarray, flow: ColumnFlow) -> list[np.ndarray]:
    """Follow columns through a selection of columns, or of any rows."""
    axis, at = _axis(node), node.inputs[1]
    if index or at is None or at.shape is None:
        return []
    if _are_rows(columns, axis):
        return [columns] if len(at.shape) == 1 else []
    return [] if at.const_value is None else [columns.take(at.const_value.numpy(), axis)]


def _scatter(node: ir.Node, index: int, columns: np.ndarray, flow: ColumnFlow) -> list[np.ndarray]:
    """Follow columns into a cache that no other node reads before."""
    cache = _cache(node.inputs[0], node.outputs[0])
    if index != 1 or cache is None or columns.ndim != 4 or not _are_rows(columns, 2):
        return []
    flow.caches.append(FlowCache(cache, columns[0, :, 0]))
    return [columns]


def _attention(
    node: ir.Node, index: int, columns: np.ndarray, flow: ColumnFlow
) -> list[np.ndarray]:
    """Follow v of a cache through attention. [1, G, S, D] -> [1, H, T, D]"""
    query = operand(node, 0)
    if index != 2 or producer(node.inputs[2], "TensorScatter") is None or query.shape is None:
        return []
    heads = query.shape[1]
    assert isinstance(heads, int)
    return [columns.repeat(heads // columns.shape[1], 1)]


def _grouped(node: ir.Node, index: int, columns: np.ndarray, flow: ColumnFlow) -> list[np.ndarray]:
    """Follow v into GroupQueryAttention's own cache. [1, T, G * D] -> [1, T, H * D]"""
    cache, written = _cache(GqaInput.PAST_VALUE.of(node), node.outputs[2]), node.outputs[2]
    if index != GqaInput.VALUE or cache is None or columns.ndim != 3 or not _are_rows(columns, 1):
        return []
    if written.uses():
        return []
    heads, shared = (node.attributes[name].as_int() for name in ("num_heads", "kv_num_heads"))
    each = columns.reshape(1, NUM_ROWS, shared, -1)
    flow.caches.append(FlowCache(cache, each[0, 0]))
    return [each.repeat(heads // shared, 2).reshape(1, NUM_ROWS, -1)]


def _cache(before: ir.Value | None, after: ir.Value) -> str | None:
    """Return the name of a cache that only one node reads, and that is a graph output."""
    if before is None or not before.is_graph_input() or not after.is_graph_output():
        return None
    return before.name if len(before.uses()) == 1 else None


def _are_rows(columns: np.ndarray, axis: int) -> bool:
    """Return True if an axis is that of tokens, along which column numbers are constant."""
    return columns.shape[axis] == NUM_ROWS and bool((columns == columns.take([0], axis)).all())


def _axis(node: ir.Node) -> int:
    axis = node.attributes.get("axis")
    return 0 if axis is None else axis.as_int()


def _numbers(node: ir.Node, index: int) -> list[int] | None:
    """Return a node's constant input."""
    value = node.inputs[index] if index < len(node.inputs) else None
    if value is None or value.const_value is None:
        return None
    return [int(number) for number in value.const_value.numpy().reshape(-1)]


_Transfer = Callable[[ir.Node, int, np.ndarray, ColumnFlow], list[np.ndarray]]
# Operators that columns pass through: index of the input, and the columns of the outputs.
_TRANSFER_FUNCTIONS: dict[str, tuple[int, _Transfer]] = {
    "Add": (0, _add),
    "Reshape": (0, _reshape),
    "Transpose": (0, _transpose),
    "Split": (0, _split),
    "Slice": (0, _slice),
    "Gather": (0, _gather),
    "TensorScatter": (1, _scatter),
    "Attention": (2, _attention),
    "GroupQueryAttention": (GqaInput.VALUE, _grouped),
}
