"""Weights of a traced graph, which are found by their names in the model.

Large matrices of a checkpoint are placeholders in the model that is traced. In the graph each is
the stored matrix again, which no optimizer reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor

from ..checkpoint.lazy_tensors import materialize
from ..checkpoint.placeholders import WeightSources


class StoredMatrix(ir.Tensor):
    """Float32 tensor of a graph whose values are a checkpoint's matrix `raw`, in its own type."""

    def __init__(self, matrix: torch.Tensor, name: str) -> None:
        super().__init__(matrix, dtype=ir.DataType.FLOAT, shape=ir.Shape(matrix.shape), name=name)

    def numpy(self) -> np.ndarray:
        """Return the values in float32."""
        return materialize(self.raw).float().numpy()


def named_weights(model: torch.nn.Module, sources: WeightSources) -> dict[str, ir.Tensor]:
    """Return the weights and buffers of a traced model by their names in its graph."""
    tensors = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    weights: dict[str, ir.Tensor] = {}
    for name, tensor in tensors:
        key, matrix = f"model.{name}", sources.stored_matrix(tensor)
        weights[key] = TorchTensor(tensor, key) if matrix is None else StoredMatrix(matrix, key)
    return weights


def hide_weights(graph: ir.Graph, is_hidden: Callable[[str], bool]) -> None:
    """Make weights inputs of a graph, so that an optimizer folds none of them."""
    for name, value in list(graph.initializers.items()):
        if is_hidden(name):
            tensor = value.const_value
            assert tensor is not None
            del graph.initializers[name]
            value.shape, value.dtype = ir.Shape(tensor.shape), tensor.dtype
            value.const_value = None
            graph.inputs.append(value)


def restore_weights(graph: ir.Graph, weights: Mapping[str, ir.Tensor]) -> None:
    """Make hidden weights initializers again, of the values in `weights`."""
    for value in list(graph.inputs):
        if value.name in weights:
            graph.inputs.remove(value)
            register_weight(graph, value, weights)


def register_weight(graph: ir.Graph, value: ir.Value, weights: Mapping[str, ir.Tensor]) -> None:
    """Make a value the initializer of its name."""
    assert value.name is not None
    value.const_value = weights[value.name]
    graph.register_initializer(value)


def reads_stored_matrix(node: ir.Node) -> bool:
    """Return True if a node reads a matrix of the checkpoint, so that it is not folded."""
    return any(x is not None and isinstance(x.const_value, StoredMatrix) for x in node.inputs)
