"""K draft steps as one graph, so that a GPU drafts K tokens in one call.

Each step's token is the input of the next one: the most probable token (the lowest id on ties), or
a sampled one. A draft head also reads the hidden state that the step before returned. The caches
that a step writes are outputs, which the caller binds to the input buffers: all steps then update
the same buffers without copies.

Sampling uses the arithmetic of `sampling_nodes.py`, restricted to operators with GPU kernels.
No shape depends on a value, so disabled filters are computed as well.

T input tokens of the first step, K draft tokens, C columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir

from specedge.bundle.gpu_signatures import SAMPLED, UNROLLED, num_best, one_call, step_output
from specedge.bundle.manifest import ModelEntry
from specedge.bundle.signature import SAMPLING_INPUTS, SAMPLING_SETTINGS, Signature

from .graphs import add_graph
from .nodes import DOUBLE, END, FLOAT, GraphBuilder, GraphTemplate
from .sampling_nodes import SamplingNodes, TokenWeights, token_logits
from .shared_bytes import share_embeddings

IR_VERSION = 10
_SIGNATURES = {UNROLLED: "drafted", SAMPLED: "drawn"}


def add_draft_loops(
    draft: ModelEntry, folder: Path, num_draft_tokens: int, ids: np.ndarray | None
) -> ModelEntry:
    """Write the graphs for each variant that a GPU can run, next to the draft model's decoder.

    Returns the draft model's entry with the graphs. `folder` is the bundle's; `ids` are the tokens
    of a pruned LM head's columns.
    """
    for ops in filter(draft.supports_gpu, tuple(draft.parity)):
        decoder = draft.graph("decoder", ops)
        path = folder / decoder.file
        for name, base in _SIGNATURES.items():
            signature = one_call(
                name, draft.signatures[decoder.signature], draft.num_columns, num_draft_tokens
            )
            step_length = draft.min_gpu_length(ops)
            first, step = (
                GraphTemplate(path.parent, path.name.replace("decoder", file), shares_bytes=True)
                for file in ("decoder", {1: "step", 2: "catchup"}[step_length])
            )
            parts = [first, *[step] * (num_draft_tokens - 1)]
            graph = _build_graph(draft, parts, step_length, signature, ids)
            loop = ir.Model(graph, ir_version=IR_VERSION)
            share_embeddings(loop)
            draft = add_graph(draft, folder, ops, name, base, signature, loop)
    return draft


def _build_graph(
    draft: ModelEntry,
    parts: Sequence[GraphTemplate],
    step_length: int,
    signature: Signature,
    ids: np.ndarray | None,
) -> ir.Graph:
    """Connect the graphs of the steps, of which the first reads T tokens.

    The others, and each step of a draft head, read their last token `step_length` times, and return
    the logits of the first one. The rows of the others are stale, as those of padded passes.
    """
    nodes = GraphBuilder(UNROLLED)
    inputs = {t.name: nodes.input(t.name, *_value_type(t.dtype, t.shape)) for t in signature.inputs}
    fed, length = inputs.pop("input_ids"), inputs.pop("past_length")
    hidden = inputs.pop("hidden", None)
    sampling_inputs = {name: inputs.pop(name) for name in SAMPLING_INPUTS if name in inputs}
    sampler = TokenSampler(nodes, draft.num_columns, sampling_inputs) if sampling_inputs else None
    next_length = nodes("Add", length, _count_tokens(nodes, fed))
    drafted, outputs = list[ir.Value](), dict[str, ir.Value]()
    buffers = dict(inputs)
    for i, part in enumerate(parts):
        repeats = step_length > 1 and (i > 0 or hidden is not None)
        num_rows = step_length if repeats else 1
        repeat = partial(_repeat_last, nodes, count=num_rows - 1, is_single=i > 0)
        step_inputs = {"input_ids": repeat(fed), "past_length": length} | buffers
        step_inputs["logits_from"] = nodes.constant([-num_rows])
        if hidden is not None:
            step_inputs["hidden"] = repeat(hidden)
        step = part.copy(nodes, f"step.{i}", step_inputs)
        rows = step.pop("logits")
        rows = nodes("Slice", rows, [0], [1], [1]) if repeats else rows
        if hidden is not None:
            end = END if num_rows == 1 else 1 - num_rows
            hidden = nodes("Slice", step.pop("next_hidden"), [-num_rows], [end], [1])
            outputs["next_hidden"] = hidden
        logits = token_logits(nodes, rows, draft, 1)
        column = sampler.sample(logits) if sampler else nodes("ArgMax", logits, axis=-1)
        fed = column if ids is None else nodes("Gather", ids, column)
        drafted.append(fed)
        written = {name: name.replace("past_key_values", "present") for name in buffers}
        buffers |= {name: step[output] for name, output in written.items() if output in step}
        outputs |= {step_output(i, name): value for name, value in step.items()}
        length = nodes("Add", next_length, i) if i else next_length
    outputs |= sampler.outputs() if sampler else {"drafted": nodes("Concat", *drafted, axis=1)}
    for t in signature.outputs:
        nodes.output(t.name, outputs[t.name], *_value_type(t.dtype, t.shape))
    return nodes.graph


def _repeat_last(nodes: GraphBuilder, rows: ir.Value, count: int, is_single: bool) -> ir.Value:
    """Append the last row `count` times; `is_single` if there is no other. [1, T, ...]"""
    if not count:
        return rows
    last = rows if is_single else nodes("Slice", rows, [-1], [END], [1])
    return nodes("Concat", rows, *[last] * count, axis=1)


def _value_type(dtype: str, shape: Sequence[int | str]) -> tuple[ir.DataType, list[int | str]]:
    return ir.DataType.from_numpy(np.dtype(dtype)), [1 if size == "B" else size for size in shape]


def _count_tokens(nodes: GraphBuilder, tokens: ir.Value) -> ir.Value:
    """Count tokens without a Shape node, which would run on the CPU. [1, T] -> [1]"""
    numbers = nodes("CumSum", nodes("Add", nodes("Mul", tokens, 0), 1), np.array(1))
    return nodes("Reshape", nodes("Slice", numbers, [-1], [END], [1]), [1])


class TokenSampler:
    """Sampler whose settings and uniform random numbers, one for each step, are inputs."""

    def __init__(
        self, nodes: GraphBuilder, num_columns: int, inputs: Mapping[str, ir.Value]
    ) -> None:
        settings = (inputs[name] for name in (*SAMPLING_SETTINGS, "seen"))
        self._nodes, self._uniforms = nodes, inputs["uniforms"]
        self._sampling = SamplingNodes(nodes, num_columns, True, *settings)
        self._weights, self._summaries = list[ir.Value](), list[ir.Value]()
        is_few, top_k = self._sampling.has_top_k(num_columns), self._sampling.top_k
        self._last = nodes("Sub", nodes("Where", is_few, top_k, num_columns), 1)
        self._is_whole = nodes("GreaterOrEqual", self._sampling.top_p, np.ones(1))
        # ONNX Runtime folds both at loading; as initializers they would enlarge the file.
        self._zeros = nodes("Expand", 0.0, [1, num_columns])
        ones = nodes("Expand", 1, [1, num_columns])
        self._ranks = nodes("CumSum", ones, np.array(1), exclusive=1)

    def sample(self, logits: ir.Value) -> ir.Value:
        """Return the most probable column at temperature 0, else sample. [1, C] -> [1, 1]"""
        nodes, sampling, step = self._nodes, self._sampling, len(self._summaries)
        uniform = nodes("Slice", self._uniforms, [step], [step + 1], [0])
        is_not_finite = nodes("ReduceSum", nodes("Mul", logits, 0.0), [1])
        logits = sampling.apply_penalty(logits, sampling.seen)
        values = nodes("TopK", logits, [sampling.vocab_size], num_outputs=2)
        (columns,) = nodes.others(values)
        kept = self._kept(values)
        weights = nodes("ScatterElements", self._zeros, columns, kept, axis=1)
        row = TokenWeights(_first_columns(nodes, columns, 1), weights)
        column, total = sampling.choose_token(row, uniform)
        weight = nodes("GatherElements", weights, column, axis=1)
        count = nodes("ReduceSum", nodes("Cast", nodes("Greater", kept, 0.0), to=FLOAT), [1])
        best = (_first_columns(nodes, x, num_best(sampling.vocab_size)) for x in (kept, columns))
        parts = (column, is_not_finite, count, weight, total, *best)
        wide = [x if x is total else nodes("Cast", x, to=DOUBLE) for x in parts]
        self._weights.append(weights)
        self._summaries.append(nodes("Concat", *wide, axis=1))
        self._sampling = sampling.append(column)
        return column

    def outputs(self) -> dict[str, ir.Value]:
        """Return the outputs: each step's weights, and rows that summarize them."""
        rows = {step_output(i, "weights"): weights for i, weights in enumerate(self._weights)}
        return {"drawn": self._nodes("Concat", *self._summaries, axis=0)} | rows

    def _kept(self, values: ir.Value) -> ir.Value:
        """Return the weights of sorted logits, 0 where a filter removes them. [1, C]"""
        nodes, sampling = self._nodes, self._sampling
        smallest = nodes("Gather", values, self._last, axis=1)
        largest = _first_columns(nodes, values, 1)
        weights = nodes("Exp", sampling.apply_temperature(values, largest))
        weights = nodes("Where", nodes("Less", values, smallest), 0.0, weights)
        last, _ = sampling.find_position(weights, sampling.top_p, "Less")
        is_in = nodes("Or", nodes("LessOrEqual", self._ranks, last), self._is_whole)
        return sampling.apply_min_p(nodes("Where", is_in, weights, 0.0))


def _first_columns(nodes: GraphBuilder, row: ir.Value, count: int) -> ir.Value:
    return nodes("Slice", row, [0], [count], [1])
