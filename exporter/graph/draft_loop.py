"""K draft steps as one graph, so that a GPU drafts K tokens in one call.

Each step's token is the input of the next one: the most probable token (the lowest id on ties), or
a sampled one. The caches that a step writes are outputs, which the caller binds to the input
buffers: all steps then update the same buffers without copies.

Sampling uses the arithmetic of `sampling_nodes.py`, restricted to operators with GPU kernels.
No shape depends on a value, so disabled filters are computed as well. Sums are computed by blocks
first, because CUDA's CumSum takes quadratic time.

T input tokens of the first step, K draft tokens, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from specedge.bundle.gpu_signatures import SAMPLED, UNROLLED, num_best, one_call, step_output
from specedge.bundle.manifest import GraphEntry, ModelEntry
from specedge.bundle.signature import SAMPLING_INPUTS, SAMPLING_SETTINGS, Signature

from . import sampling_nodes
from .best_logits import share_embeddings
from .graphs import variant_signature
from .nodes import DOUBLE, END, FLOAT, INT, GraphBuilder, GraphTemplate
from .opset import save_graph
from .shared_bytes import MatMulNBitsRewriter

IR_VERSION = 10
_TYPES = {dtype.name.lower(): dtype for dtype in ir.DataType} | {
    "float32": ir.DataType.FLOAT,
    "float64": ir.DataType.DOUBLE,
}
_SIGNATURES = {UNROLLED: "drafted", SAMPLED: "drawn"}


def add_draft_loops(
    draft: ModelEntry, folder: Path, num_draft_tokens: int, ids: Sequence[int] | None
) -> ModelEntry:
    """Write the graphs for each variant that a GPU can run, next to the draft model's decoder.

    Returns the draft model's entry with the graphs. `folder` is the bundle's; `ids` are the tokens
    of a pruned LM head's columns.
    """
    entries, signatures = list(draft.graphs), dict(draft.signatures)
    for ops in filter(draft.supports_gpu, draft.parity):
        decoder = draft.graph("decoder", ops)
        for name, base in _SIGNATURES.items():
            file = decoder.file.replace("decoder", name)
            signature = one_call(
                name, draft.signatures[decoder.signature], draft.num_columns, num_draft_tokens
            )
            signatures[variant_signature(base, ops)] = signature
            entries.append(GraphEntry(name, ops, None, variant_signature(base, ops), file))
            path = folder / decoder.file
            part = GraphTemplate(path.parent, path.name, shares_bytes=True)
            graph = _build_graph(draft, part, signature, num_draft_tokens, ids)
            loop = ir.Model(graph, ir_version=IR_VERSION)
            passes.RemoveUnusedNodesPass()(loop)
            save_graph(loop, folder / file)
    return replace(draft, graphs=tuple(entries), signatures=signatures)


def _build_graph(
    draft: ModelEntry,
    decoder: GraphTemplate,
    signature: Signature,
    k: int,
    ids: Sequence[int] | None,
) -> ir.Graph:
    nodes = GraphBuilder(UNROLLED)
    inputs = {t.name: nodes.input(t.name, *_value_type(t.dtype, t.shape)) for t in signature.inputs}
    fed, length = inputs.pop("input_ids"), inputs.pop("past_length")
    sampling_inputs = {name: inputs.pop(name) for name in SAMPLING_INPUTS if name in inputs}
    chooser = (
        _SampledChoice(nodes, draft, sampling_inputs) if sampling_inputs else _GreedyChoice(nodes)
    )
    next_length = nodes("Add", length, _count_tokens(nodes, fed))
    last = nodes.stored(ir.tensor(np.array([-1]), name="last"), "last")
    drafted, outputs = list[ir.Value](), dict[str, ir.Value]()
    buffers, rewrite = dict(inputs), MatMulNBitsRewriter(nodes).rewrite
    for i in range(k):
        step_inputs = {"input_ids": fed, "past_length": length, "logits_from": last}
        step = decoder.copy(nodes, f"step.{i}", step_inputs | buffers, rewrite)
        column = chooser.column(sampling_nodes.token_logits(nodes, step.pop("logits"), draft, 1))
        fed = column if ids is None else nodes("Gather", np.array(ids), column)
        drafted.append(fed)
        buffers = {name: step[name.replace("past_key_values", "present")] for name in buffers}
        outputs |= {step_output(i, name): value for name, value in step.items()}
        length = nodes("Add", next_length, i) if i else next_length
    outputs |= chooser.outputs(drafted)
    for t in signature.outputs:
        nodes.output(t.name, outputs[t.name], *_value_type(t.dtype, t.shape))
    share_embeddings(nodes.graph)
    return nodes.graph


@dataclass
class _GreedyChoice:
    """Greedy choice: the largest logit of each step."""

    nodes: GraphBuilder

    def column(self, logits: ir.Value) -> ir.Value:
        """Return the column of the largest logit. [1, C] -> [1, 1]"""
        return self.nodes("ArgMax", logits, axis=-1)

    def outputs(self, drafted: list[ir.Value]) -> dict[str, ir.Value]:
        """Return the graph's outputs other than caches."""
        return {"drafted": self.nodes("Concat", *drafted, axis=1)}


