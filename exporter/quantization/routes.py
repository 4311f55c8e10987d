"""What has to be divided so that the input of a group of matrices is, where that is exact.

A norm's weights, a matrix by way of products or through attention: constants all of them, which
powers of two divide without rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from . import flows
from .flows import Cache
from .matrices import NORMS, Group, groups, stored_in, vector


@dataclass(frozen=True)
class Vector:
    """An input of a node that is constant along all axes but the last. [size]"""

    node: ir.Node
    index: int


@dataclass(frozen=True)
class Columns:
    """A product with stored weights, each of whose `size` columns can be divided."""

    node: ir.Node


Part = Vector | Columns


@dataclass(frozen=True)
class Route:
    """What a value's channels come from: channel k from number `channels[k]` of every part. [K]

    Each part has `size` numbers. Channels of one number are divided by one power: query heads that
    share a head of v. The `cache` on the way, if there is one, holds divided values.
    """

    parts: tuple[Part, ...]
    size: int
    channels: np.ndarray
    cache: Cache | None = None

    def spread(self, by: np.ndarray) -> np.ndarray:
        """The powers of channels as those of the parts' numbers, of which some may have none.

        [K] -> [size]
        """
        found = np.zeros(self.size)
        found[self.channels] = by
        return found


def shared(
    graphs: Iterable[ir.Graph], apart: Set[int] = frozenset()
) -> dict[tuple[int, ...], np.ndarray]:
    """The groups that have a route in each graph that has them, and its channels, by their keys.

    Weights are shared by all graphs, so that what one divides the others have to divide alike.
    """
    found: dict[tuple[int, ...], Route | None] = {}
    for graph in graphs:
        for group in groups(graph, apart):
            way = route(group)
            known = found.setdefault(group.key, way)
            if way is None or known is None or not np.array_equal(known.channels, way.channels):
                found[group.key] = None
    return {key: way.channels for key, way in found.items() if way is not None}


def route(group: Group) -> Route | None:
    """What has to be divided so that a group's input is; None where that would change more."""
    users = {matrix.node for matrix in group.matrices}
    size = group.matrices[0].stored.numbers().shape[-2]
    if (parts := _parts(group.value, users)) is not None:
        return Route(tuple(parts), size, np.arange(size))
    way = _through_attention(group.value, users)
    return way if way is not None and len(way.channels) == size else None


def _parts(value: ir.Value | None, users: set[ir.Node]) -> list[Part] | None:
    node = value.producer() if value is not None else None
    if value is None or node is None or value.is_graph_output():
        return None
    if {user for user, _ in value.uses()} != users:
        return None
    if node.op_type in NORMS:
        vectors = [i for i in range(1, len(node.inputs)) if node.inputs[i] is not None]
        known = all(vector(node.inputs[i]) is not None for i in vectors)
        return [Vector(node, i) for i in vectors] if known and _last_axis(node) else None
    if node.op_type == "Reshape":
        return _parts(node.inputs[0], {node}) if _keeps_channels(node) else None
    if node.op_type == "MatMul":
        return [Columns(node)] if _width(node) else None
    if node.op_type == "Mul":
        ways = (_factor(node, i) for i in (0, 1))
        return next((way for way in ways if way is not None), None)
    if node.op_type == "Add":
        terms = [_factor(node, i) for i in (0, 1)]
        return None if None in terms else [part for term in terms for part in term or ()]
    return None


def _through_attention(value: ir.Value, users: set[ir.Node]) -> Route | None:
    """The columns of v's matrix, and its bias, if all that reads them are these users."""
    product = flows.origin(value)
    size = _width(product) if product is not None else 0
    if product is None or not size:
        return None
    flow = flows.follow(product, size)
    ours = [end.columns for end in flow.ends if end.node in users]
    others = [end.columns for end in flow.ends if end.node not in users]
    if not ours:
        return None
    channels = ours[0][0, 0]
    if any((columns != channels).any() for columns in ours):
        return None
    if any(np.isin(columns, channels).any() for columns in others):
        return None
    caches = [cache for cache in flow.caches if np.isin(cache.columns, channels).any()]
    if len(caches) != 1:
        return None
    biases = (Vector(node, index) for node, index in flow.biases)
    return Route((Columns(product), *biases), size, channels, caches[0])


def _width(product: ir.Node) -> int:
    """How many columns a product's stored matrix has, if it has one."""
    stored = stored_in(product.inputs[1])
    return stored.numbers().shape[-1] if stored is not None and len(stored.order) == 2 else 0


def _factor(node: ir.Node, index: int) -> list[Part] | None:
    """One input: a constant vector, or a value that can be divided itself."""
    value = node.inputs[index]
    if value is not None and vector(value) is not None:
        return [Vector(node, index)]
    return _parts(value, {node})


def _keeps_channels(node: ir.Node) -> bool:
    """Whether the last axis stays as it is."""
    before, after = node.inputs[0], node.outputs[0]
    if before is None or not before.shape or not after.shape:
        return False
    return isinstance(before.shape[-1], int) and before.shape[-1] == after.shape[-1]


def _last_axis(node: ir.Node) -> bool:
    axis = node.attributes.get("axis")
    return axis is None or axis.as_int() == -1
