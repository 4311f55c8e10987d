"""SmoothQuant (Xiao et al. 2023): scales of input channels moved into the weights.

x W = (x / s) (s W) with a scale s per channel. Scales are powers of two, so that float results are
bitwise identical, and x / s has no cost: constants on the path to x are divided.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..graph.nodes import add_constant
from . import column_flow
from .column_flow import FlowCache
from .matrices import NORMS, MatrixGroup, constant_vector, matrix_groups, stored_tensor

_MAX_EXPONENT = 12


@dataclass(frozen=True)
class ScalableFactor:
    """Constant input of a node: the matrix of a product, or a vector along the last axis. [size]"""

    node: ir.Node
    index: int


@dataclass(frozen=True)
class SmoothingPath:
    """Constants that determine the scale of each channel of a value.

    Attributes:
        parts: Constants, of `size` elements each.
        size: Number of their elements.
        channels: Element that scales each channel, [K]; query heads share those of a value head.
        cache: Cache on the path, which contains scaled values.
    """

    parts: tuple[ScalableFactor, ...]
    size: int
    channels: np.ndarray
    cache: FlowCache | None = None

    def spread(self, exponents: np.ndarray) -> np.ndarray:
        """Return the exponent of each element, 0 for unused ones. [K] -> [size]"""
        spread_exponents = np.zeros(self.size)
        spread_exponents[self.channels] = exponents
        return spread_exponents


def shared_channels(
    graphs: Iterable[ir.Graph], excluded: Set[int] = frozenset()
) -> dict[tuple[int, ...], np.ndarray]:
    """Return the channels of groups that have the same path in each graph, by key.

    Graphs share their weights, so that all must have the same scales.
    """
    paths: dict[tuple[int, ...], SmoothingPath | None] = {}
    for graph in graphs:
        for group in matrix_groups(graph, excluded):
            path_here = smoothing_path(group)
            path = paths.setdefault(group.key, path_here)
            if (
                path_here is None
                or path is None
                or not np.array_equal(path.channels, path_here.channels)
            ):
                paths[group.key] = None
    return {key: path_here.channels for key, path_here in paths.items() if path_here is not None}


def smoothing_path(group: MatrixGroup) -> SmoothingPath | None:
    """Return the path of a group's input; None if scaling it would change other values."""
    users = {matrix.node for matrix in group.matrices}
    size = group.matrices[0].stored.shape[-2]
    if (parts := _scalable_factors(group.value, users)) is not None:
        return SmoothingPath(tuple(parts), size, np.arange(size))
    path = _through_attention(group.value, users)
    return path if path is not None and len(path.channels) == size else None


def _scalable_factors(value: ir.Value | None, users: set[ir.Node]) -> list[ScalableFactor] | None:
    node = value.producer() if value is not None else None
    if value is None or node is None or value.is_graph_output():
        return None
    if {user for user, _ in value.uses()} != users:
        return None
    if node.op_type in NORMS:
        vectors = [i for i in range(1, len(node.inputs)) if node.inputs[i] is not None]
        are_constant = all(constant_vector(node.inputs[i]) is not None for i in vectors)
        factors = [ScalableFactor(node, i) for i in vectors]
        return factors if are_constant and _last_axis(node) else None
    if node.op_type == "Reshape":
        return _scalable_factors(node.inputs[0], {node}) if _keeps_channels(node) else None
    if node.op_type == "MatMul":
        return [ScalableFactor(node, 1)] if _num_columns(node) else None
    if node.op_type == "Mul":
        candidates = (_scalable_input(node, i) for i in (0, 1))
        return next((candidate for candidate in candidates if candidate is not None), None)
    if node.op_type == "Add":
        terms = [_scalable_input(node, i) for i in (0, 1)]
        return None if None in terms else [part for term in terms for part in term or ()]
    return None


