"""Conversion of a float32 graph to 16-bit arithmetic, or to 16-bit caches, with the same weights.

Caches and all values derived from tokens get the 16-bit type. The following stay in float32, and
are cast where they meet 16-bit values:

* values that depend only on positions, as 16 bits represent few positions exactly;
* values that may overflow: squares and their sums, and sums over blocks of quantized weights;
* results of operators that have no bfloat16 kernel in ONNX Runtime's CUDA provider.

Logits and hidden states are cast to float32.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from specedge.errors import ExportError

from ..tracing.hidden_states import HIDDEN_STATES
from .external_data import STORED
from .nodes import GqaInput, add_constant, cache_outputs, hidden_states_node, operand, producer

_WIDE = ir.DataType.FLOAT
_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
# Operators of decomposed norms. Kernels of fused norms accumulate in float32.
_SUMS = {"Pow", "ReduceL2", "ReduceMean", "ReduceSumSquare"}
# Operators without a bfloat16 CUDA kernel for opset 20 or 24 (ONNX Runtime 1.31.1).
_WITHOUT_BFLOAT16 = {
    "ArgMax", "Ceil", "Clip", "Cos", "CumSum", "Einsum", "Elu", "Equal", "Floor", "Greater",
    "GreaterOrEqual", "HardSigmoid", "HardSwish", "LeakyRelu", "Less", "LessOrEqual", "Log",
    "LogSoftmax", "Mish", "OneHot", "PRelu", "Pad", "Reciprocal", "ReduceLogSumExp", "ReduceMax",
    "ReduceMin", "ReduceProd", "Round", "Selu", "Sin", "Softplus", "Softsign", "TopK",
}  # fmt: skip
# Operators between caches and attention, which have 16-bit kernels.
_CACHE_OPS = {
    "Attention", "Expand", "GroupQueryAttention", "Reshape", "Slice", "TensorScatter", "Transpose",
    "Unsqueeze",
}  # fmt: skip
_LOOKUPS = ("Gather", "GatherBlockQuantized")
_FOLDED = {"Cast", "DequantizeLinear", "Reshape", "Transpose", "Unsqueeze"}


def convert_graph(model: ir.Model, dtype: ir.DataType) -> None:
    """Convert a model's graph to a 16-bit type, in place."""
    graph, casts = model.graph, _start(model.graph, dtype)
    hidden = hidden_states_node(graph)
    unsupported = _WITHOUT_BFLOAT16 if dtype == ir.DataType.BFLOAT16 else ()
    lookups = [node for node in graph if _is_lookup(node, graph.inputs[0])]
    for value in dict.fromkeys(map(_follow_embedding, lookups)):
        if value.dtype == _WIDE:
            users = list(value.uses())
            narrowed = casts.narrow(value)
            for user, index in users:
                user.replace_input_with(index, narrowed)
    for node in list(graph):
        for output in node.outputs:
            if output.dtype is None and output.name:  # others are omitted
                output.dtype = _infer_type(node)
        _retype(node, casts, node is not hidden and node.op_type not in unsupported)
    _finish(model, dtype)


def convert_caches(model: ir.Model, dtype: ir.DataType) -> None:
    """Convert a model's caches to a 16-bit type, in place; only attention computes in it.

    Raises ExportError if another node computes the caches.
    """
    graph, casts = model.graph, _start(model.graph, dtype)
    for node in list(graph):
        _retype(node, casts, node.op_type in _CACHE_OPS)
    for value in cache_outputs(graph):
        if value.dtype != dtype:
            raise ExportError(
                f"a {value.producer().op_type} node computes the caches in "  # type: ignore[union-attr]
                f"{value.dtype}; omit --cache"
            )
    _finish(model, dtype)


def cast_outputs(model: ir.Model, dtype: str) -> None:
    """Cast a model's float32 outputs to another type, in place."""
    graph, target = model.graph, STORED[dtype][1]
    for i, value in enumerate(graph.outputs):
        if value.dtype == target:
            continue
        cast = ir.node("Cast", [value], {"to": target})
        (output,) = cast.outputs
        output.name, output.shape, output.dtype = value.name, value.shape, target
        value.name = f"{value.name}.float32"
        graph.append(cast)
        graph.outputs[i] = output


