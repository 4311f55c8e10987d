"""Writing a graph from nothing: a call is a node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from ..tracing.attention import OPSET

DOUBLE, FLOAT, INT = ir.DataType.DOUBLE, ir.DataType.FLOAT, ir.DataType.INT64
END = np.iinfo(np.int64).max
Operand: TypeAlias = ir.Value | np.ndarray | Sequence[int] | int | float | None


class Nodes:
    """A graph to whose end nodes are put.

    `nodes("Add", x, 1.0)` is the sum of a value and a number: a float is float32; an int, and a
    list of them, int64; an array what it is. Equal constants are one.
    """

    def __init__(self, name: str) -> None:
        opsets = {"": OPSET, "com.microsoft": 1}
        self.graph = ir.Graph([], [], nodes=[], opset_imports=opsets, name=name)
        self._constants: dict[tuple[bytes, str, tuple[int, ...]], ir.Value] = {}

    def __call__(
        self, op_type: str, *inputs: Operand, num_outputs: int = 1, **attributes: Any
    ) -> ir.Value:
        """The first output of a new node; `others` has the rest."""
        values = [x if x is None else self.constant(x) for x in inputs]
        node = ir.node(op_type, values, attributes, num_outputs=num_outputs)
        self.put(node, "round")
        return node.outputs[0]

    def others(self, first: ir.Value) -> Sequence[ir.Value]:
        """The outputs of a node behind its first."""
        node = first.producer()
        assert node is not None
        return node.outputs[1:]

    def put(self, node: ir.Node, prefix: str) -> None:
        """A node from elsewhere; its outputs and their dimensions get names of their own."""
        node.name = f"{prefix}.{len(self.graph)}"
        for i, output in enumerate(node.outputs):
            output.name = f"{node.name}.{i}"
            if output.shape is not None:
                dims = [d if isinstance(d, int) else f"{prefix}.{d}" for d in output.shape]
                output.shape = ir.Shape(dims)
        self.graph.append(node)

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        self.graph.inputs.append(value)
        return value

    def output(
        self, name: str, value: ir.Value, dtype: ir.DataType, shape: Sequence[int | str]
    ) -> None:
        value.name, value.dtype, value.shape = name, dtype, ir.Shape(shape)
        self.graph.outputs.append(value)

    def stored(self, tensor: ir.TensorProtocol, name: str) -> ir.Value:
        """A tensor as a constant of the graph."""
        kind = ir.TensorType(tensor.dtype)
        value = ir.Value(name=name, shape=tensor.shape, type=kind, const_value=tensor)
        self.graph.register_initializer(value)
        return value

    def constant(self, x: ir.Value | np.ndarray | Sequence[int] | int | float) -> ir.Value:
        """What it is to nodes that take it; a value is itself."""
        if isinstance(x, ir.Value):
            return x
        if isinstance(x, float):
            array = np.array(x, np.float32)
        elif isinstance(x, np.ndarray):
            array = x
        else:
            array = np.array(x, np.int64)
        key = array.tobytes(), array.dtype.str, array.shape
        if key not in self._constants:
            name = f"constant.{len(self._constants)}"
            self._constants[key] = self.stored(ir.tensor(array, name=name), name)
        return self._constants[key]
