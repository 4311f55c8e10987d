"""Rewriting of expert layers with block-wise quantized weights: E experts, k of them per row.

ONNX Runtime's QMoE node sums the outputs of a row's experts in an order that depends on the other
rows and on threads, so that sums of three terms are not batch-invariant. Therefore each row is
passed once per expert, with that expert alone, and summed outside. 4-bit experts have another
kernel for a single row; there each row is passed twice.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from ..checkpoint.quantized_tensors import BlockLayout
from ..graph.external_data import view_tensor
from ..graph.nodes import (
    MICROSOFT_DOMAIN,
    add_constant,
    insert_node,
    operand,
    producer,
    replace_output,
)
from . import rounding
from .checkpoint_experts import ExpertStack
from .experts import ExpertLayer, ExpertWeights
from .graph_editor import INT8_ACCURACY_LEVEL, GraphEditor
from .matrices import StoredTensor
from .rounding import BLOCK_SIZE, IntegerMatrix
from .schemes import Scheme

_RESULT_TYPES = {"Equal": ir.DataType.BOOL, "Cast": ir.DataType.FLOAT}  # else the first input's
_INTEGER_TYPES = {8: ir.DataType.UINT8, 4: ir.DataType.UINT4}


@dataclass(frozen=True)
class StoredStack:
    """Stored matrices of all experts, [E, N, K] in G blocks along K.

    Attributes:
        layout: Bits of the integers, and size of the blocks.
        values: Packed integers, [E, N, G, bytes].
        scales: [E, N, G].
        zero_points: Packed, [E, N, bytes]; None for 2 ** (bits - 1).
    """

    layout: BlockLayout
    values: ir.ExternalTensor
    scales: ir.ExternalTensor
    zero_points: ir.ExternalTensor | None = None

    @property
    def tensors(self) -> list[ir.ExternalTensor]:
        tensors = (self.values, self.scales, self.zero_points)
        return [tensor for tensor in tensors if tensor is not None]


def rewrite_experts(
    editor: GraphEditor, mixture: ExpertLayer, choice: Scheme, has_float_inputs: bool
) -> None:
    """Replace a layer's experts in a graph with quantized or float activations.

    With float activations a MoE node reads dequantized weights: QMoE requires another weight layout
    on CUDA.
    """
    stacks = store_experts(editor, mixture.experts, choice)
    if not mixture.is_sparse:
        is_exact = has_float_inputs and choice.experts is not None
        _rewrite_dense(editor, mixture, stacks, 0 if is_exact else INT8_ACCURACY_LEVEL)
    elif not has_float_inputs:
        _rewrite_sparse(editor, mixture, stacks)
    else:
        (node,) = mixture.nodes
        for index, stack in zip((2, 4), stacks, strict=True):
            before, name = operand(node, index), f"{stack.values.name}.wide"
            node.replace_input_with(index, _dequantized(editor, node, stack, before, name))


def store_experts(
    editor: GraphEditor, experts: ExpertWeights, choice: Scheme
) -> tuple[StoredStack, StoredStack]:
    """Quantize and store both matrices of experts, or store those of a checkpoint."""
    if (kept := choice.experts) is not None:
        pairs = zip(experts.key, kept.stacks, strict=True)
        first, last = (_store_kept(editor, offset, stack, kept.layout) for offset, stack in pairs)
        return first, last
    stacks = []
    for matrices, weight in ((experts.first, choice.importance), (experts.last, None)):
        number, width, size = matrices.shape
        key = ("experts", matrices.offset, choice.bits)
        values, scales = editor.store.matrix(
            key, partial(_quantize_experts, matrices, choice, weight)
        )
        groups = number, width, size // BLOCK_SIZE
        bytes_ = ir.Shape([*groups, BLOCK_SIZE * choice.bits // 8])
        stacks.append(
            StoredStack(
                BlockLayout(choice.bits, BLOCK_SIZE),
                view_tensor(values, bytes_, values.name),
                view_tensor(scales, ir.Shape(groups), scales.name),
            )
        )
    first, last = stacks
    return first, last


def _store_kept(
    editor: GraphEditor, offset: int, stack: ExpertStack, layout: BlockLayout
) -> StoredStack:
    """Store the matrices of all experts of a checkpoint."""
    key, convert = ("kept experts", offset), functools.cache(lambda: stack.blocks(layout))
    values, scales = editor.store.matrix(key, lambda: convert()[0])
    points = None
    if stack.has_zero_points:
        points = editor.store.array(
            ("zero points", key), lambda: convert()[1], f"{values.name}.zero_points"
        )
    return StoredStack(layout, values, scales, points)


def _quantize_experts(
    matrices: StoredTensor, choice: Scheme, weight: np.ndarray | None
) -> IntegerMatrix:
    """Quantize stacked matrices, [E, N, K]."""
    experts = matrices.data()
    return rounding.join(
        (rounding.quantize_blocks(expert.T, choice.bits, weight) for expert in experts), 0
    )


def _rewrite_dense(
    editor: GraphEditor,
    mixture: ExpertLayer,
    stacks: tuple[StoredStack, StoredStack],
    accuracy_level: int,
) -> None:
    """Insert two products over all experts, with N = E * 2 * I and with K = E * I."""
    (first, last), (first_stack, last_stack) = mixture.nodes, stacks
    number, width, groups, _ = first_stack.values.shape.numpy()
    rows = []
    for tensor in first_stack.tensors:
        shape = ir.Shape([number * width, *tensor.shape.numpy()[2:]])
        rows.append(editor.external(view_tensor(tensor, shape, f"{tensor.name}.flat")))
    layout = first_stack.layout
    _block_product(editor, first, rows, groups, number * width, layout, accuracy_level)
    _, width, groups, _ = last_stack.values.shape.numpy()
    turned = []
    for tensor in last_stack.tensors:
        _, _, size, *rest = tensor.shape.numpy()
        name, value = f"{tensor.name}.turned", editor.external(tensor)
        order = [1, 0, 2, 3][: len(tensor.shape)]
        moved = insert_node(last, "Transpose", [value], name, perm=order)
        shape = np.array([width, number * size, *rest], np.int64)
        dims = add_constant(editor.graph, shape, f"{name}.dims")
        whole = insert_node(last, "Reshape", [moved, dims], f"{name}.whole")
        moved.dtype = whole.dtype = tensor.dtype
        turned.append(whole)
    _block_product(editor, last, turned, number * groups, width, layout, accuracy_level)


def _block_product(
    editor: GraphEditor,
    node: ir.Node,
    inputs: list[ir.Value],
    groups: int,
    width: int,
    layout: BlockLayout,
    accuracy_level: int,
) -> None:
    """Replace a product by a block-wise one, x [T, K] times [K, N]."""
    x, output = operand(node, 0), node.outputs[0]
    name = f"{output.name}.int{layout.bits}"
    product = editor.node(
        node, "MatMulNBits", [x, *inputs], name, output, domain=MICROSOFT_DOMAIN,
        K=groups * layout.block_size, N=width, bits=layout.bits, block_size=layout.block_size,
        accuracy_level=accuracy_level,
    )  # fmt: skip
    replace_output(output, product)


def _rewrite_sparse(
    editor: GraphEditor, mixture: ExpertLayer, stacks: tuple[StoredStack, StoredStack]
) -> None:
    """Insert a QMoE node over a copy of each row per expert, [k, T, H], and sum the results."""
    (node,) = mixture.nodes
    routing, x, output = _surrounding_values(node)
    before = _NodeInserter(editor, node)
    first, last = before.ints("0", 0), before.ints("-1", -1)
    number, k = mixture.experts.first.shape[0], node.attributes["k"].as_int()
    times = 1 if stacks[0].layout.bits == 8 else 2
    weights, chosen = before.largest(routing, k)
    single_logits = _single_expert_logits(before, chosen, last, number)
    logits = single_logits
    if times > 1:
        logits = before.put("Concat", [single_logits] * times, "twice", axis=0)
    copies = before.put("Unsqueeze", [x, first], "one")
    copies = before.put("Expand", [copies, before.ints("copies", times * k, 1, 1)], "x")
    expert_rows = _insert_qmoe(before, node, stacks, copies, logits)
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
    before: _NodeInserter,
    node: ir.Node,
    stacks: tuple[StoredStack, StoredStack],
    x: ir.Value,
    logits: ir.Value,
) -> ir.Value:
    """Insert a QMoE node with one expert per row. [k, T, H]"""
    editor, layout = before.editor, stacks[0].layout
    biases = [node.inputs[i] if i < len(node.inputs) else None for i in (3, 5)]
    inputs: list[ir.Value | None] = [x, logits]
    for stack, bias in zip(stacks, biases, strict=True):
        inputs += [editor.external(_join_bytes(stack.values)), editor.external(stack.scales), bias]
    if any(stack.zero_points is not None for stack in stacks):
        points = [stack.zero_points for stack in stacks]
        inputs += [None] * 3  # a third matrix, which is joined with the first
        inputs += [None if tensor is None else editor.external(tensor) for tensor in points]
    attributes: dict[str, Any] = {n: a.value for n, a in node.attributes.items()} | {"k": 1}
    attributes |= {"expert_weight_bits": layout.bits, "block_size": layout.block_size}
    if layout.bits == 4:  # implied for 8 bits, where ONNX Runtime 1.30 rejects the attribute
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


def _join_bytes(tensor: ir.ExternalTensor) -> ir.ExternalTensor:
    """View the bytes of a row as one axis. [E, N, G, bytes] -> [E, N, bytes]"""
    *outer, groups, size = tensor.shape.numpy()
    return view_tensor(tensor, ir.Shape([*outer, groups * size]), f"{tensor.name}.joined")


def _dequantized(
    editor: GraphEditor,
    before: ir.Node,
    stack: StoredStack,
    like: ir.Value,
    name: str,
) -> ir.Value:
    """Insert the dequantization of stacked matrices. [E, N, K]"""
    values, bits, block_size = stack.values, stack.layout.bits, stack.layout.block_size
    *outer, groups, _ = values.shape.numpy()
    integer_type = _INTEGER_TYPES[bits]
    whole = view_tensor(
        values, ir.Shape([*outer, groups * block_size]), f"{values.name}.integers", integer_type
    )
    zeros = stack.zero_points
    if zeros is None:
        shape, middles = (*outer, groups), 0x80 if bits == 8 else 0x88
        zeros = editor.store.array(
            ("middles", shape, bits),
            lambda: np.full(math.prod(shape) * bits // 8, middles, np.uint8),
            "middles",
        )
    zero = view_tensor(zeros, ir.Shape([*outer, groups]), f"{values.name}.zero", integer_type)
    inputs = [editor.external(tensor) for tensor in (whole, stack.scales, zero)]
    dequantized = editor.node(
        before, "DequantizeLinear", inputs, name, inputs[0], axis=2, block_size=block_size
    )
    dequantized.shape = like.shape
    return dequantized