def _start(graph: ir.Graph, dtype: ir.DataType) -> _CastCache:
    """Convert caches and biases to the type, and return the casts of other values."""
    for value in graph.inputs:
        if value.dtype == _WIDE and value.name != HIDDEN_STATES:
            value.dtype = dtype
    _center_biases(graph)
    return _CastCache(graph, dtype)


def _finish(model: ir.Model, dtype: ir.DataType) -> None:
    """Cast logits to float32, and remove unused nodes."""
    _widen_logits(model.graph, dtype)
    passes.RemoveUnusedNodesPass()(model)


def _center_biases(graph: ir.Graph) -> None:
    """Shift position biases, such as ALiBi's, to 0 at the first new token.

    Softmax is invariant to the shift, and 16 bits represent small biases accurately.
    """
    for bias in dict.fromkeys(filter(None, map(_position_bias, graph))):
        users = list(bias.uses())
        past = next(value for value in graph.inputs if value.name == "past_length")
        current = ir.node("Gather", [bias, past], {"axis": -1})
        less = ir.node("Sub", [bias, current.outputs[0]])
        name = f"{bias.name}.centered"
        centered = _insert(graph, bias.producer(), less, bias, _WIDE, name)
        _insert(graph, bias.producer(), current, bias, _WIDE, f"{bias.name}.here")
        current.outputs[0].shape = None
        for user, index in users:
            user.replace_input_with(index, centered)


def _position_bias(node: ir.Node) -> ir.Value | None:
    """Return the position bias that a node adds to scores, [B, H, 1, S]."""
    bias = None
    if node.op_type == "GroupQueryAttention":
        bias = GqaInput.ATTENTION_BIAS.of(node)
        if sum_ := producer(bias, "Add"):
            bias = sum_.inputs[0]  # the other input is zeros
    elif node.op_type == "Attention" and len(node.inputs) > 3:
        chosen = producer(node.inputs[3], "Where")
        bias = None if chosen is None else chosen.inputs[1]
    if bias is None or bias.dtype != _WIDE or bias.shape is None:
        return None
    return bias if len(bias.shape) == 4 and bias.shape[-1] != 1 else None


def _is_lookup(node: ir.Node, ids: ir.Value) -> bool:
    """Return True if a node gathers rows of a table by token."""
    index = node.inputs[1] if node.op_type in _LOOKUPS else None
    while (before := producer(index, "Reshape")) is not None:
        index = before.inputs[0]
    table = node.inputs[0] if index is ids else None
    return table is not None and _is_constant(table)


def _follow_embedding(lookup: ir.Node) -> ir.Value:
    """Follow gathered rows through their casts and scales."""
    value = lookup.outputs[0]
    while len(users := [user for user, _ in value.uses()]) == 1:
        (user,) = users
        scaled = user.op_type == "Mul" and all(
            operand is not None and operand.producer() is not None for operand in user.inputs
        )
        if user.op_type != "Cast" and not scaled:
            break
        value = user.outputs[0]
    return value


def _infer_type(node: ir.Node) -> ir.DataType | None:
    """Infer the type of a node's output that a rewrite left untyped: usually its input's."""
    if node.op_type == "Cast":
        return ir.DataType(node.attributes["to"].as_int())
    return next((x.dtype for x in node.inputs if x is not None), None)


def _may_overflow(node: ir.Node) -> bool:
    """Return True for squares, their sums, and sums over the blocks to which rows are reshaped."""
    if node.op_type == "Mul":
        return node.inputs[0] is node.inputs[1]
    if node.op_type == "ReduceSum":
        return producer(node.inputs[0], "Reshape") is not None
    return node.op_type in _SUMS


def _retype(node: ir.Node, casts: _CastCache, is_able: bool = True) -> None:
    """Cast a node's floats to one type: 16-bit if an input has it and the node supports it."""
    floats = [(i, x) for i, x in enumerate(node.inputs) if x is not None and _is_float(x)]
    read = {x.dtype for _, x in floats if not _is_constant(x)}
    if not is_able or read <= {_WIDE} or _may_overflow(node):
        for i, value in floats:
            if value.dtype == casts.dtype and not _is_constant(value):
                node.replace_input_with(i, casts.wide(value))
        return
    for i, value in floats:
        node.replace_input_with(i, casts.narrow(value))
    for value in node.outputs:
        if value.dtype == _WIDE:
            value.dtype = casts.dtype
    if node.op_type == "Cast" and node.outputs[0].dtype == casts.dtype:
        node.outputs[0].replace_all_uses_with(operand(node, 0))


