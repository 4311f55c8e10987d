"""The nodes of experts whose matrices are integers in blocks: E experts, k of them a row.

ONNX Runtime's QMoE node adds up what the experts of a row give in an order that depends on the rows
beside it and on threads: of three terms the last bits are others. So every row goes in once for
each of its experts, alone with it, and the sum is made outside. An expert of 4 bits has another
kernel for a single row, with other last bits: there every row goes in twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from ..graph.nodes import add_constant, insert_node, producer
from ..graph.weights import view_tensor
from . import rounding
from .choosing import Choice
from .editing import IN_BYTES, MICROSOFT, Editor, take_over
from .experts import Experts, Mixture
from .matrices import Stored
from .rounding import BLOCK, Blocks

_MADE = {"Equal": ir.DataType.BOOL, "Cast": ir.DataType.FLOAT}  # others make what they read
_KINDS = {8: ir.DataType.UINT8, 4: ir.DataType.UINT4}


def rewrite(editor: Editor, mixture: Mixture, choice: Choice) -> None:
    """Replace a layer's experts in a graph that computes in float32."""
    if mixture.is_sparse:
        _sparse(editor, mixture, choice)
    else:
        _dense(editor, mixture, choice)


def widen(editor: Editor, mixture: Mixture, choice: Choice) -> None:
    """Replace them in a graph of any type: a MoE node reads widened integers.

    CUDA's QMoE wants an order of its own.
    """
    if not mixture.is_sparse:
        _dense(editor, mixture, choice)
        return
    (node,) = mixture.nodes
    for index, tensors in zip((2, 4), stored(editor, mixture.experts, choice), strict=True):
        before, name = node.inputs[index], f"{tensors[0].name}.wide"
        assert before is not None
        node.replace_input_with(index, _widened(editor, node, tensors, choice, before, name))


