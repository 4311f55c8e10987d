"""The products with stored weights in an exported graph, and what their inputs come from.

x [..., T, K] times W [..., K, N]; matrices that read one x are a group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch

from .. import mapped_memory
from ..graph.nodes import insert_node, producer
from ..graph.weights import TORCH_TYPES

NORMS = ("RMSNormalization", "LayerNormalization")
PRODUCTS = {"MatMul": (0, 1), "Gemm": (0, 1), "MoE": (2, 4)}  # and which inputs are matrices
_SHAPES = ("Cast", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
LEAST = 1024  # numbers; what is smaller stays as it is


@dataclass(frozen=True)
class Stored:
    """A tensor in the weights file, with its axes in the order that `order` says."""

    tensor: ir.ExternalTensor
    order: tuple[int, ...]

    @cached_property
    def place(self) -> int:
        """Where it begins in the file, by which it is known in every graph."""
        assert self.tensor.offset is not None
        return self.tensor.offset

    def numbers(self) -> torch.Tensor:
        """Its numbers in their own type, as pages of the file."""
        return contents(self.tensor).permute(self.order)


@dataclass(frozen=True)
class Matrix:
    """A MatMul node and its W."""

    node: ir.Node
    stored: Stored

    @property
    def place(self) -> int:
        return self.stored.place


@dataclass(frozen=True)
class Group:
    """All products with stored weights that read one value."""

    value: ir.Value
    matrices: tuple[Matrix, ...]

    @property
    def key(self) -> tuple[int, ...]:
        """What it is known by in the graphs of every op set: where its weights lie."""
        return tuple(sorted(matrix.place for matrix in self.matrices))


def contents(tensor: ir.ExternalTensor) -> torch.Tensor:
    """A tensor of the weights file in its own type, as pages of the file."""
    assert tensor.length is not None
    data = mapped_memory.map_file(Path(tensor.path), tensor.offset or 0, tensor.length)
    return torch.from_numpy(data).view(TORCH_TYPES[tensor.dtype.value]).reshape(tuple(tensor.shape))


def stored_in(value: ir.Value | None) -> Stored | None:
    """What a value is of the weights file, cast and transposed on the way, if it is that."""
    order: list[int] | None = None
    while value is not None and value.const_value is None:
        if (node := producer(value, "Transpose")) is not None:
            after = list(node.attributes["perm"].as_ints())
            order = after if order is None else [after[axis] for axis in order]
        elif (node := producer(value, "Cast")) is None:
            return None
        value = node.inputs[0]
    tensor = value.const_value if value is not None else None
    if not isinstance(tensor, ir.ExternalTensor):
        return None
    return Stored(tensor, tuple(range(len(tensor.shape)) if order is None else order))


def vector(value: ir.Value | None) -> np.ndarray | None:
    """A constant's numbers, if it has one axis that is longer than 1: the last."""
    stored = stored_in(value)
    if stored is not None:
        array = contents(stored.tensor).float().numpy()
    elif value is not None and value.const_value is not None:
        array = value.const_value.numpy()
    else:
        return None
    is_vector = array.ndim > 0 and array.size == array.shape[-1] > 1
    return array if array.dtype == np.float32 and is_vector else None


def groups(graph: ir.Graph, apart: Set[int] = frozenset()) -> list[Group]:
    """Every product with stored weights in their order, those that read one value together.

    But for those whose weights lie at a place in `apart`.
    """
    found: defaultdict[ir.Value, list[Matrix]] = defaultdict(list)
    for node in graph:
        value = node.inputs[0] if node.op_type == "MatMul" else None
        stored = stored_in(node.inputs[1]) if value is not None else None
        if value is None or stored is None or stored.place in apart:
            continue
        if stored.tensor.size >= LEAST:
            found[value].append(Matrix(node, stored))
    return [Group(value, tuple(matrices)) for value, matrices in found.items()]


def unfold(graph: ir.Graph, apart: Set[int] = frozenset()) -> None:
    """Write Gemm nodes, of rows and a stored matrix, as MatMul and Add, which groups are made of.

    But for columns alone, and weights that lie at a place in `apart`.
    """
    for node in [node for node in graph if node.op_type == "Gemm"]:
        stored = stored_in(node.inputs[1])
        if stored is None or stored.place in apart or 1 in stored.tensor.shape:
            continue
        if any(
            node.attributes[name].value != 1
            for name in ("alpha", "beta")
            if name in node.attributes
        ):
            continue
        x, weights, bias = (*node.inputs, None)[:3]
        output, turned = node.outputs[0], node.attributes.get("transB")
        if turned is not None and turned.as_int():
            weights = insert_node(
                node, "Transpose", [weights], f"{output.name}.turned", perm=[1, 0]
            )
            weights.dtype = ir.DataType.FLOAT
        name = output.name
        whole = insert_node(node, "MatMul", [x, weights], f"{name}.product", output)
        if bias is not None:
            whole = insert_node(node, "Add", [whole, bias], f"{name}.biased", output)
        output.name, whole.name = f"{name}.gemm", name
        output.replace_all_uses_with(whole, replace_graph_outputs=True)
        graph.remove(node, safe=True)


def others(
    graph: ir.Graph, apart: Set[int] = frozenset(), known: Iterable[int] = ()
) -> dict[str, list[ir.ExternalTensor]]:
    """Stored weights of products that are in no group, by the type of the nodes that read them.

    `known` are the places of those that are rounded another way.
    """
    in_groups = (matrix for group in groups(graph, apart) for matrix in group.matrices)
    told = {*known, *(matrix.place for matrix in in_groups)}
    found: defaultdict[str, list[ir.ExternalTensor]] = defaultdict(list)
    for node in graph:
        inputs = (i for i in PRODUCTS.get(node.op_type, ()) if i < len(node.inputs))
        for value in (node.inputs[i] for i in inputs):
            tensor = behind(value)
            if tensor is None or tensor.size < LEAST or len(tensor.shape) < 2:
                continue
            if tensor.offset not in told:
                told.add(tensor.offset or 0)
                found[node.op_type].append(tensor)
    return found


def behind(value: ir.Value | None) -> ir.ExternalTensor | None:
    """What a value is of the weights file, in whatever shape and type."""
    while value is not None and value.const_value is None:
        node = value.producer()
        value = node.inputs[0] if node is not None and node.op_type in _SHAPES else None
    tensor = value.const_value if value is not None else None
    return tensor if isinstance(tensor, ir.ExternalTensor) else None


def embeddings(graph: ir.Graph) -> Iterator[tuple[ir.Node, Stored]]:
    """The tables that rows are taken from by token, [V, H]."""
    for node in graph:
        if node.op_type == "Gather" and _reshaped(node.inputs[1]) is graph.inputs[0]:
            stored = stored_in(node.inputs[0])
            if stored is not None and len(stored.tensor.shape) == 2:
                yield node, stored


def _reshaped(value: ir.Value | None) -> ir.Value | None:
    """What a value is but for its shape."""
    while (node := producer(value, "Reshape")) is not None:
        value = node.inputs[0]
    return value
