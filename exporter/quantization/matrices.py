"""Matrix products with stored weights in an exported graph.

x [..., T, K] times W [..., K, N]; matrices that read the same x are a group.
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
from ..checkpoint.lazy_tensors import materialize
from ..graph.external_data import TORCH_TYPES, LazyWeights, WeightTensor
from ..graph.nodes import insert_node, producer

NORMS = ("RMSNormalization", "LayerNormalization")
PRODUCT_INPUTS = {"MatMul": (0, 1), "Gemm": (0, 1), "MoE": (2, 4)}  # inputs that may be matrices
_SHAPE_OPS = ("Cast", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
MIN_SIZE = 1024  # elements; smaller matrices are not quantized


@dataclass(frozen=True)
class StoredTensor:
    """Tensor of the weights file with permuted axes."""

    tensor: ir.ExternalTensor
    order: tuple[int, ...]

    @cached_property
    def offset(self) -> int:
        """Offset in the file, equal in every graph."""
        assert self.tensor.offset is not None
        return self.tensor.offset

    @property
    def shape(self) -> tuple[int, ...]:
        sizes = self.tensor.shape.numpy()
        return tuple(sizes[axis] for axis in self.order)

    def data(self) -> torch.Tensor:
        """Return the values in their stored type, memory-mapped unless they are computed."""
        return tensor_data(self.tensor).permute(self.order)


@dataclass(frozen=True)
class Matrix:
    """MatMul node and its stored matrix W."""

    node: ir.Node
    stored: StoredTensor

    @property
    def offset(self) -> int:
        return self.stored.offset


@dataclass(frozen=True)
class MatrixGroup:
    """All products with stored weights that read the same value."""

    value: ir.Value
    matrices: tuple[Matrix, ...]

    @property
    def key(self) -> tuple[int, ...]:
        """Offsets of the weights, equal in all graph variants."""
        return tuple(sorted(matrix.offset for matrix in self.matrices))


class LazyExternalTensor(ir.ExternalTensor):
    """Tensor of a weights file that may lack its `values`."""

    values: WeightTensor


def find_lazy(graph: ir.Graph, lazy: LazyWeights) -> None:
    """Let the initializers of a graph have the lazy weights at their offsets."""
    for value in graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and tensor.offset in lazy:
            found = LazyExternalTensor(
                tensor.location, tensor.offset, tensor.length, tensor.dtype, shape=tensor.shape,
                name=tensor.name, base_dir=tensor.base_dir,
            )  # fmt: skip
            found.values = lazy[tensor.offset]
            value.const_value = found


def tensor_data(tensor: ir.ExternalTensor) -> torch.Tensor:
    """Return a tensor in its stored type, memory-mapped, or the values of a lazy one."""
    values: torch.Tensor = materialize(stored_values(tensor))
    return values


def stored_values(tensor: ir.ExternalTensor) -> torch.Tensor:
    """Return a tensor in its stored type, memory-mapped or lazy."""
    if isinstance(tensor, LazyExternalTensor):
        return tensor.values.reshape(tuple(tensor.shape))
    assert tensor.length is not None
    data = mapped_memory.map_file(Path(tensor.path), tensor.offset or 0, tensor.length)
    return torch.from_numpy(data).view(TORCH_TYPES[tensor.dtype.value]).reshape(tuple(tensor.shape))


def stored_tensor(value: ir.Value | None) -> StoredTensor | None:
    """Return the stored tensor of a value, through casts and transpositions; None without."""
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
    return StoredTensor(tensor, tuple(range(len(tensor.shape)) if order is None else order))


def constant_vector(value: ir.Value | None) -> np.ndarray | None:
    """Return a float32 constant that varies only along its last axis; None for other values."""
    stored = stored_tensor(value)
    if stored is not None:
        array = tensor_data(stored.tensor).float().numpy()
    elif value is not None and value.const_value is not None:
        array = value.const_value.numpy()
    else:
        return None
    is_vector = array.ndim > 0 and array.size == array.shape[-1] > 1
    return array if array.dtype == np.float32 and is_vector else None


def matrix_groups(graph: ir.Graph, excluded: Set[int] = frozenset()) -> list[MatrixGroup]:
    """Return the groups of products with stored weights, except for offsets in `excluded`."""
    products: defaultdict[ir.Value, list[Matrix]] = defaultdict(list)
    for node in graph:
        value = node.inputs[0] if node.op_type == "MatMul" else None
        stored = stored_tensor(node.inputs[1]) if value is not None else None
        if value is None or stored is None or stored.offset in excluded:
            continue
        if stored.tensor.size >= MIN_SIZE:
            products[value].append(Matrix(node, stored))
    return [MatrixGroup(value, tuple(matrices)) for value, matrices in products.items()]


def split_gemms(graph: ir.Graph, excluded: Set[int] = frozenset()) -> None:
    """Replace Gemm nodes with stored matrices by MatMul and Add, in place.

    Nodes with single columns, and weights at offsets in `excluded`, are kept.
    """
    for node in [node for node in graph if node.op_type == "Gemm"]:
        stored = stored_tensor(node.inputs[1])
        if stored is None or stored.offset in excluded or 1 in stored.tensor.shape:
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


def ungrouped_weights(
    graph: ir.Graph, excluded: Set[int] = frozenset(), quantized: Iterable[int] = ()
) -> dict[str, list[ir.ExternalTensor]]:
    """Return weights of products that are in no group and not in `quantized`, by node type."""
    in_groups = (matrix for group in matrix_groups(graph, excluded) for matrix in group.matrices)
    seen = {*quantized, *(matrix.offset for matrix in in_groups)}
    ungrouped: defaultdict[str, list[ir.ExternalTensor]] = defaultdict(list)
    for node in graph:
        inputs = (i for i in PRODUCT_INPUTS.get(node.op_type, ()) if i < len(node.inputs))
        for value in (node.inputs[i] for i in inputs):
            tensor = underlying_tensor(value)
            if tensor is None or tensor.size < MIN_SIZE or len(tensor.shape) < 2:
                continue
            if tensor.offset not in seen:
                seen.add(tensor.offset or 0)
                ungrouped[node.op_type].append(tensor)
    return ungrouped


def underlying_tensor(value: ir.Value | None) -> ir.ExternalTensor | None:
    """Return the stored tensor of a value, through any change of shape or type."""
    while value is not None and value.const_value is None:
        node = value.producer()
        value = node.inputs[0] if node is not None and node.op_type in _SHAPE_OPS else None
    tensor = value.const_value if value is not None else None
    return tensor if isinstance(tensor, ir.ExternalTensor) else None


def embeddings(graph: ir.Graph) -> Iterator[tuple[ir.Node, StoredTensor]]:
    """Yield lookups by token with their tables, [V, H]."""
    for node in graph:
        if node.op_type == "Gather" and _before_reshape(node.inputs[1]) is graph.inputs[0]:
            stored = stored_tensor(node.inputs[0])
            if stored is not None and len(stored.tensor.shape) == 2:
                yield node, stored


def _before_reshape(value: ir.Value | None) -> ir.Value | None:
    """Return a value before its reshapes."""
    while (node := producer(value, "Reshape")) is not None:
        value = node.inputs[0]
    return value
