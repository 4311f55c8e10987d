"""Rows of GroupQueryAttention in graphs of a fixed pass length.

A traced graph duplicates the last row for attention (`TracedPass.rows`), which passes of several
tokens do not need. A step, with one token, duplicates the token instead where that is cheaper: in
16-bit arithmetic on a GPU, whose kernels read the weights once for both rows.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from specedge.bundle.graph_variants import attention_ops, compute_dtype
from specedge.bundle.precision import DTYPE

from .lm_head import INPUT
from .nodes import (
    LAST_POSITIONS,
    add_constant,
    insert_node,
    operand,
    producer_through_casts,
    reader_through_casts,
)


def repeats_token(graph: ir.Graph, ops: str) -> bool:
    """Return True if the step of a graph variant duplicates its token.

    MatMulNBits has no kernel for two rows before ONNX Runtime 1.31, and dequantizes the weights.
    """
    is_for_gpu = attention_ops(ops) == "gqa" and compute_dtype(ops) != DTYPE
    return is_for_gpu and not any(node.op_type == "MatMulNBits" for node in graph)


def repeat_token(graph: ir.Graph) -> None:
    """Duplicate the token of a pass, and compute the logits of the first one only."""
    ids = graph.inputs[0]
    users = list(ids.uses())
    twice = insert_node(graph[0], "Concat", [ids, ids], f"{ids.name}.twice", ids, axis=1)
    for user, index in users:
        user.replace_input_with(index, twice)
    (first,) = (value for value in graph.inputs if value.name == INPUT)
    end = add_constant(graph, np.array([1]), f"{INPUT}.next")
    for user, _ in first.uses():
        user.replace_input_with(2, end)
    first.replace_all_uses_with(add_constant(graph, np.array([0]), f"{INPUT}.first"))
    graph.inputs.remove(first)


def remove_repeated_rows(graph: ir.Graph) -> None:
    """Remove the duplicate of the last row from the attention of passes of several tokens."""
    nodes = [node for node in graph if node.op_type == "GroupQueryAttention"]
    gathers = [producer_through_casts(node.inputs[0], "Gather") for node in nodes]
    for rows in {operand(gather, 1) for gather in filter(None, gathers)}:
        for user, _ in rows.uses():
            user.outputs[0].replace_all_uses_with(operand(user, 0))
    for node in nodes:
        without_last = reader_through_casts(node.outputs[0])
        assert without_last is not None
        without_last.outputs[0].replace_all_uses_with(operand(without_last, 0))
    one = add_constant(graph, np.array(1, np.int32), "duplicate")
    for last in dict.fromkeys(operand(node, LAST_POSITIONS) for node in nodes):
        users = list(last.uses())
        before = next(node for node in graph if node in {user for user, _ in users})
        earlier = insert_node(before, "Sub", [last, one], f"{last.name}.single", last)
        for user, index in users:
            user.replace_input_with(index, earlier)
    for value in (value for node in graph for value in node.outputs):
        if value.shape is not None:
            value.shape = ir.Shape(["T" if str(d) == "T + 1" else d for d in value.shape])
