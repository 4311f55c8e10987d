"""K draft steps as one graph: a GPU then drafts by one call, without its host.

Each step's token is fed to the next: of the likeliest the lowest, or one that is drawn. What steps
make of a buffer are outputs, each to be bound to that buffer: every step then writes its rows where
it reads the others, and nothing is copied. T tokens to feed first, K draft tokens, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from specedge.bundle.gpu_signatures import SAMPLED, UNROLLED, one_call, step_output
from specedge.bundle.manifest import GraphEntry, ModelEntry
from specedge.bundle.signature import SAMPLING_INPUTS, SAMPLING_SETTINGS, Signature

from ..hosts import drawing
from ..hosts.nodes import END, Nodes
from ..hosts.parts import Part
from .blocks import Blocks
from .draws import Draw, Draws
from .graphs import signature_of
from .scored import share_tables

IR_VERSION = 10
_TYPES = {kind.name.lower(): kind for kind in ir.DataType} | {
    "float32": ir.DataType.FLOAT,
    "float64": ir.DataType.DOUBLE,
}
_SIGNATURES = {UNROLLED: "drafted", SAMPLED: "drawn"}


def add(
    draft: ModelEntry, folder: Path, num_draft_tokens: int, ids: Sequence[int] | None
) -> ModelEntry:
    """Write such graphs for each op set that a GPU can run, beside its decoder in the bundle's
    `folder`; the manifest with them. `ids` are the tokens of a cut head's columns.
    """
    entries, known = list(draft.graphs), dict(draft.signatures)
    for ops in filter(draft.supports_gpu, draft.parity):
        decoder = draft.graph("decoder", ops)
        for name, kind in _SIGNATURES.items():
            file = decoder.file.replace("decoder", name)
            signature = one_call(
                name, draft.signatures[decoder.signature], draft.num_columns, num_draft_tokens
            )
            known[signature_of(kind, ops)] = signature
            entries.append(GraphEntry(name, ops, 1, None, signature_of(kind, ops), file))
            path = folder / decoder.file
            part = Part(path.parent, path.name, shares_bytes=True)
            graph = _graph(draft, part, signature, num_draft_tokens, ids)
            made = ir.Model(graph, ir_version=IR_VERSION)
            passes.RemoveUnusedNodesPass()(made)
            ir.save(made, folder / file)
    return replace(draft, graphs=tuple(entries), signatures=known)


def _graph(
    draft: ModelEntry, decoder: Part, signature: Signature, k: int, ids: Sequence[int] | None
) -> ir.Graph:
    nodes = Nodes(UNROLLED)
    inputs = {t.name: nodes.input(t.name, *_type(t.dtype, t.shape)) for t in signature.inputs}
    fed, length = inputs.pop("input_ids"), inputs.pop("past_length")
    told = {name: inputs.pop(name) for name in SAMPLING_INPUTS if name in inputs}
    chooser = _Drawn(nodes, draft, told) if told else _Likeliest(nodes)
    place = nodes("Add", length, _count(nodes, fed))
    last = nodes.stored(ir.tensor(np.array([-1]), name="last"), "last")
    drafted, made = list[ir.Value](), dict[str, ir.Value]()
    buffers, rewrite = dict(inputs), Blocks(nodes).rewrite
    for i in range(k):
        given = {"input_ids": fed, "past_length": length, "logits_from": last}
        step = decoder.copy(nodes, f"step.{i}", given | buffers, rewrite)
        column = chooser.column(_row(nodes, step.pop("logits"), draft))
        fed = column if ids is None else nodes("Gather", np.array(ids), column)
        drafted.append(fed)
        buffers = {name: step[name.replace("past_key_values", "present")] for name in buffers}
        made |= {step_output(i, name): value for name, value in step.items()}
        length = nodes("Add", place, i) if i else place
    made |= chooser.outputs(drafted)
    for t in signature.outputs:
        nodes.output(t.name, made[t.name], *_type(t.dtype, t.shape))
    share_tables(nodes.graph)
    return nodes.graph


@dataclass
class _Likeliest:
    """Takes the largest logit of each step."""

    nodes: Nodes

    def column(self, logits: ir.Value) -> ir.Value:
        """[1, C] -> [1, 1]"""
        return self.nodes("ArgMax", logits, axis=-1)

    def outputs(self, drafted: list[ir.Value]) -> dict[str, ir.Value]:
        return {"drafted": self.nodes("Concat", *drafted, axis=1)}


class _Drawn:
    """Draws the token of each step, with that step's uniform."""

    def __init__(self, nodes: Nodes, draft: ModelEntry, told: dict[str, ir.Value]) -> None:
        settings = drawing.Settings(*(told[name] for name in (*SAMPLING_SETTINGS, "seen")))
        self._nodes, self._uniforms, self._seen = nodes, told["uniforms"], told["seen"]
        self._draws = Draws(nodes, settings, draft.num_columns)
        self._made = list[Draw]()

    def column(self, logits: ir.Value) -> ir.Value:
        """[1, C] -> [1, 1]"""
        at = len(self._made)
        uniform = self._nodes("Slice", self._uniforms, [at], [at + 1], [0])
        draw = self._draws.draw(logits, self._seen, uniform)
        self._seen = draw.seen
        self._made.append(draw)
        return draw.column

    def outputs(self, drafted: list[ir.Value]) -> dict[str, ir.Value]:
        rows = {step_output(i, "weights"): draw.weights for i, draw in enumerate(self._made)}
        return {"drawn": self._nodes("Concat", *(d.summary for d in self._made), axis=0)} | rows


def _type(dtype: str, shape: Sequence[int | str]) -> tuple[ir.DataType, list[int | str]]:
    return _TYPES[dtype], [1 if size == "B" else size for size in shape]


def _count(nodes: Nodes, tokens: ir.Value) -> ir.Value:
    """How many tokens there are, without Shape, which would run on the CPU. [1, T] -> [1]"""
    numbers = nodes("CumSum", nodes("Add", nodes("Mul", tokens, 0), 1), np.array(1))
    return nodes("Reshape", nodes("Slice", numbers, [-1], [END], [1]), [1])


def _row(nodes: Nodes, logits: ir.Value, draft: ModelEntry) -> ir.Value:
    """The columns that are tokens. [1, 1, P] -> [1, C]"""
    row = nodes("Reshape", logits, [1, draft.padded_vocab_size])
    if draft.num_columns == draft.padded_vocab_size:
        return row
    return nodes("Slice", row, [0], [draft.num_columns], [1])