class _SampledChoice:
    """Sampled choice: each step's token by that step's uniform random number."""

    def __init__(self, nodes: GraphBuilder, draft: ModelEntry, inputs: dict[str, ir.Value]) -> None:
        settings = sampling_nodes.SamplingInputs(
            *(inputs[name] for name in (*SAMPLING_SETTINGS, "seen"))
        )
        self._nodes, self._uniforms, self._seen = nodes, inputs["uniforms"], inputs["seen"]
        self._sampler = TokenSampler(nodes, settings, draft.num_columns)
        self._samples = list[SampledToken]()

    def column(self, logits: ir.Value) -> ir.Value:
        """Sample a column. [1, C] -> [1, 1]"""
        at = len(self._samples)
        uniform = self._nodes("Slice", self._uniforms, [at], [at + 1], [0])
        sample = self._sampler.sample(logits, self._seen, uniform)
        self._seen = sample.seen
        self._samples.append(sample)
        return sample.column

    def outputs(self, drafted: list[ir.Value]) -> dict[str, ir.Value]:
        """Return the graph's outputs other than caches."""
        rows = {step_output(i, "weights"): sample.weights for i, sample in enumerate(self._samples)}
        return {
            "drawn": self._nodes("Concat", *(sample.summary for sample in self._samples), axis=0)
        } | rows


def _value_type(dtype: str, shape: Sequence[int | str]) -> tuple[ir.DataType, list[int | str]]:
    return _TYPES[dtype], [1 if size == "B" else size for size in shape]


def _count_tokens(nodes: GraphBuilder, tokens: ir.Value) -> ir.Value:
    """Count tokens without a Shape node, which would run on the CPU. [1, T] -> [1]"""
    numbers = nodes("CumSum", nodes("Add", nodes("Mul", tokens, 0), 1), np.array(1))
    return nodes("Reshape", nodes("Slice", numbers, [-1], [END], [1]), [1])


_BLOCK = 512


@dataclass(frozen=True)
class SampledToken:
    """Sampled token and its distribution.

    Attributes:
        column: Column of the token. [1, 1]
        seen: Columns of the history, including the token. [1, C]
        weights: Weights of the distribution. [1, C]
        summary: Row of the output `drawn` (`specedge/bundle/gpu_signatures.py`).
    """

    column: ir.Value
    seen: ir.Value
    weights: ir.Value
    summary: ir.Value


