"""K greedy draft steps as one graph: a GPU then drafts by one call, without its host.

Each step's token, of the likeliest the lowest, is fed to the next. What steps make of a buffer are
outputs, each to be bound to that buffer: every step then writes its rows where it reads the
others, and nothing is copied. T tokens to feed first, K draft tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from specedge.manifest import UNROLLED, Graph, Model, made_by, unrolled
from specedge.signature import Signature

from ..hosts.nodes import END, Nodes
from ..hosts.parts import Part
from .blocks import Blocks
from .graphs import signature_of
from .scored import share_tables

IR_VERSION = 10
_TYPES = {kind.name.lower(): kind for kind in ir.DataType} | {"float32": ir.DataType.FLOAT}


def add(draft: Model, folder: Path, num_draft_tokens: int, ids: Sequence[int] | None) -> Model:
    """Write such a graph for each op set that a GPU can run, beside its decoder in the bundle's
    `folder`; the manifest with them. `ids` are the tokens of a cut head's columns.
    """
    entries, known = list(draft.graphs), dict(draft.signatures)
    for ops in filter(draft.is_for_gpus, draft.parity):
        decoder = draft.graph("decoder", ops)
        file = decoder.file.replace("decoder", UNROLLED)
        name = signature_of("drafted", ops)
        known[name] = unrolled(draft.signatures[decoder.signature], num_draft_tokens)
        entries.append(Graph(UNROLLED, ops, 1, None, name, file))
        path = folder / decoder.file
        part = Part(path.parent, path.name, shares_bytes=True)
        graph = _graph(draft, part, known[name], num_draft_tokens, ids)
        made = ir.Model(graph, ir_version=IR_VERSION)
        passes.RemoveUnusedNodesPass()(made)
        ir.save(made, folder / file)
    return replace(draft, graphs=tuple(entries), signatures=known)


def _graph(
    draft: Model, decoder: Part, signature: Signature, k: int, ids: Sequence[int] | None
) -> ir.Graph:
    nodes = Nodes(UNROLLED)
    inputs = {t.name: nodes.input(t.name, *_type(t.dtype, t.shape)) for t in signature.inputs}
    fed, length = inputs.pop("input_ids"), inputs.pop("past_length")
    place = nodes("Add", length, _count(nodes, fed))
    last = nodes.stored(ir.tensor(np.array([-1]), name="last"), "last")
    drafted, made = list[ir.Value](), dict[str, ir.Value]()
    buffers, rewrite = dict(inputs), Blocks(nodes).rewrite
    for i in range(k):
        given = {"input_ids": fed, "past_length": length, "logits_from": last}
        step = decoder.copy(nodes, f"step.{i}", given | buffers, rewrite)
        fed = _likeliest(nodes, step.pop("logits"), draft, ids)
        drafted.append(fed)
        buffers = {name: step[name.replace("past_key_values", "present")] for name in buffers}
        made |= {made_by(i, name): value for name, value in step.items()}
        length = nodes("Add", place, i) if i else place
    made["drafted"] = nodes("Concat", *drafted, axis=1)
    for t in signature.outputs:
        nodes.output(t.name, made[t.name], *_type(t.dtype, t.shape))
    share_tables(nodes.graph)
    return nodes.graph


def _type(dtype: str, shape: Sequence[int | str]) -> tuple[ir.DataType, list[int | str]]:
    return _TYPES[dtype], [1 if size == "B" else size for size in shape]


def _count(nodes: Nodes, tokens: ir.Value) -> ir.Value:
    """How many tokens there are, without Shape, which would run on the CPU. [1, T] -> [1]"""
    numbers = nodes("CumSum", nodes("Add", nodes("Mul", tokens, 0), 1), np.array(1))
    return nodes("Reshape", nodes("Slice", numbers, [-1], [END], [1]), [1])


def _likeliest(nodes: Nodes, logits: ir.Value, draft: Model, ids: Sequence[int] | None) -> ir.Value:
    """The token of the largest logit. [1, 1, C] -> [1, 1]"""
    if draft.num_columns < draft.padded_vocab_size:
        logits = nodes("Slice", logits, [0], [draft.num_columns], [2])
    column = nodes("ArgMax", logits, axis=-1, keepdims=0)
    return column if ids is None else nodes("Gather", np.array(ids), column)
