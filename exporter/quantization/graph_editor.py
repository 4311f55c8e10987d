"""Insertion of nodes and initializers into a graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ..graph.nodes import add_constant, add_initializer, insert_node
from .weights_writer import WeightsWriter

INT8_ACCURACY_LEVEL = 4  # the accuracy level of MatMulNBits and QMoE with int8 activations


@dataclass
class NodeEditor:
    """Editor of one graph."""

    graph: ir.Graph
    _constants: dict[str, ir.Value] = field(default_factory=dict, kw_only=True)

    def node(
        self,
        before: ir.Node,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        like: ir.Value,
        last: int | None = None,
        dtype: ir.DataType = ir.DataType.FLOAT,
        domain: str = "",
        **attributes: ir.DataType | int | list[int],
    ) -> ir.Value:
        """Insert a node; return its output, with the shape of `like` except the last dimension."""
        output = insert_node(before, op_type, inputs, name, like, domain, **attributes)
        if last is not None and output.shape is not None:
            output.shape = ir.Shape([*output.shape[:-1], last])
        output.dtype = dtype
        if domain:
            self.graph.opset_imports[domain] = 1
        return output

    def external(self, tensor: ir.ExternalTensor) -> ir.Value:
        """Return the initializer of a stored tensor, shared by its readers."""
        assert tensor.name is not None
        if tensor.name not in self._constants:
            self._constants[tensor.name] = add_initializer(self.graph, tensor, tensor.name)
        return self._constants[tensor.name]

    def constant(self, name: str, array: np.ndarray | np.generic) -> ir.Value:
        """Return an initializer that is stored in the graph, shared by its readers."""
        if name not in self._constants:
            self._constants[name] = add_constant(self.graph, np.asarray(array), f"int8.{name}")
        return self._constants[name]


@dataclass
class GraphEditor(NodeEditor):
    """Editor of a graph that is quantized, whose new weights are written to `store`."""

    store: WeightsWriter