class TokenSampler:
    """Sampler whose settings are inputs of the graph."""

    def __init__(
        self, nodes: GraphBuilder, settings: sampling_nodes.SamplingInputs, num_columns: int
    ) -> None:
        self._nodes, self._settings, self._size = nodes, settings, num_columns
        self._is_sampled = nodes("Greater", settings.temperature, 0.0)
        top_k = settings.top_k
        is_few = nodes("And", nodes("Greater", top_k, 0), nodes("Less", top_k, num_columns))
        self._last = nodes("Sub", nodes("Where", is_few, top_k, num_columns), 1)
        self._is_whole = nodes("GreaterOrEqual", settings.top_p, np.ones(1))
        # ONNX Runtime folds both at loading; as initializers they would enlarge the file.
        self._zeros = nodes("Expand", 0.0, [1, num_columns])
        ones = nodes("Expand", 1, [1, num_columns])
        self._ranks = nodes("CumSum", ones, np.array(1), exclusive=1)

    def sample(self, logits: ir.Value, seen: ir.Value, uniform: ir.Value) -> SampledToken:
        """Return the most probable token at temperature 0, else sample. [1, C], [1, C], [1]"""
        nodes, settings = self._nodes, self._settings
        is_not_finite = nodes("ReduceSum", nodes("Mul", logits, 0.0), [1])
        logits = sampling_nodes.apply_penalty(nodes, logits, seen, settings.penalty)
        values = nodes("TopK", logits, [self._size], num_outputs=2)
        (columns,) = nodes.others(values)
        kept = self._kept(values)
        weights = nodes("ScatterElements", self._zeros, columns, kept, axis=1)
        position, total = self._find_position(weights, uniform, "LessOrEqual")
        column = nodes("Where", self._is_sampled, position, _first_columns(nodes, columns, 1))
        weight = nodes("GatherElements", weights, column, axis=1)
        count = nodes("ReduceSum", self._ones(nodes("Greater", kept, 0.0)), [1])
        best = (_first_columns(nodes, x, num_best(self._size)) for x in (kept, columns))
        parts = (column, is_not_finite, count, weight, total, *best)
        wide = [x if x is total else nodes("Cast", x, to=DOUBLE) for x in parts]
        summary = nodes("Concat", *wide, axis=1)
        return SampledToken(column, sampling_nodes.mark_seen(nodes, seen, column), weights, summary)

    def _kept(self, values: ir.Value) -> ir.Value:
        """Return the weights of sorted logits, 0 where a filter removes them. [1, C]"""
        nodes, settings = self._nodes, self._settings
        smallest = nodes("Gather", values, self._last, axis=1)
        largest = _first_columns(nodes, values, 1)
        weights = nodes(
            "Exp", sampling_nodes.apply_temperature(nodes, values, largest, settings.temperature)
        )
        weights = nodes("Where", nodes("Less", values, smallest), 0.0, weights)
        last, _ = self._find_position(weights, settings.top_p, "Less")
        is_in = nodes("Or", nodes("LessOrEqual", self._ranks, last), self._is_whole)
        return sampling_nodes.apply_min_p(
            nodes, nodes("Where", is_in, weights, 0.0), settings.min_p
        )

    def _find_position(
        self, weights: ir.Value, share: ir.Value, is_short: str
    ) -> tuple[ir.Value, ir.Value]:
        """Return the first position whose cumulative weight reaches a share, and the total weight.

        `is_short` is the operator that compares cumulative weights that are too small with the
        share of the total. [1, C], [1] -> [1, 1], [1, 1] in double
        """
        nodes = self._nodes
        blocks = nodes("Cast", weights, to=DOUBLE)
        if rest := -self._size % _BLOCK:
            blocks = nodes("Pad", blocks, [0, 0, 0, rest])
        blocks = nodes("Reshape", blocks, [-1, _BLOCK])
        totals = nodes("ReduceSum", blocks, [1])
        sums = nodes("CumSum", totals, np.array(0))
        total = nodes("Slice", sums, [-1], [END], [0])
        goal = nodes("Mul", total, share)
        at = nodes("ReduceSum", self._ones(nodes(is_short, sums, goal)), [0], keepdims=0)
        block = nodes("Cast", at, to=INT)
        before = nodes("Gather", nodes("CumSum", totals, np.array(0), exclusive=1), block)
        inside = nodes("CumSum", nodes("Gather", blocks, block), np.array(1))
        short = nodes(is_short, inside, nodes("Sub", goal, before))
        # If rounding moves the goal beyond the block, take the last position with a weight.
        less = nodes("Less", inside, nodes("Slice", inside, [-1], [END], [1]))
        counts = (nodes("ReduceSum", self._ones(x), [1]) for x in (short, less))
        within = nodes("Cast", nodes("Min", *counts), to=INT)
        return nodes("Add", nodes("Mul", block, _BLOCK), within), total

    def _ones(self, condition: ir.Value) -> ir.Value:
        """Cast a condition to numbers for counting."""
        return self._nodes("Cast", condition, to=FLOAT)


def _first_columns(nodes: GraphBuilder, row: ir.Value, count: int) -> ir.Value:
    return nodes("Slice", row, [0], [count], [1])
