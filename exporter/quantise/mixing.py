"""The nodes of experts whose matrices are integers in blocks: E experts, k of them a row.

ONNX Runtime's QMoE node adds up what the experts of a row give in an order that depends on the rows
beside it and on threads: of three terms the last bits are others. So every row goes in once for
each of its experts, alone with it, and the sum is made outside. An expert of 4 bits has another
kernel for a single row, with other last bits: there every row goes in twice.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from ..graph.nodes import constant, insert, producer
from ..graph.weights import seen_as
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
        scales = seen_as(scales, ir.Shape(groups), scales.name)
        found.append((seen_as(values, bytes_, values.name), scales))
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
    rows = editor.external(seen_as(values, ir.Shape(flat), f"{values.name}.flat"))
    scale = editor.external(seen_as(scales, ir.Shape(flat[:2]), f"{scales.name}.flat"))
    _product(editor, first, [rows, scale], values.shape.numpy()[2] * BLOCK, wide, choice)
    turned = []
    for tensor, order, shape in (
        (ends, [1, 0, 2, 3], [width, number * groups, size]),
        (sizes, [1, 0, 2], [width, number * groups]),
    ):
        name, value = f"{tensor.name}.turned", editor.external(tensor)
        moved = insert(last, "Transpose", [value], name, perm=order)
        dims = constant(editor.graph, np.array(shape, np.int64), f"{name}.dims")
        whole = insert(last, "Reshape", [moved, dims], f"{name}.whole")
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
    name, number = node.outputs[0].name, mixture.experts.first.numbers().shape[0]
    k = node.attributes["k"].as_int()
    times = 1 if choice.bits == 8 else 2

    def put(op_type: str, inputs: list[ir.Value | None], label: str, **attributes: Any) -> ir.Value:
        found = insert(node, op_type, inputs, f"{name}.{label}", **attributes)
        assert inputs[0] is not None
        found.dtype = _MADE.get(op_type, inputs[0].dtype)
        return found

    def ints(label: str, *numbers: int) -> ir.Value:
        return constant(editor.graph, np.array(numbers, np.int64), f"{name}.{label}")

    first, last = ints("0", 0), ints("-1", -1)
    top = ir.node("TopK", [routing, ints("k", k)], {"axis": -1}, num_outputs=2)
    editor.graph.insert_before(node, top)
    weights, chosen = top.outputs
    weights.name, chosen.name = f"{name}.weights", f"{name}.chosen"
    weights.dtype, chosen.dtype = routing.dtype, ir.DataType.INT64
    experts = ints("experts", *range(number))
    by_expert = put("Transpose", [chosen], "by_expert", perm=[1, 0])
    hit = put("Equal", [put("Unsqueeze", [by_expert, last], "each"), experts], "hit")
    alone = put("Cast", [hit], "alone", to=ir.DataType.FLOAT)
    logits = put("Reshape", [alone, ints("rows", -1, number)], "logits")
    if times > 1:
        logits = put("Concat", [logits] * times, "twice", axis=0)
    copies = put(
        "Expand", [put("Unsqueeze", [x, first], "one"), ints("copies", times * k, 1, 1)], "x"
    )
    (values, scales), (ends, sizes) = [
        (editor.external(_joined(v, choice)), editor.external(s))
        for v, s in stored(editor, mixture.experts, choice)
    ]
    biases = [node.inputs[i] if i < len(node.inputs) else None for i in (3, 5)]
    given = [copies, logits, values, scales, biases[0], ends, sizes, biases[1]]
    attributes: dict[str, Any] = {n: a.value for n, a in node.attributes.items()} | {"k": 1}
    attributes |= {"expert_weight_bits": choice.bits, "block_size": BLOCK}
    if choice.bits == 4:  # those of 8 bits know no other, and ONNX Runtime 1.30 not the attribute
        attributes["accuracy_level"] = IN_BYTES
    made = put("QMoE", given, "each_one", domain=MICROSOFT, **attributes)
    if times > 1:
        made = put("Slice", [made, first, ints("count", k), first], "half")
    by_row = put("Unsqueeze", [put("Transpose", [weights], "turned", perm=[1, 0]), last], "by_row")
    weighed = put("Mul", [made, by_row], "weighed")
    whole = put("ReduceSum", [weighed, first], "sum", keepdims=0)
    whole.shape = output.shape
    take_over(output, whole)


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
    return seen_as(tensor, ir.Shape([*outer, groups * size]), f"{tensor.name}.joined")


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
    whole = seen_as(values, ir.Shape([*outer, groups * BLOCK]), f"{values.name}.integers", kind)
    zeros = editor.store.middles((*outer, groups), choice.bits)
    zero = seen_as(zeros, ir.Shape([*outer, groups]), f"{values.name}.zero", kind)
    inputs = [editor.external(tensor) for tensor in (whole, scales, zero)]
    found = editor.node(
        before, "DequantizeLinear", inputs, name, inputs[0], axis=2, block_size=BLOCK
    )
    found.shape = like.shape
    return found
