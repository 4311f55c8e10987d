"""Insertion of nodes, constants and copies of whole graphs into a graph."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from ..tracing.attention import OPSET
from ..tracing.hidden_states import RETURNED

MICROSOFT_DOMAIN = "com.microsoft"  # of ONNX Runtime's contributed operators


class GqaInput(enum.IntEnum):
    """Positions of GroupQueryAttention's inputs, by their names in ONNX Runtime's schema."""

    QUERY = 0
    KEY = 1
    VALUE = 2
    PAST_KEY = 3
    PAST_VALUE = 4
    SEQLENS_K = 5
    COS_CACHE = 7
    SIN_CACHE = 8
    ATTENTION_BIAS = 10
    HEAD_SINK = 11
    K_SCALE = 12
    V_SCALE = 13
    QUERY_SEQLENS = 16

    def of(self, node: ir.Node) -> ir.Value | None:
        """Return the input of a node, or None if it is omitted."""
        return node.inputs[self] if self < len(node.inputs) else None


def add_initializer(graph: ir.Graph, tensor: ir.TensorProtocol, name: str) -> ir.Value:
    """Add a tensor as an initializer."""
    value = ir.val(name, const_value=tensor)
    graph.register_initializer(value)
    return value


def add_constant(graph: ir.Graph, array: np.ndarray, name: str) -> ir.Value:
    """Add an array as an initializer."""
    return add_initializer(graph, ir.tensor(array, name=name), name)


def insert_node(
    before: ir.Node,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    name: str,
    like: ir.Value | None = None,
    domain: str = "",
    **attributes: ir.DataType | int | float | list[int],
) -> ir.Value:
    """Insert a node before another; its output has the shape and type of `like`."""
    node = ir.node(op_type, inputs, attributes, domain=domain)
    output = node.outputs[0]
    output.name = name
    if like is not None:
        output.shape, output.dtype = like.shape, like.dtype
    assert before.graph is not None
    before.graph.insert_before(before, node)
    return output


def split_columns(
    before: ir.Node, value: ir.Value, widths: Sequence[int], names: Sequence[str]
) -> list[ir.Value]:
    """Insert a split of a value along its last axis before a node."""
    assert before.graph is not None
    sizes = add_constant(before.graph, np.array(widths, np.int64), f"{value.name}.widths")
    node = ir.node("Split", [value, sizes], {"axis": -1}, num_outputs=len(names))
    for output, name, width in zip(node.outputs, names, widths, strict=True):
        output.name, output.dtype = name, value.dtype
        if value.shape is not None:
            output.shape = ir.Shape([*value.shape[:-1], width])
    before.graph.insert_before(before, node)
    return list(node.outputs)


def operand(node: ir.Node, index: int) -> ir.Value:
    """Return an input that a node must have."""
    value = node.inputs[index]
    assert value is not None
    return value


def static_shape(value: ir.Value) -> list[int]:
    """Return the shape of a value without symbolic dimensions."""
    assert value.shape is not None
    return [int(size) for size in value.shape]  # type: ignore[arg-type]


def replace_output(output: ir.Value, value: ir.Value) -> None:
    """Replace a value by another one, which takes over its readers and its name."""
    name, output.name = output.name, f"{output.name}.replaced"
    value.name = name
    output.replace_all_uses_with(value, replace_graph_outputs=True)


def cache_outputs(graph: ir.Graph) -> list[ir.Value]:
    """Return the outputs of a pass that are caches."""
    return [value for value in graph.outputs if str(value.name).startswith("present.")]


def hidden_states_node(graph: ir.Graph) -> ir.Node | None:
    """Return the node that joins the hidden states which passes return, if any.

    Nodes after it change the basis or the type of all of them.
    """
    value = next((value for value in graph.outputs if value.name in RETURNED), None)
    node = None if value is None else value.producer()
    while node is not None and node.op_type not in ("Concat", "Sum"):
        (value,) = (x for x in node.inputs if x is not None and x.const_value is None)
        node = value.producer()
    return node


def producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """Return the node that computes a value, if it has this operator type."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type else None