def _widen_logits(graph: ir.Graph, dtype: ir.DataType) -> None:
    logits = graph.outputs[0]
    if logits.dtype == dtype:
        name, logits.name = logits.name, f"{logits.name}.narrow"
        graph.outputs[0] = _cast(graph, logits, _WIDE, name)


class _CastCache:
    """Values in the 16-bit type and in float32, each cast once."""

    def __init__(self, graph: ir.Graph, dtype: ir.DataType) -> None:
        self.dtype = dtype
        self._graph = graph
        self._narrow: dict[ir.Value, ir.Value] = {}
        self._wide: dict[ir.Value, ir.Value] = {}

    def wide(self, value: ir.Value) -> ir.Value:
        """Return a value in float32."""
        if value not in self._wide:
            self._wide[value] = _cast(self._graph, value, _WIDE, f"{value.name}.wide")
        return self._wide[value]

    def narrow(self, value: ir.Value) -> ir.Value:
        """Return a value in the 16-bit type."""
        if value.dtype == self.dtype:
            return value
        if value not in self._narrow:
            self._narrow[value] = self._narrowed(value)
        return self._narrow[value]

    def _narrowed(self, value: ir.Value) -> ir.Value:
        """Return a weight without a cast if it is stored in the type, else a cast.

        Instead of rows of a table, the whole table is cast, which is folded when a graph is loaded.
        """
        name, node = f"{value.name}.{self.dtype.name.lower()}", value.producer()
        tensor = value.const_value
        if tensor is not None and not isinstance(tensor, ir.ExternalTensor):
            return add_constant(self._graph, _cast_array(tensor.numpy(), self.dtype), name)
        source = node.inputs[0] if node is not None else None
        if node is None or source is None or not (_is_constant(value) or _is_table_lookup(node)):
            return _cast(self._graph, value, self.dtype, name)
        if node.op_type == "Cast":
            narrowed = source.dtype in _HALVES
            return self.narrow(source) if narrowed else _cast(self._graph, value, self.dtype, name)
        # Its float inputs, and so its output, are weights, or the scales of quantized weights.
        inputs = [x if x is None or not _is_float(x) else self.narrow(x) for x in node.inputs]
        narrow_node = ir.node(node.op_type, inputs, dict(node.attributes))
        return _insert(self._graph, node, narrow_node, value, self.dtype, name)


def _cast(graph: ir.Graph, value: ir.Value, dtype: ir.DataType, name: str | None) -> ir.Value:
    node = ir.node("Cast", [value], {"to": dtype})
    return _insert(graph, value.producer(), node, value, dtype, name)


def _insert(
    graph: ir.Graph,
    after: ir.Node | None,
    node: ir.Node,
    like: ir.Value,
    dtype: ir.DataType,
    name: str | None,
) -> ir.Value:
    """Insert a new node after another, or first; its output has the shape of `like`."""
    output = node.outputs[0]
    output.name, output.shape, output.dtype = name, like.shape, dtype
    if after is None:
        graph.insert_before(graph[0], node)
    else:
        graph.insert_after(after, node)
    return output


def _is_table_lookup(node: ir.Node) -> bool:
    """Return True if a node gathers rows of a stored table of floats."""
    table = node.inputs[0] if node.op_type == "Gather" else None
    return table is not None and _is_float(table) and _is_constant(table)


def _cast_array(array: np.ndarray, dtype: ir.DataType) -> np.ndarray:
    """Cast an array; finite values stay finite."""
    if dtype == ir.DataType.FLOAT16:
        largest = np.finfo(np.float16).max
        array = np.where(np.isfinite(array), np.clip(array, -largest, largest), array)
    return array.astype(dtype.numpy())


def _is_float(value: ir.Value) -> bool:
    return value.dtype in (_WIDE, *_HALVES)


def _is_constant(value: ir.Value) -> bool:
    """Return True for an initializer, or a value computed from initializers."""
    node = value.producer()
    if node is None:
        return value.const_value is not None
    inputs = [x for x in node.inputs if x is not None]
    return node.op_type in _FOLDED and all(map(_is_constant, inputs))
