"""A graph whose weights become stored integers, and the nodes that are put into it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ..graph.nodes import add_constant, insert_node
from .storing import Store

MICROSOFT = "com.microsoft"
IN_BYTES = 4  # the accuracy level at which x is rounded to bytes, too


@dataclass
class Editor:
    """Puts nodes into one graph; what they read of weights is in `store`."""

    graph: ir.Graph
    store: Store
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
        """A new node's output, in the shape of `like` but for the last dimension, and a type."""
        output = insert_node(before, op_type, inputs, name, like, domain, **attributes)
        if last is not None and output.shape is not None:
            output.shape = ir.Shape([*output.shape[:-1], last])
        output.dtype = dtype
        if domain:
            self.graph.opset_imports[domain] = 1
        return output

    def external(self, tensor: ir.ExternalTensor) -> ir.Value:
        """The initializer for a stored tensor, one for all that read it."""
        assert tensor.name is not None
        if tensor.name not in self._constants:
            value = ir.Value(
                name=tensor.name, shape=ir.Shape(tensor.shape), type=ir.TensorType(tensor.dtype),
                const_value=tensor,
            )  # fmt: skip
            self.graph.register_initializer(value)
            self._constants[tensor.name] = value
        return self._constants[tensor.name]

    def constant(self, name: str, array: np.ndarray | np.generic) -> ir.Value:
        """An initializer of the graph itself, one for all that read it."""
        if name not in self._constants:
            self._constants[name] = add_constant(self.graph, np.asarray(array), f"int8.{name}")
        return self._constants[name]


def take_over(output: ir.Value, value: ir.Value) -> None:
    """Let a value have another's readers and, as an output of the graph, its name."""
    name, output.name = output.name, f"{output.name}.float"
    value.name = name
    output.replace_all_uses_with(value, replace_graph_outputs=True)
