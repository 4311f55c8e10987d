"""Batched graph: passes over tokens of several sequences, derived from the decoder.

The tokens of all sequences are packed, so that matrices see no padding; attention alone reads them
as a padded block. B sequences, T tokens in total, N rows of the block per sequence.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from specedge.bundle.batched_signature import BATCHED, BATCHED_INPUTS, batched
from specedge.bundle.graph_variants import attention_ops, has_compute_type
from specedge.bundle.manifest import ModelEntry

from .graphs import add_graph
from .nodes import (
    GqaInput,
    add_constant,
    cache_outputs,
    insert_node,
    is_token_positions,
    operand,
    producer_through_casts,
    reader_through_casts,
)


def add_batched_graphs(model: ModelEntry, folder: Path) -> ModelEntry:
    """Write the batched graph of each variant for CPUs that has one, next to the decoder.

    Returns the model's entry with the graphs. `folder` is the bundle's.
    """
    for ops in tuple(model.parity):
        decoder = model.graph("decoder", ops)
        if attention_ops(ops) != "gqa" or has_compute_type(ops):
            continue
        if (graph := batch(ir.load(folder / decoder.file))) is not None:
            signature = batched(model.signatures[decoder.signature])
            model = add_graph(model, folder, ops, BATCHED, BATCHED, signature, graph)
    return model


def batch(decoder: ir.Model) -> ir.Model | None:
    """Rewrite a decoder to its batched graph, in place; return None if that is not possible.

    Tokens must depend on each other in GroupQueryAttention alone, and on their positions only by
    lookups.
    """
    graph = decoder.graph
    before = {value.name: value for value in graph.inputs}
    new = {x.name: ir.val(x.name, ir.DataType[x.dtype.upper()], x.shape) for x in BATCHED_INPUTS}
    new["input_ids"] = before["input_ids"]
    for node in [node for node in graph if node.op_type == "GroupQueryAttention"]:
        if GqaInput.ATTENTION_BIAS.of(node) is not None:
            return None
        if not _batch_attention(graph, node, new):
            return None
    for value in [value for node in graph for value in node.outputs if is_token_positions(value)]:
        value.replace_all_uses_with(new["positions"])
    for slice_, _ in before["logits_from"].uses():
        output = slice_.outputs[0]
        rows = insert_node(
            slice_, "Gather", [operand(slice_, 0), new["logits_rows"]], f"{output.name}.batched",
            output, axis=1,
        )  # fmt: skip
        output.replace_all_uses_with(rows)
    passes.RemoveUnusedNodesPass()(decoder)
    caches = [value for name, value in before.items() if str(name).startswith("past_key_values")]
    if before["past_length"].uses() or any(node.op_type == "CumSum" for node in graph):
        return None
    if any(user.op_type != "GroupQueryAttention" for x in caches for user, _ in x.uses()):
        return None
    graph.inputs[:] = [*new.values(), *caches]
    for value in (*caches, *cache_outputs(graph)):
        assert value.shape is not None
        value.shape = ir.Shape(["B", *value.shape[1:]])
    graph.name = BATCHED
    return decoder


def _batch_attention(graph: ir.Graph, node: ir.Node, new: dict[str, ir.Value]) -> bool:
    """Let an attention node read and write a block of several sequences; False if it cannot."""
    gathers = [
        producer_through_casts(x, "Gather")
        for i in (GqaInput.QUERY, GqaInput.KEY, GqaInput.VALUE)
        if (x := node.inputs[i]) is not None
    ]
    slice_ = reader_through_casts(node.outputs[0])
    if not all(gathers) or slice_ is None or slice_.op_type != "Slice":
        return False
    first = add_constant(graph, np.zeros(1, np.int64), f"{node.outputs[0].name}.first")
    for gather in filter(None, gathers):
        rows = [operand(gather, 0), new["block_rows"]]
        name = str(gather.outputs[0].name)
        block = insert_node(gather, "Gather", rows, f"{name}.block", axis=1)
        block = insert_node(gather, "Squeeze", [block, first], f"{name}.sequences")
        _clear_shapes(gather.outputs[0])
        block.dtype = gather.outputs[0].dtype
        gather.outputs[0].replace_all_uses_with(block)
    _clear_shapes(node.outputs[0])
    node.replace_input_with(GqaInput.SEQLENS_K, new["last_positions"])
    node.resize_inputs(GqaInput.QUERY_SEQLENS + 1)
    node.replace_input_with(GqaInput.QUERY_SEQLENS, new["query_lengths"])
    output = slice_.outputs[0]
    assert output.shape is not None
    flat = add_constant(graph, np.array([1, -1, output.shape[-1]]), f"{output.name}.flat")
    block = insert_node(slice_, "Reshape", [operand(slice_, 0), flat], f"{output.name}.block")
    rows = [block, new["packed_rows"]]
    packed = insert_node(slice_, "Gather", rows, f"{output.name}.packed", output, axis=1)
    output.replace_all_uses_with(packed)
    return True


def _clear_shapes(value: ir.Value) -> None:
    """Remove the shape of a value, and of its conversions to other types."""
    value.shape = None
    for user, _ in value.uses():
        if user.op_type == "Cast":
            _clear_shapes(user.outputs[0])