def _through_attention(value: ir.Value, users: set[ir.Node]) -> SmoothingPath | None:
    """Return the path through attention to the value projection, if only `users` read it."""
    product = column_flow.producing_product(value)
    size = _num_columns(product) if product is not None else 0
    if product is None or not size:
        return None
    flow = column_flow.follow_columns(product, size)
    own_columns = [end.columns for end in flow.ends if end.node in users]
    other_columns = [end.columns for end in flow.ends if end.node not in users]
    if not own_columns:
        return None
    channels = own_columns[0][0, 0]
    if any((columns != channels).any() for columns in own_columns):
        return None
    if any(np.isin(columns, channels).any() for columns in other_columns):
        return None
    caches = [cache for cache in flow.caches if np.isin(cache.columns, channels).any()]
    if len(caches) != 1:
        return None
    factors = (ScalableFactor(*factor) for factor in ((product, 1), *flow.biases))
    return SmoothingPath(tuple(factors), size, channels, caches[0])


def _num_columns(product: ir.Node) -> int:
    """Return the number of columns of a product's stored matrix, 0 without one."""
    stored = stored_tensor(product.inputs[1])
    return stored.shape[-1] if stored is not None and len(stored.order) == 2 else 0


def _scalable_input(node: ir.Node, index: int) -> list[ScalableFactor] | None:
    """Return the scalable constants that determine one input of a node."""
    value = node.inputs[index]
    if value is not None and constant_vector(value) is not None:
        return [ScalableFactor(node, index)]
    return _scalable_factors(value, {node})


def _keeps_channels(node: ir.Node) -> bool:
    """Return True if a node keeps the last axis."""
    before, after = node.inputs[0], node.outputs[0]
    if before is None or not before.shape or not after.shape:
        return False
    return isinstance(before.shape[-1], int) and before.shape[-1] == after.shape[-1]


def _last_axis(node: ir.Node) -> bool:
    axis = node.attributes.get("axis")
    return axis is None or axis.as_int() == -1


def smoothing_exponents(
    largest: np.ndarray, weights: np.ndarray, strength: float, channels: np.ndarray
) -> np.ndarray:
    """Return the base-2 exponent of each channel's scale. -> [K]

    Args:
        largest: Largest value of each channel, [K].
        weights: Largest value of each row of the weights, [K].
        strength: SmoothQuant's alpha.
        channels: Index of each channel's scale, [K].
    """
    sizes = np.maximum(_shared_maximum(largest, channels), 1e-5) ** strength
    sizes = sizes / np.maximum(_shared_maximum(weights, channels), 1e-5) ** (1 - strength)
    exponents = np.rint(np.log2(sizes / np.exp2(np.median(np.log2(sizes)))))
    return np.clip(exponents, -_MAX_EXPONENT, _MAX_EXPONENT)


def _shared_maximum(sizes: np.ndarray, channels: np.ndarray) -> np.ndarray:
    """Return the maximum over channels that share a scale. [K] -> [K]"""
    maxima = np.zeros(channels.max() + 1, sizes.dtype)
    np.maximum.at(maxima, channels, sizes)
    return maxima[channels]


def apply_smoothing(
    graph: ir.Graph, path: SmoothingPath, exponents: np.ndarray
) -> dict[ir.Node, np.ndarray]:
    """Divide constants on a path by 2 ** exponents; return the exponents of products' columns."""
    column_exponents: dict[ir.Node, np.ndarray] = {}
    spread = path.spread(exponents)
    for part in path.parts:
        if part.node.op_type == "MatMul":
            column_exponents[part.node] = -spread
            continue
        array = constant_vector(part.node.inputs[part.index])
        assert array is not None
        name = f"{part.node.outputs[0].name}.smooth{part.index}"
        divided = add_constant(graph, (array * np.exp2(-spread)).astype(np.float32), name)
        part.node.replace_input_with(part.index, divided)
    return column_exponents


def cache_factors(
    graph: ir.Graph, exponents_by_key: Mapping[tuple[int, ...], np.ndarray | None]
) -> dict[str, np.ndarray]:
    """Return factors [heads, 1, D] that undo the smoothing of caches, by name."""
    factors = {}
    for group in matrix_groups(graph):
        exponents, path = exponents_by_key.get(group.key), smoothing_path(group)
        if exponents is not None and path is not None and path.cache is not None:
            factors[path.cache.name] = np.exp2(path.spread(exponents)[path.cache.columns])[:, None]
    return factors