def producer_through_casts(value: ir.Value, op_type: str) -> ir.Node | None:
    """Return the node that computes a value, apart from its type, if it has this operator type."""
    while cast := producer(value, "Cast"):
        value = operand(cast, 0)
    return producer(value, op_type)


def reader_through_casts(value: ir.Value) -> ir.Node | None:
    """Return the only node that reads a value, possibly in another type."""
    while len(value.uses()) == 1:
        ((user, _),) = value.uses()
        if user.op_type != "Cast":
            return user
        value = user.outputs[0]
    return None


def is_token_positions(value: ir.Value | None) -> bool:
    """Return True for the positions of a pass's tokens, past length plus 0, 1 ... T - 1. [1, T]"""
    add = producer(value, "Add")
    past = producer(add.inputs[0], "Unsqueeze") if add is not None else None
    offsets = producer(add.inputs[1], "Sub") if add is not None else None
    if past is None or offsets is None:
        return False
    is_count = producer(offsets.inputs[0], "CumSum") is not None
    return is_count and operand(past, 0).name == "past_length"


DOUBLE, FLOAT, INT = ir.DataType.DOUBLE, ir.DataType.FLOAT, ir.DataType.INT64
END = np.iinfo(np.int64).max
Operand: TypeAlias = ir.Value | np.ndarray | Sequence[int] | int | float | None


