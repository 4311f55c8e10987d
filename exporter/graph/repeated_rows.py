"""Removal of the row that a traced graph duplicates for attention (`TracedPass.rows`).

Passes of several tokens do not need it. On a GPU, a host pads a single token to a pass of two
instead (`ModelEntry.min_gpu_length`), which takes no further node in any layer.
"""

from __future__ import annotations

import onnx_ir as ir

from .nodes import GqaInput, operand, producer, producer_through_casts, reader_through_casts


def remove_repeated_rows(graph: ir.Graph) -> None:
    """Remove the duplicate of the last row from attention nodes that have one."""
    gathers = {
        node: gather
        for node in graph
        if node.op_type in ("GroupQueryAttention", "Attention")
        and (gather := producer_through_casts(operand(node, GqaInput.QUERY), "Gather"))
    }
    if not gathers:
        return
    for rows in {operand(gather, 1) for gather in gathers.values()}:
        for user, _ in rows.uses():
            user.outputs[0].replace_all_uses_with(operand(user, 0))
    for node in gathers:
        without_last = reader_through_casts(node.outputs[0])
        if without_last is not None and without_last.op_type == "Transpose":  # heads of Attention
            without_last = reader_through_casts(without_last.outputs[0])
        assert without_last is not None
        without_last.outputs[0].replace_all_uses_with(operand(without_last, 0))
    grouped = [node for node in gathers if node.op_type == "GroupQueryAttention"]
    for last in dict.fromkeys(operand(node, GqaInput.SEQLENS_K) for node in grouped):
        cast = producer(last, "Cast")
        assert cast is not None
        next_position = producer(cast.inputs[0], "Add")
        assert next_position is not None
        cast.replace_input_with(0, operand(next_position, 0))  # without the duplicate's position
    for value in (value for node in graph for value in node.outputs):
        if value.shape is not None:
            value.shape = ir.Shape(["T" if str(d) == "T + 1" else d for d in value.shape])
