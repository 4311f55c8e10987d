"""Moving a channel's size out of a product's input and into its weights.

SmoothQuant (Xiao et al. 2023): x W = (x / p)(p W) for one p a channel. Here p are powers of two, so
that in floating point nothing is rounded: the graph before integers keeps its bits. x / p costs
nothing, as constants on the way to x are divided.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from ..graph.nodes import add_constant
from .matrices import groups, vector
from .routes import Columns, Route, route

_MOST = 12  # the largest power


def powers(
    largest: np.ndarray, weights: np.ndarray, strength: float, channels: np.ndarray
) -> np.ndarray:
    """The power of two of each channel: of its size to `strength`, over that of its weights to the
    rest. The largest of each channel, and of each row of the weights, and which of them have one
    power: those with one number in `channels`. 3 * [K] -> [K]
    """
    sizes = np.maximum(_over(largest, channels), 1e-5) ** strength
    sizes = sizes / np.maximum(_over(weights, channels), 1e-5) ** (1 - strength)
    found = np.rint(np.log2(sizes / np.exp2(np.median(np.log2(sizes)))))
    return np.clip(found, -_MOST, _MOST)


def _over(sizes: np.ndarray, channels: np.ndarray) -> np.ndarray:
    """The largest of all channels that have the same number. [K] -> [K]"""
    found = np.zeros(channels.max() + 1, sizes.dtype)
    np.maximum.at(found, channels, sizes)
    return found[channels]


def divide(graph: ir.Graph, way: Route, by: np.ndarray) -> dict[ir.Node, np.ndarray]:
    """Divide what lies on a route by 2 ** by; what is left to do with the columns of matrices."""
    left: dict[ir.Node, np.ndarray] = {}
    spread = way.spread(by)
    for part in way.parts:
        if isinstance(part, Columns):
            left[part.node] = -spread
            continue
        array = vector(part.node.inputs[part.index])
        assert array is not None
        name = f"{part.node.outputs[0].name}.smooth{part.index}"
        divided = add_constant(graph, (array * np.exp2(-spread)).astype(np.float32), name)
        part.node.replace_input_with(part.index, divided)
    return left


def of_caches(
    graph: ir.Graph, moved: Mapping[tuple[int, ...], np.ndarray | None]
) -> dict[str, np.ndarray]:
    """What caches of a graph are divided by where powers, [K], were moved out of groups' inputs.

    By the cache's name; [heads, 1, D] each
    """
    found = {}
    for group in groups(graph):
        by, way = moved.get(group.key), route(group)
        if by is not None and way is not None and way.cache is not None:
            found[way.cache.name] = np.exp2(way.spread(by)[way.cache.columns])[:, None]
    return found
