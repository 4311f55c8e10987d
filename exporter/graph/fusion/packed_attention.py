"""Rotary embedding and the split of a joined QKV product inside GroupQueryAttention.

B = 1 sequence, T new tokens, S rows of cache; heads of size D.
"""

from __future__ import annotations

import onnx_ir as ir

from ..nodes import producer

HEAD_MULTIPLE = 16  # of head sizes whose rotary embedding ONNX Runtime's node takes
COS, SIN = 7, 8  # the node's inputs


def fuse(graph: ir.Graph) -> None:
    """Let each attention node rotate its queries and keys, and read a packed product."""
    for node in [node for node in graph if node.op_type == "GroupQueryAttention"]:
        _rotate_inside(graph, node)
        _pack(node)
    for node in [node for node in graph if node.op_type == "Reshape"]:
        source, output = node.inputs[0], node.outputs[0]
        if source is not None and source.shape is not None and source.shape == output.shape:
            output.replace_all_uses_with(source)


def _rotate_inside(graph: ir.Graph, node: ir.Node) -> None:
    """Drop the rotary embedding of whole heads in front of a node, which then does it itself.

    It derives the positions, past length + 0, 1 ..., from `seqlens_k`. Of partial or interleaved
    rotary embedding, and of positions that a model changes, nothing is dropped.
    """
    rows = [gather for value in node.inputs[:2] if (gather := producer(value, "Gather"))]
    rotations = [x for gather in rows if (x := producer(gather.inputs[0], "RotaryEmbedding"))]
    if len(rotations) != 2 or [*rotations[0].inputs[1:]] != [*rotations[1].inputs[1:]]:
        return
    if any({*rotation.attributes} != {"num_heads"} for rotation in rotations):
        return
    tables = [table for value in rotations[0].inputs[1:] if (table := _table(graph, value))]
    cache = node.inputs[3]
    assert cache is not None
    assert cache.shape is not None
    capacity, size = cache.shape[2], cache.shape[3]
    assert isinstance(size, int)
    if size % HEAD_MULTIPLE or [x.shape for x in tables] != 2 * [[capacity, size // 2]]:
        return
    for gather, rotation in zip(rows, rotations, strict=True):
        gather.replace_input_with(0, rotation.inputs[0])
    node.resize_inputs(max(SIN + 1, len(node.inputs)))
    for index, table in zip((COS, SIN), tables, strict=True):
        node.replace_input_with(index, table)
    node.attributes["do_rotary"] = ir.AttrInt64("do_rotary", 1)


def _table(graph: ir.Graph, value: ir.Value | None) -> ir.Value | None:
    """Return the table [S, D/2] whose rows are looked up by the positions of a pass's tokens."""
    gather = producer(value, "Gather")
    clip = producer(gather.inputs[1], "Clip") if gather is not None else None
    add = producer(clip.inputs[0], "Add") if clip is not None else None
    if gather is None or add is None:
        return None
    past, offsets = producer(add.inputs[0], "Unsqueeze"), producer(add.inputs[1], "Sub")
    if past is None or past.inputs[0] not in graph.inputs:
        return None
    if offsets is None or producer(offsets.inputs[0], "CumSum") is None:
        return None
    return gather.inputs[0]


def _pack(node: ir.Node) -> None:
    """Let a node read the rows of one product [1, T, Q + K + V] that was split for it."""
    rows = [gather for value in node.inputs[:3] if (gather := producer(value, "Gather"))]
    if len(rows) != 3 or len({gather.inputs[1] for gather in rows}) != 1:
        return
    split = producer(rows[0].inputs[0], "Split")
    if split is None or [gather.inputs[0] for gather in rows] != [*split.outputs]:
        return
    product, output = split.inputs[0], rows[0].outputs[0]
    assert product is not None
    rows[0].replace_input_with(0, product)
    if output.shape is not None and product.shape is not None:
        output.shape = ir.Shape([*output.shape[:-1], product.shape[-1]])
    for index in (1, 2):
        node.replace_input_with(index, None)