class GraphBuilder:
    """Builder that appends nodes to a new graph, or to an existing one.

    `nodes("Add", x, 1.0)` is the sum of a value and a number: a float is float32; an int, and a
    list of them, int64; an array keeps its type. Equal constants are shared. The builder's name
    begins the names of nodes, values and constants.
    """

    def __init__(self, name: str, graph: ir.Graph | None = None) -> None:
        opsets = {"": OPSET, MICROSOFT_DOMAIN: 1}
        if graph is None:
            graph = ir.Graph([], [], nodes=[], opset_imports=opsets, name=name)
        self.graph = graph
        self._name, self._numbers = name, itertools.count()
        self._constants: dict[tuple[bytes, str, tuple[int, ...]], ir.Value] = {}
        self.shared: dict[Hashable, ir.Value] = {}  # weights of copied graphs, and nodes over them

    def __call__(
        self,
        op_type: str,
        *inputs: Operand,
        num_outputs: int = 1,
        domain: str = "",
        **attributes: Any,
    ) -> ir.Value:
        """Append a node and return its first output; `others` returns the rest."""
        values = [x if x is None else self.constant(x) for x in inputs]
        node = ir.node(op_type, values, attributes, num_outputs=num_outputs, domain=domain)
        self.put(node, self._name)
        return node.outputs[0]

    def others(self, first: ir.Value) -> Sequence[ir.Value]:
        """Return the outputs of a node after its first."""
        node = first.producer()
        assert node is not None
        return node.outputs[1:]

    def put(self, node: ir.Node, prefix: str) -> None:
        """Append a node, which gets a unique name, and its outputs as well."""
        node.name = f"{prefix}.{next(self._numbers)}"
        for i, output in enumerate(node.outputs):
            output.name = f"{node.name}.{i}"
        self.graph.append(node)

    def input(self, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
        """Add an input."""
        value = ir.val(name, dtype, shape)
        self.graph.inputs.append(value)
        return value

    def output(
        self, name: str, value: ir.Value, dtype: ir.DataType, shape: Sequence[int | str]
    ) -> None:
        """Make a value an output."""
        value.name, value.dtype, value.shape = name, dtype, ir.Shape(shape)
        self.graph.outputs.append(value)

    def stored(self, tensor: ir.TensorProtocol, name: str) -> ir.Value:
        """Add a tensor as an initializer."""
        return add_initializer(self.graph, tensor, name)

    def constant(self, x: ir.Value | np.ndarray | Sequence[int] | int | float) -> ir.Value:
        """Return an operand as a value; equal constants are shared."""
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
            name = f"{self._name}.constant.{len(self._constants)}"
            self._constants[key] = self.stored(ir.tensor(array, name=name), name)
        return self._constants[key]


class GraphTemplate:
    """Graph file that can be copied repeatedly into a larger graph.

    Copies, also of other files, share weights, by paths relative to the larger graph's folder, and
    nodes over weights, which ONNX Runtime folds at loading. On CPUs without VNNI ONNX Runtime
    converts int8 weights to unsigned ones per node, under the initializer's name, so each copy has
    separate int8 initializers unless it `shares_bytes`.
    """

    def __init__(self, root: Path, file: str, shares_bytes: bool = False) -> None:
        self._model = ir.load(root / file)
        self._root, self._file = root, Path(file)
        self._shares_bytes = shares_bytes

    def copy(
        self, nodes: GraphBuilder, prefix: str, inputs: Mapping[str, ir.Value]
    ) -> dict[str, ir.Value]:
        """Copy the nodes; return the outputs by name."""
        graph = self._model.clone().graph
        for name, value in list(graph.initializers.items()):
            is_unshared = value.dtype == ir.DataType.INT8 and not self._shares_bytes
            tensor = self._relocated(value)
            key = (prefix, name) if is_unshared else _values_key(tensor)
            if key not in nodes.shared:
                owner = prefix if is_unshared else self._file.with_suffix("")
                nodes.shared[key] = nodes.stored(tensor, f"{owner}.{name}")
            value.replace_all_uses_with(nodes.shared[key])
        for value in graph.inputs:
            value.replace_all_uses_with(inputs[str(value.name)])
        outputs = {str(value.name): value for value in graph.outputs}
        graph.outputs.clear()
        own_nodes = list(graph)
        graph.remove(own_nodes)
        constants = {*nodes.shared.values()}
        for node in own_nodes:
            values = {value for value in node.inputs if value is not None}
            if len(node.outputs) == 1 and values and values <= constants:
                key = _identity(node)
                if key in nodes.shared:
                    node.outputs[0].replace_all_uses_with(nodes.shared[key])
                    continue
                nodes.shared[key] = node.outputs[0]
                constants.add(node.outputs[0])
            _prefix_dimensions(node, prefix)
            nodes.put(node, prefix)
        return outputs

    def _relocated(self, value: ir.Value) -> ir.TensorProtocol:
        """Return a tensor with a path relative to the larger graph's folder."""
        tensor = value.const_value
        assert tensor is not None
        if not isinstance(tensor, ir.ExternalTensor):
            return tensor
        return ir.ExternalTensor(
            (self._file.parent / tensor.location).as_posix(),
            tensor.offset,
            tensor.length,
            tensor.dtype,
            shape=tensor.shape,
            name=str(value.name),
            base_dir=self._root,
        )


def _values_key(tensor: ir.TensorProtocol) -> Hashable:
    """Return a key that is equal for tensors of equal values: where they are stored, or they."""
    is_stored = isinstance(tensor, ir.ExternalTensor)
    values = (tensor.location, tensor.offset) if is_stored else tensor.tobytes()
    return tensor.dtype, tuple(tensor.shape), values


def _identity(node: ir.Node) -> Hashable:
    """Return a key that is equal for nodes that compute the same values."""
    attributes = sorted(map(ir.to_proto, node.attributes.values()), key=lambda x: x.name)
    serialized = tuple(attribute.SerializeToString() for attribute in attributes)
    return node.op_type, node.domain, serialized, tuple(node.inputs)


def _prefix_dimensions(node: ir.Node, prefix: str) -> None:
    """Give the symbolic dimensions of a copied node's outputs unique names."""
    for output in node.outputs:
        if output.shape is not None:
            dims = [d if isinstance(d, int) else f"{prefix}.{d}" for d in output.shape]
            output.shape = ir.Shape(dims)
