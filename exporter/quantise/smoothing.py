"""Moving a channel's size out of a product's input and into its weights, where that is exact.

SmoothQuant (Xiao et al. 2023): x W = (x / p)(p W) for one p a channel. Here p are powers of two, so
that in floating point nothing is rounded: the graph before integers keeps its bits. x / p costs
nothing where x comes from a norm, or from another matrix by way of products: their constants are
divided.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..graph.nodes import constant
from .matrices import NORMS, Group, contents, stored_in

_MOST = 12  # the largest power


@dataclass(frozen=True)
class Vector:
    """An input of a node that is constant along all axes but the last. [K]"""

    node: ir.Node
    index: int


@dataclass(frozen=True)
class Columns:
    """A product with stored weights, each of whose columns can be divided."""

    node: ir.Node


Route = list[Vector | Columns]


def route(group: Group) -> Route | None:
    """What has to be divided so that a group's input is; None where that would change more."""
    return _route(group.value, {matrix.node for matrix in group.matrices})


def _route(value: ir.Value | None, users: set[ir.Node]) -> Route | None:
    node = value.producer() if value is not None else None
    if value is None or node is None or value.is_graph_output():
        return None
    if {user for user, _ in value.uses()} != users:
        return None
    if node.op_type in NORMS:
        vectors = [i for i in range(1, len(node.inputs)) if node.inputs[i] is not None]
        return [Vector(node, i) for i in vectors] if _last_axis(node) else None
    if node.op_type == "MatMul":
        stored = stored_in(node.inputs[1])
        return [Columns(node)] if stored is not None and len(stored.order) == 2 else None
    if node.op_type == "Mul":
        ways = (_factor(node, i) for i in (0, 1))
        return next((way for way in ways if way is not None), None)
    if node.op_type == "Add":
        terms = [_factor(node, i) for i in (0, 1)]
        return None if None in terms else [part for term in terms for part in term or ()]
    return None


def _factor(node: ir.Node, index: int) -> Route | None:
    """One input: a constant vector, or a value that can be divided itself."""
    value = node.inputs[index]
    if value is not None and _vector(value) is not None:
        return [Vector(node, index)]
    return _route(value, {node})


def _last_axis(node: ir.Node) -> bool:
    axis = node.attributes.get("axis")
    return axis is None or axis.as_int() == -1


def _vector(value: ir.Value) -> np.ndarray | None:
    """A constant's numbers, if it has one axis that is longer than 1: the last."""
    stored = stored_in(value)
    if stored is not None:
        array = contents(stored.tensor).float().numpy()
    elif value.const_value is not None:
        array = value.const_value.numpy()
    else:
        return None
    is_vector = array.ndim > 0 and array.size == array.shape[-1] > 1
    return array if array.dtype == np.float32 and is_vector else None


def powers(x: np.ndarray, weights: np.ndarray, strength: float) -> np.ndarray:
    """The power of two of each channel: of its size to `strength`, over that of its weights to the
    rest. [n, K], the largest of each row [K] -> [K]
    """
    sizes = np.maximum(np.abs(x).max(0), 1e-5) ** strength
    sizes = sizes / np.maximum(weights, 1e-5) ** (1 - strength)
    found = np.rint(np.log2(sizes / np.exp2(np.median(np.log2(sizes)))))
    return np.clip(found, -_MOST, _MOST)


def divide(graph: ir.Graph, way: Route, by: np.ndarray) -> dict[ir.Node, np.ndarray]:
    """Divide what lies on a route by 2 ** by; what is left to do with the columns of matrices."""
    left: dict[ir.Node, np.ndarray] = {}
    for part in way:
        if isinstance(part, Columns):
            left[part.node] = -by
            continue
        value = part.node.inputs[part.index]
        assert value is not None
        array = _vector(value)
        assert array is not None
        name = f"{part.node.outputs[0].name}.smooth{part.index}"
        divided = constant(graph, (array * np.exp2(-by)).astype(np.float32), name)
        part.node.replace_input_with(part.index, divided)
    return left
