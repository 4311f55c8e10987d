"""Rewriting of expert layers with block-wise quantized weights: E experts, k of them per row.

ONNX Runtime's QMoE node sums the outputs of a row's experts in an order that depends on the other
rows and on threads, so that sums of three terms are not batch-invariant. Therefore each row is
passed once per expert, with that expert alone, and summed outside. 4-bit experts have another
kernel for a single row; there each row is passed twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from ..graph.nodes import MICROSOFT_DOMAIN, add_constant, insert_node, operand, producer
from ..graph.weights import view_tensor
from . import rounding
from .experts import ExpertLayer, ExpertWeights
from .graph_editor import INT8_ACCURACY_LEVEL, GraphEditor, replace_output
from .matrices import StoredTensor
from .rounding import BLOCK_SIZE, BlockMatrix
from .schemes import Scheme

_RESULT_TYPES = {"Equal": ir.DataType.BOOL, "Cast": ir.DataType.FLOAT}  # else the first input's
_INTEGER_TYPES = {8: ir.DataType.UINT8, 4: ir.DataType.UINT4}


def rewrite_experts(editor: GraphEditor, mixture: ExpertLayer, choice: Scheme) -> None:
    """Replace a layer's experts in a graph with quantized activations."""
    if mixture.is_sparse:
        _rewrite_sparse(editor, mixture, choice)
    else:
        _rewrite_dense(editor, mixture, choice)


def dequantize_experts(editor: GraphEditor, mixture: ExpertLayer, choice: Scheme) -> None:
    """Replace a layer's experts in a graph with float activations: MoE with dequantized weights.

    Not QMoE, which requires another weight layout on CUDA.
    """
    if not mixture.is_sparse:
        _rewrite_dense(editor, mixture, choice)
        return
    (node,) = mixture.nodes
    for index, tensors in zip((2, 4), store_experts(editor, mixture.experts, choice), strict=True):
        before, name = operand(node, index), f"{tensors[0].name}.wide"
        node.replace_input_with(index, _dequantized(editor, node, tensors, choice, before, name))