def stored(
    editor: Editor, experts: Experts, choice: Choice
) -> list[tuple[ir.ExternalTensor, ir.ExternalTensor]]:
    """Where both matrices' bytes lie, [E, N, G, bytes], and their scales, [E, N, G]."""
    found = []
    for matrices, weight in ((experts.first, choice.weight), (experts.last, None)):
        number, width, size = matrices.numbers().shape
        key = ("experts", matrices.place, choice.bits)
        values, scales = editor.store.blocks(key, partial(_blocks, matrices, choice, weight))
        groups = number, width, size // BLOCK
        bytes_ = ir.Shape([*groups, BLOCK * choice.bits // 8])
        scales = view_tensor(scales, ir.Shape(groups), scales.name)
        found.append((view_tensor(values, bytes_, values.name), scales))
    return found


def _blocks(matrices: Stored, choice: Choice, weight: np.ndarray | None) -> Blocks:
    """Matrices [E, N, K] below each other."""
    found = [rounding.blocks(one.T, choice.bits, weight) for one in matrices.numbers()]
    return Blocks(
        np.concatenate([one.values for one in found]), np.concatenate([one.scales for one in found])
    )


def _dense(editor: Editor, mixture: Mixture, choice: Choice) -> None:
    """Two products of all experts side by side: of N = E * 2 * I, and of K = E * I."""
    first, last = mixture.nodes
    (values, scales), (ends, sizes) = stored(editor, mixture.experts, choice)
    number, width, groups, size = ends.shape.numpy()
    wide = number * values.shape.numpy()[1]
    flat = [wide, *values.shape.numpy()[2:]]
    rows = editor.external(view_tensor(values, ir.Shape(flat), f"{values.name}.flat"))
    scale = editor.external(view_tensor(scales, ir.Shape(flat[:2]), f"{scales.name}.flat"))
    _product(editor, first, [rows, scale], values.shape.numpy()[2] * BLOCK, wide, choice)
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
    _product(editor, last, turned, number * groups * BLOCK, width, choice)


def _product(
    editor: Editor, node: ir.Node, stored: list[ir.Value], size: int, width: int, choice: Choice
) -> None:
    """x [T, K] times a matrix [K, N] in blocks, in a node's place."""
    (x, _), output = node.inputs[:2], node.outputs[0]
    assert x is not None
    name = f"{output.name}.int{choice.bits}"
    found = editor.node(
        node, "MatMulNBits", [x, *stored], name, output, domain=MICROSOFT, K=size, N=width,
        bits=choice.bits, block_size=BLOCK, accuracy_level=IN_BYTES,
    )  # fmt: skip
    take_over(output, found)


def _sparse(editor: Editor, mixture: Mixture, choice: Choice) -> None:
    """One QMoE node over every row once for each of its experts, [k, T, H], and their sum."""
    (node,) = mixture.nodes
    routing, x, output = _around(node)
    before = _Before(editor, node)
    first, last = before.ints("0", 0), before.ints("-1", -1)
    number, k = mixture.experts.first.numbers().shape[0], node.attributes["k"].as_int()
    times = 1 if choice.bits == 8 else 2
    weights, chosen = before.largest(routing, k)
    alone = _alone(before, chosen, last, number)
    logits = before.put("Concat", [alone] * times, "twice", axis=0) if times > 1 else alone
    copies = before.put("Unsqueeze", [x, first], "one")
    copies = before.put("Expand", [copies, before.ints("copies", times * k, 1, 1)], "x")
    made = _qmoe(before, mixture, choice, copies, logits)
    if times > 1:
        made = before.put("Slice", [made, first, before.ints("count", k), first], "half")
    by_expert = before.put("Transpose", [weights], "turned", perm=[1, 0])
    by_row = before.put("Unsqueeze", [by_expert, last], "by_row")
    weighed = before.put("Mul", [made, by_row], "weighed")
    whole = before.put("ReduceSum", [weighed, first], "sum", keepdims=0)
    whole.shape = output.shape
    take_over(output, whole)


@dataclass(frozen=True)
class _Before:
    """Nodes that are put before another one, and named after what it gives."""

    editor: Editor
    node: ir.Node

    def put(
        self, op: str, inputs: list[ir.Value | None], label: str, **attributes: Any
    ) -> ir.Value:
        found = insert_node(self.node, op, inputs, self._named(label), **attributes)
        assert inputs[0] is not None
        found.dtype = _MADE.get(op, inputs[0].dtype)
        return found

    def ints(self, label: str, *numbers: int) -> ir.Value:
        return add_constant(self.editor.graph, np.array(numbers, np.int64), self._named(label))

    def largest(self, x: ir.Value, k: int) -> tuple[ir.Value, ir.Value]:
        """The k largest of each row and their places, 2 * [T, k]."""
        top = ir.node("TopK", [x, self.ints("k", k)], {"axis": -1}, num_outputs=2)
        self.editor.graph.insert_before(self.node, top)
        values, places = top.outputs
        values.name, places.name = self._named("weights"), self._named("chosen")
        values.dtype, places.dtype = x.dtype, ir.DataType.INT64
        return values, places

    def _named(self, label: str) -> str:
        return f"{self.node.outputs[0].name}.{label}"


def _alone(before: _Before, chosen: ir.Value, last: ir.Value, number: int) -> ir.Value:
    """Logits of which each row's are 1 at one expert: [T, k] -> [k * T, E]"""
    by_expert = before.put("Transpose", [chosen], "by_expert", perm=[1, 0])
    each = before.put("Unsqueeze", [by_expert, last], "each")
    hit = before.put("Equal", [each, before.ints("experts", *range(number))], "hit")
    alone = before.put("Cast", [hit], "alone", to=ir.DataType.FLOAT)
    return before.put("Reshape", [alone, before.ints("rows", -1, number)], "logits")


def _qmoe(
    before: _Before, mixture: Mixture, choice: Choice, x: ir.Value, logits: ir.Value
) -> ir.Value:
    """What the one expert of each row gives, in integers. [k, T, H]"""
    editor, (node,) = before.editor, mixture.nodes
    (values, scales), (ends, sizes) = [
        (editor.external(_joined(v, choice)), editor.external(s))
        for v, s in stored(editor, mixture.experts, choice)
    ]
    biases = [node.inputs[i] if i < len(node.inputs) else None for i in (3, 5)]
    given = [x, logits, values, scales, biases[0], ends, sizes, biases[1]]
    attributes: dict[str, Any] = {n: a.value for n, a in node.attributes.items()} | {"k": 1}
    attributes |= {"expert_weight_bits": choice.bits, "block_size": BLOCK}
    if choice.bits == 4:  # those of 8 bits know no other, and ONNX Runtime 1.30 not the attribute
        attributes["accuracy_level"] = IN_BYTES
    return before.put("QMoE", given, "each_one", domain=MICROSOFT, **attributes)


def _around(node: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Of a MoE node as `tracing.experts` writes it: the weight of each expert, [T, E], the rows
    that it gets twice, [T, H], and what becomes of them, [T, H].
    """
    twice, logits = (producer(value, "Concat") for value in node.inputs[:2])
    log = producer(logits.inputs[0], "Log") if logits is not None else None
    rows = producer(twice.inputs[0], "Unsqueeze") if twice is not None else None
    assert log is not None
    assert rows is not None
    ((picked, _),) = node.outputs[0].uses()
    ((scaled, _),) = picked.outputs[0].uses()
    assert (picked.op_type, scaled.op_type) == ("Gather", "Mul")
    routing, x = log.inputs[0], rows.inputs[0]
    assert routing is not None
    assert x is not None
    return routing, x, scaled.outputs[0]


def _joined(tensor: ir.ExternalTensor, choice: Choice) -> ir.ExternalTensor:
    """Bytes of a row beside each other. [E, N, G, bytes] -> [E, N, bytes]"""
    *outer, groups, size = tensor.shape.numpy()
    return view_tensor(tensor, ir.Shape([*outer, groups * size]), f"{tensor.name}.joined")


def _widened(
    editor: Editor,
    before: ir.Node,
    tensors: tuple[ir.ExternalTensor, ir.ExternalTensor],
    choice: Choice,
    like: ir.Value,
    name: str,
) -> ir.Value:
    """Integers of a stored block times their scales. [E, N, K]"""
    values, scales = tensors
    *outer, groups, _ = values.shape.numpy()
    kind = _KINDS[choice.bits]
    whole = view_tensor(values, ir.Shape([*outer, groups * BLOCK]), f"{values.name}.integers", kind)
    zeros = editor.store.middles((*outer, groups), choice.bits)
    zero = view_tensor(zeros, ir.Shape([*outer, groups]), f"{values.name}.zero", kind)
    inputs = [editor.external(tensor) for tensor in (whole, scales, zero)]
    found = editor.node(
        before, "DequantizeLinear", inputs, name, inputs[0], axis=2, block_size=BLOCK
    )
    found.shape = like.shape
    return found
