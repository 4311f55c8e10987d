"""Evaluation of an exported graph in float64 with ONNX's reference implementation.

ONNX Runtime has no float64 kernels for attention, and float32 rounding hides faults. Nodes are
therefore evaluated one by one by `onnx.reference`, or by `exact_nodes` where that lacks them, and
large matrices are memory-mapped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx.reference import ReferenceEvaluator

from ..checkpoint.lazy_tensors import materialize
from ..graph.external_data import LazyWeights, map_tensor
from ..graph.nodes import GqaInput
from ..tracing.experts import moe_reference
from .exact_nodes import IMPLEMENTATIONS, Array

Value = Any  # an array, or a memory-mapped tensor of a stored matrix in its own type
OnNode = Callable[[onnx.NodeProto, list[Array | None]], None]
PIECE = 1 << 18  # elements of a matrix that are cast at a time, to stay in the CPU's cache


class ExactGraph:
    """Graph file in float64; values computed only from constants stay float32.

    The result is the exact result of the float32 model, whose tables and scalars are float32.
    """

    def __init__(self, path: Path, lazy: LazyWeights | None = None) -> None:
        self._model = onnx.load(path, load_external_data=False)
        self._folder, self._lazy = path.parent, lazy
        self._opset = {x.domain: x.version for x in self._model.opset_import}
        self._evaluators: dict[int | None, ReferenceEvaluator] = {}

    @cached_property
    def _constants(self) -> dict[str, Value]:
        return {t.name: self._constant(t) for t in self._model.graph.initializer}

    def _constant(self, tensor: onnx.TensorProto) -> Value:
        if not tensor.external_data:
            return onnx.numpy_helper.to_array(tensor)
        stored = map_tensor(tensor, self._folder, self._lazy)
        return materialize(stored).float().numpy() if stored.ndim < 2 else stored

    def run(
        self, input_value: Callable[[str], Array], on_node: OnNode = lambda node, inputs: None
    ) -> Iterator[tuple[str, Array]]:
        """Yield the name and value of each output as soon as it is computed.

        Args:
            input_value: Returns an input by name.
            on_node: Called with every node and its inputs.
        """
        graph = self._model.graph
        outputs = {value.name for value in graph.output}
        inputs = {value.name for value in graph.input}
        num_readers = Counter(name for node in graph.node for name in node.input if name)
        values: dict[str, Value] = dict(self._constants)
        for index, node in enumerate(graph.node):
            for name in inputs & {*node.input} - values.keys():
                values[name] = input_value(name)
            arguments = [values[n] if n else None for n in node.input]
            results = self._evaluate(index, node, arguments, on_node)
            for name, value in zip(node.output, results, strict=False):
                if name in outputs:
                    yield name, _to_array(value)
                if num_readers[name]:
                    values[name] = value
            num_readers.subtract(name for name in node.input if name)
            for name in {*node.input} - self._constants.keys():
                if not num_readers[name]:
                    values.pop(name, None)

    def _evaluate(
        self, index: int, node: onnx.NodeProto, inputs: list[Value | None], on_node: OnNode
    ) -> list[Value]:
        if (lazy := _apply_lazily(node, inputs)) is not None:
            return [lazy]
        arrays = _promote([None if x is None else _to_array(x) for x in inputs])
        on_node(node, arrays)
        with np.errstate(all="ignore"):  # logarithms of 0, overflow of exp in sigmoids
            return list(self.node(node, arrays, index))

    def node(
        self, node: onnx.NodeProto, inputs: list[Array | None], index: int | None = None
    ) -> list[Array]:
        """Evaluate one node."""
        if node.op_type == "Attention":
            inputs = visible_inputs(node, inputs)
        if implementation := IMPLEMENTATIONS.get(node.op_type):
            return implementation(attributes(node), *inputs)
        evaluator = self._evaluators.get(index) or self._evaluator(node)
        if index is not None:
            self._evaluators[index] = evaluator
        return evaluator.run(None, inputs_by_name(node, inputs))

    def _evaluator(self, node: onnx.NodeProto) -> ReferenceEvaluator:
        values = [onnx.ValueInfoProto(name=name) for name in dict.fromkeys(node.input) if name]
        results = [onnx.ValueInfoProto(name=name) for name in node.output if name]
        graph = onnx.helper.make_graph([node], node.op_type, values, results)
        evaluator = ReferenceEvaluator(graph, opsets=self._opset)
        for operator in evaluator.rt_nodes_:
            # Attributes are float32, and so would be results such as sqrt(scale).
            for name, value in vars(operator).items():
                if isinstance(value, np.float32):
                    setattr(operator, name, float(value))
        return evaluator


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """Return a node's attributes by name."""
    return {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


def visible_inputs(node: onnx.NodeProto, inputs: list[Array | None]) -> list[Array | None]:
    """Drop cache rows of an attention node's inputs that no query attends to."""
    if node.op_type == "Attention":
        keys, values, mask = 1, 2, 3
        visible = inputs[mask] if len(inputs) > mask else None
        if visible is None or visible.shape[-1] == 1:
            return inputs
        shown = visible if visible.dtype == bool else visible != -np.inf
        columns = shown.reshape(-1, shown.shape[-1]).any(0)
        end = int(np.flatnonzero(columns).max(initial=0)) + 1
    else:
        keys, values = GqaInput.PAST_KEY, GqaInput.PAST_VALUE
        mask = GqaInput.ATTENTION_BIAS
        last = inputs[GqaInput.SEQLENS_K]
        assert last is not None
        end = int(last.max()) + 1
    cut = list(inputs)
    for i, x in enumerate(inputs):
        if x is not None and i in (keys, values):
            cut[i] = x[:, :, :end]
        elif x is not None and i == mask:
            cut[i] = x[..., :end]
    return cut


def inputs_by_name(node: onnx.NodeProto, inputs: list[Array | None]) -> dict[str, Array]:
    """Return a node's inputs by name."""
    return {n: x for n, x in zip(node.input, inputs, strict=True) if n and x is not None}


def _to_array(value: Value) -> Array:
    """Return a value as an array; a stored matrix becomes a float32 constant."""
    return materialize(value).float().numpy() if isinstance(value, torch.Tensor) else value


def _apply_lazily(node: onnx.NodeProto, inputs: list[Value | None]) -> Value | None:
    """Apply a node to a stored matrix without casting all of it; None if that is impossible."""
    first, *more_inputs = inputs
    last = inputs[-1]
    if isinstance(first, torch.Tensor):
        if node.op_type == "Cast":
            return first  # its readers cast it
        if node.op_type == "Transpose":
            return first.permute(attributes(node)["perm"])
        if node.op_type == "Reshape":
            return first.reshape(tuple(_to_array(last)))
        if (
            node.op_type == "Gather"
            and isinstance(last, np.ndarray)
            and not attributes(node).get("axis")
        ):
            rows = first[torch.from_numpy(last.reshape(-1))].double()
            return rows.reshape(*last.shape, *first.shape[1:]).numpy()
    if node.op_type == "MatMul" and isinstance(last, torch.Tensor) and isinstance(first, Array):
        return _matrix_product(torch.from_numpy(first).double(), last).numpy()
    if node.op_type == "MoE":
        logits, *matrices = (
            torch.from_numpy(x) if isinstance(x, np.ndarray) else materialize(x)
            for x in more_inputs
        )
        a, a_bias, b, b_bias = (*matrices, None)[:4]
        rows = torch.from_numpy(first).double()
        return moe_reference(rows, logits, a, a_bias, b, b_bias, attributes(node)).numpy()
    return None


def _promote(arrays: list[Array | None]) -> list[Array | None]:
    """Cast float32 mixed with float64 to float64, as the specification requires one type."""
    if any(x is not None and x.dtype == np.float64 for x in arrays):
        return cast_arrays(arrays, np.float32, np.float64)
    return arrays


def cast_arrays(arrays: list[Array | None], old: type, new: type) -> list[Array | None]:
    """Cast the arrays of one type to another."""
    return [x.astype(new) if x is not None and x.dtype == old else x for x in arrays]


def _matrix_product(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Multiply [..., T, R] by [R, C] or [E, R, C], casting a few columns at a time."""
    matrix = materialize(matrix)
    if matrix.ndim == 3:
        parts = zip(x.expand(len(matrix), *x.shape[-2:]), matrix, strict=True)
        return torch.stack([_matrix_product(rows, part) for rows, part in parts])
    width = max(1, PIECE // len(matrix))
    return torch.cat([x @ columns.double() for columns in matrix.split(width, 1)], -1)