def store_experts(
    editor: GraphEditor, experts: ExpertWeights, choice: Scheme
) -> list[tuple[ir.ExternalTensor, ir.ExternalTensor]]:
    """Store both matrices of experts; return their bytes [E, N, G, bytes] and scales [E, N, G]."""
    pairs = []
    for matrices, weight in ((experts.first, choice.importance), (experts.last, None)):
        number, width, size = matrices.data().shape
        key = ("experts", matrices.offset, choice.bits)
        values, scales = editor.store.blocks(
            key, partial(_quantize_experts, matrices, choice, weight)
        )
        groups = number, width, size // BLOCK_SIZE
        bytes_ = ir.Shape([*groups, BLOCK_SIZE * choice.bits // 8])
        scales = view_tensor(scales, ir.Shape(groups), scales.name)
        pairs.append((view_tensor(values, bytes_, values.name), scales))
    return pairs


def _quantize_experts(
    matrices: StoredTensor, choice: Scheme, weight: np.ndarray | None
) -> BlockMatrix:
    """Quantize stacked matrices, [E, N, K]."""
    blocks = [rounding.quantize_blocks(expert.T, choice.bits, weight) for expert in matrices.data()]
    return BlockMatrix(
        np.concatenate([expert.values for expert in blocks]),
        np.concatenate([expert.scales for expert in blocks]),
    )


def _rewrite_dense(editor: GraphEditor, mixture: ExpertLayer, choice: Scheme) -> None:
    """Insert two products over all experts, with N = E * 2 * I and with K = E * I."""
    first, last = mixture.nodes
    (values, scales), (ends, sizes) = store_experts(editor, mixture.experts, choice)
    number, width, groups, size = ends.shape.numpy()
    wide = number * values.shape.numpy()[1]
    flat = [wide, *values.shape.numpy()[2:]]
    rows = editor.external(view_tensor(values, ir.Shape(flat), f"{values.name}.flat"))
    scale = editor.external(view_tensor(scales, ir.Shape(flat[:2]), f"{scales.name}.flat"))
    _block_product(editor, first, [rows, scale], values.shape.numpy()[2] * BLOCK_SIZE, wide, choice)
    turned = []
    for tensor, order, shape in (
        (ends, [1, 0, 2, 3], [width, number * groups, size]),
        (sizes, [1, 0, 2], [width, number * groups]),
    ):
        name, value = f"{tensor.name}.turned", editor.external(tensor)
        moved = insert_node(last, "Transpose", [value], name, perm=order)
        dims = add_constant(editor.graph, np.array(shape, np.int64), f"{name}.dims")
        whole = insert_node(last, "Reshape", [moved, dims], f"{name}.whole")
        moved.dtype = whole.dtype = tensor.dtype
        turned.append(whole)
    _block_product(editor, last, turned, number * groups * BLOCK_SIZE, width, choice)


def _block_product(
    editor: GraphEditor,
    node: ir.Node,
    stored: list[ir.Value],
    size: int,
    width: int,
    choice: Scheme,
) -> None:
    """Replace a product by a block-wise one, x [T, K] times [K, N]."""
    x, output = operand(node, 0), node.outputs[0]
    name = f"{output.name}.int{choice.bits}"
    product = editor.node(
        node, "MatMulNBits", [x, *stored], name, output, domain=MICROSOFT_DOMAIN, K=size, N=width,
        bits=choice.bits, block_size=BLOCK_SIZE, accuracy_level=INT8_ACCURACY_LEVEL,
    )  # fmt: skip
    replace_output(output, product)


def _rewrite_sparse(editor: GraphEditor, mixture: ExpertLayer, choice: Scheme) -> None:
    """Insert a QMoE node over a copy of each row per expert, [k, T, H], and sum the results."""
    (node,) = mixture.nodes
    routing, x, output = _surrounding_values(node)
    before = _NodeInserter(editor, node)
    first, last = before.ints("0", 0), before.ints("-1", -1)
    number, k = mixture.experts.first.data().shape[0], node.attributes["k"].as_int()
    times = 1 if choice.bits == 8 else 2
    weights, chosen = before.largest(routing, k)
    single_logits = _single_expert_logits(before, chosen, last, number)
    logits = single_logits
    if times > 1:
        logits = before.put("Concat", [single_logits] * times, "twice", axis=0)
    copies = before.put("Unsqueeze", [x, first], "one")
    copies = before.put("Expand", [copies, before.ints("copies", times * k, 1, 1)], "x")
    expert_rows = _insert_qmoe(before, mixture, choice, copies, logits)
    if times > 1:
        expert_rows = before.put(
            "Slice", [expert_rows, first, before.ints("count", k), first], "half"
        )
    by_expert = before.put("Transpose", [weights], "turned", perm=[1, 0])
    by_row = before.put("Unsqueeze", [by_expert, last], "by_row")
    weighed = before.put("Mul", [expert_rows, by_row], "weighed")
    whole = before.put("ReduceSum", [weighed, first], "sum", keepdims=0)
    whole.shape = output.shape
    replace_output(output, whole)


@dataclass(frozen=True)
class _NodeInserter:
    """Inserter of nodes before another node, with names derived from its output's."""

    editor: GraphEditor
    node: ir.Node

    def put(
        self, op: str, inputs: list[ir.Value | None], label: str, **attributes: Any
    ) -> ir.Value:
        output = insert_node(self.node, op, inputs, self._named(label), **attributes)
        assert inputs[0] is not None
        output.dtype = _RESULT_TYPES.get(op, inputs[0].dtype)
        return output

    def ints(self, label: str, *numbers: int) -> ir.Value:
        return add_constant(self.editor.graph, np.array(numbers, np.int64), self._named(label))

    def largest(self, x: ir.Value, k: int) -> tuple[ir.Value, ir.Value]:
        """Insert TopK; return the k largest values of each row and their indices, 2 * [T, k]."""
        top = ir.node("TopK", [x, self.ints("k", k)], {"axis": -1}, num_outputs=2)
        self.editor.graph.insert_before(self.node, top)
        values, experts = top.outputs
        values.name, experts.name = self._named("weights"), self._named("chosen")
        values.dtype, experts.dtype = x.dtype, ir.DataType.INT64
        return values, experts

    def _named(self, label: str) -> str:
        return f"{self.node.outputs[0].name}.{label}"


def _single_expert_logits(
    before: _NodeInserter, chosen: ir.Value, last: ir.Value, number: int
) -> ir.Value:
    """Insert router logits that select one expert per row. [T, k] -> [k * T, E]"""
    by_expert = before.put("Transpose", [chosen], "by_expert", perm=[1, 0])
    each = before.put("Unsqueeze", [by_expert, last], "each")
    hit = before.put("Equal", [each, before.ints("experts", *range(number))], "hit")
    single_logits = before.put("Cast", [hit], "alone", to=ir.DataType.FLOAT)
    return before.put("Reshape", [single_logits, before.ints("rows", -1, number)], "logits")


def _insert_qmoe(
    before: _NodeInserter, mixture: ExpertLayer, choice: Scheme, x: ir.Value, logits: ir.Value
) -> ir.Value:
    """Insert a QMoE node with one expert per row. [k, T, H]"""
    editor, (node,) = before.editor, mixture.nodes
    (values, scales), (ends, sizes) = [
        (editor.external(_join_bytes(v, choice)), editor.external(s))
        for v, s in store_experts(editor, mixture.experts, choice)
    ]
    biases = [node.inputs[i] if i < len(node.inputs) else None for i in (3, 5)]
    inputs = [x, logits, values, scales, biases[0], ends, sizes, biases[1]]
    attributes: dict[str, Any] = {n: a.value for n, a in node.attributes.items()} | {"k": 1}
    attributes |= {"expert_weight_bits": choice.bits, "block_size": BLOCK_SIZE}
    if choice.bits == 4:  # implied for 8 bits, where ONNX Runtime 1.30 rejects the attribute
        attributes["accuracy_level"] = INT8_ACCURACY_LEVEL
    return before.put("QMoE", inputs, "each_one", domain=MICROSOFT_DOMAIN, **attributes)


def _surrounding_values(node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return the routing weights [T, E], input [T, H] and output [T, H] of a MoE layer.

    The nodes around the MoE node are those of `tracing.experts`.
    """
    twice, logits = (producer(value, "Concat") for value in node.inputs[:2])
    log = producer(logits.inputs[0], "Log") if logits is not None else None
    rows = producer(twice.inputs[0], "Unsqueeze") if twice is not None else None
    assert log is not None
    assert rows is not None
    ((picked, _),) = node.outputs[0].uses()
    ((scaled, _),) = picked.outputs[0].uses()
    assert (picked.op_type, scaled.op_type) == ("Gather", "Mul")
    return operand(log, 0), operand(rows, 0), scaled.outputs[0]


def _join_bytes(tensor: ir.ExternalTensor, choice: Scheme) -> ir.ExternalTensor:
    """View the bytes of a row as one axis. [E, N, G, bytes] -> [E, N, bytes]"""
    *outer, groups, size = tensor.shape.numpy()
    return view_tensor(tensor, ir.Shape([*outer, groups * size]), f"{tensor.name}.joined")


def _dequantized(
    editor: GraphEditor,
    before: ir.Node,
    tensors: tuple[ir.ExternalTensor, ir.ExternalTensor],
    choice: Scheme,
    like: ir.Value,
    name: str,
) -> ir.Value:
    """Insert the dequantization of stacked matrices. [E, N, K]"""
    values, scales = tensors
    *outer, groups, _ = values.shape.numpy()
    integer_type = _INTEGER_TYPES[choice.bits]
    whole = view_tensor(
        values, ir.Shape([*outer, groups * BLOCK_SIZE]), f"{values.name}.integers", integer_type
    )
    zeros = editor.store.zero_points((*outer, groups), choice.bits)
    zero = view_tensor(zeros, ir.Shape([*outer, groups]), f"{values.name}.zero", integer_type)
    inputs = [editor.external(tensor) for tensor in (whole, scales, zero)]
    dequantized = editor.node(
        before, "DequantizeLinear", inputs, name, inputs[0], axis=2, block_size=BLOCK_SIZE
    )
    dequantized.shape = like.shape
    return dequantized
