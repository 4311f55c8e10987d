"""Graphs of a speculative round: K draft steps, the target's verify pass, and the accept rule.

The fused graph is a whole round, for hosts that call `Run` once per round. The split graphs are a
draft step and the accept rule, between which the host runs the target's decoder: for hosts that
vary K, run the models on two devices, or have a packed draft model. N input tokens, K draft tokens,
V entries of the target's vocabulary, R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir

from specedge.bundle import Bundle
from specedge.bundle.manifest import ModelEntry
from specedge.bundle.precision import QUANTIZED_DTYPES

from ..graph import sampling_nodes
from ..graph.nodes import DOUBLE, END, FLOAT, INT, GraphBuilder, GraphTemplate

IR_VERSION = 10
PLAIN_K = 1  # smallest K of a host graph
_MAX_PACKED_BYTES = 8 << 20  # maximum bytes of packed weights per draft step


def fused_round(
    root: Path, bundle: Bundle, num_draft_tokens: int, ops: Mapping[str, str]
) -> ir.Model:
    """Build the fused round over the weights files of the bundle in `root`."""
    return _RoundBuilder(root, bundle, num_draft_tokens, ops).model()


def plain_round(root: Path, bundle: Bundle, ops: str) -> ir.Model:
    """Build the round of a bundle without a draft model: one pass of the target, one token.

    Inputs and outputs are those of a fused round with `PLAIN_K` draft tokens that accepts none.
    """
    return _RoundBuilder(root, bundle, PLAIN_K, {"target": ops}).plain_model()


class _RoundBuilder:
    """Builder of a fused round of the models in `ops`."""

    def __init__(
        self, root: Path, bundle: Bundle, num_draft_tokens: int, ops: Mapping[str, str]
    ) -> None:
        self._root, self._bundle, self._k, self._ops = root, bundle, num_draft_tokens, ops
        nodes = self._nodes = GraphBuilder("round")
        self._tokens = nodes.input("tokens", INT, [1, "N"])
        self._draft_length = nodes.input("draft_length", INT, [1])
        self._target_length = nodes.input("target_length", INT, [1])
        self._limit = nodes.input("num_draft_tokens", INT, [1])
        self._settings = sampling_nodes.sampling_inputs(nodes, bundle.target.vocab_size)
        self._uniforms = nodes.input("uniforms", DOUBLE, [2 * num_draft_tokens + 1])
        self._caches = {
            role: cache_inputs(nodes, role, bundle.models[role])
            for role in ("draft", "target")
            if role in ops
        }

    def plain_model(self) -> ir.Model:
        """Build a round that ignores the draft inputs and returns one token, K + 1 times."""
        nodes, target, settings = self._nodes, self._bundle.target, self._settings
        missing = nodes("Sub", self._target_length, self._draft_length)
        fed = nodes("Slice", self._tokens, missing, [END], [1])
        outputs = self._target_pass(fed, -1)
        logits = sampling_nodes.token_logits(nodes, outputs["logits"], target, 1)
        row = sampling_nodes.token_weights(
            nodes, logits, settings.seen, target.vocab_size, settings, is_one=True
        )
        uniform = nodes("Slice", self._uniforms, [-1], [END])
        token = sampling_nodes.choose_token(nodes, row, uniform, settings)
        next_tokens = nodes("Concat", *[token] * (self._k + 1), axis=0)
        nodes.output("next_tokens", nodes("Reshape", next_tokens, [-1]), INT, ["R"])
        nodes.output("num_accepted", nodes("Mul", self._limit, 0), INT, [1])
        add_cache_outputs(nodes, "target", self._caches["target"], outputs)
        return ir.Model(nodes.graph, ir_version=IR_VERSION)

    def _target_pass(self, tokens: ir.Value, logits_from: int) -> dict[str, ir.Value]:
        """Add a pass of the target over tokens [1, N]; return its outputs by name."""
        file = self._bundle.target.graph("decoder", self._ops["target"]).file
        inputs = {"input_ids": tokens, "past_length": self._target_length}
        inputs |= {"logits_from": self._nodes.constant([logits_from])} | self._caches["target"]
        return GraphTemplate(self._root, file).copy(self._nodes, "target", inputs)

    def model(self) -> ir.Model:
        nodes, k = self._nodes, self._k
        sizes = np.array([1] * k + [k, 1])
        first = nodes("Split", self._uniforms, sizes, axis=0, num_outputs=k + 2)
        *uniforms, tests, last = first, *nodes.others(first)
        steps = self._draft(uniforms)
        tokens = nodes("Concat", *(step.token for step in steps), axis=0)
        distributions = nodes("Concat", *(step.weights for step in steps), axis=0)
        seen = nodes("Concat", self._settings.seen, *(step.seen for step in steps), axis=0)
        rows, outputs = self._verify(tokens, seen)
        judged = sampling_nodes.accept_tokens(
            nodes, tokens, distributions, rows, self._limit, tests, last, self._settings
        )
        add_round_outputs(nodes, tokens, *judged)
        for i, step in enumerate(steps[:-1]):
            add_cache_outputs(nodes, f"draft.{i}", self._caches["draft"], step.outputs)
        add_cache_outputs(nodes, "draft", self._caches["draft"], steps[-1].outputs)
        add_cache_outputs(nodes, "target", self._caches["target"], outputs)
        return ir.Model(nodes.graph, ir_version=IR_VERSION)

    def _draft(self, uniforms: list[ir.Value]) -> list[DraftStep]:
        """Add K draft steps, each of which updates the caches that the previous one returns."""
        nodes, draft = self._nodes, self._bundle.draft_model
        part = GraphTemplate(self._root, draft.graph("decoder", self._ops["draft"]).file)
        buffers, settings, steps = self._caches["draft"], self._settings, list[DraftStep]()
        fed, length, num_fed = self._tokens, self._draft_length, self._num_fed()
        for i, uniform in enumerate(uniforms):
            copy = partial(part.copy, nodes, f"draft.{i}")
            step = draft_step(nodes, self._bundle, copy, fed, length, buffers, settings, uniform)
            buffers = {name: step.outputs[output_name(name)] for name in buffers}
            settings = replace(settings, seen=step.seen)
            fed, length, num_fed = step.token, nodes("Add", length, num_fed), nodes.constant([1])
            steps.append(step)
        return steps

    def _num_fed(self) -> ir.Value:
        """Return N. [1]"""
        nodes = self._nodes
        ones = nodes("Add", nodes("Mul", self._tokens, 0), 1)
        return nodes("ReduceSum", ones, [1], keepdims=0)

    def _verify(
        self, tokens: ir.Value, seen: ir.Value
    ) -> tuple[sampling_nodes.TokenWeights, dict[str, ir.Value]]:
        """Add the verify pass; return the distributions of K + 1 rows, and the pass's outputs.

        tokens [K, 1], seen [K + 1, V]
        """
        nodes, k, target = self._nodes, self._k, self._bundle.target
        missing = nodes("Sub", self._target_length, self._draft_length)
        fed = nodes("Slice", self._tokens, missing, [END], [1])
        fed = nodes("Concat", fed, nodes("Reshape", tokens, [1, k]), axis=1)
        outputs = self._target_pass(fed, -1 - k)
        logits = sampling_nodes.token_logits(nodes, outputs["logits"], target, k + 1)
        return sampling_nodes.token_weights(
            nodes, logits, seen, target.vocab_size, self._settings
        ), outputs


@dataclass(frozen=True)
class DraftStep:
    """Draft step.

    Attributes:
        token: Its token, [1, 1].
        weights: Distribution it was sampled from, [1, C].
        seen: Tokens in the history including it, [1, V].
        outputs: Outputs of the draft model's pass.
    """

    token: ir.Value
    weights: ir.Value
    seen: ir.Value
    outputs: dict[str, ir.Value]


def draft_step(
    nodes: GraphBuilder,
    bundle: Bundle,
    copy: Callable[[dict[str, ir.Value]], dict[str, ir.Value]],
    tokens: ir.Value,
    length: ir.Value,
    buffers: dict[str, ir.Value],
    settings: sampling_nodes.SamplingInputs,
    uniform: ir.Value,
) -> DraftStep:
    """Feed tokens [1, N] to a copy of the draft model and choose the next one."""
    fed = _replace_unknown(nodes, tokens, bundle.draft_model, bundle.target.vocab_size)
    last = nodes.constant([-1])
    outputs = copy({"input_ids": fed, "past_length": length, "logits_from": last} | buffers)
    row = _draft_weights(nodes, outputs["logits"], bundle, settings)
    token = sampling_nodes.choose_token(nodes, row, uniform, settings)
    return DraftStep(
        token, row.weights, sampling_nodes.mark_seen(nodes, settings.seen, token), outputs
    )


def check_fused(bundle: Bundle) -> str | None:
    """Return the reason why a round cannot, or should not, be one graph; None otherwise."""
    draft = bundle.draft_model
    if draft.context_length < bundle.target.context_length:
        return (
            f"{draft.source.id} has a shorter context than the target, which fused rounds do "
            "not support"
        )
    weights = bundle.files[draft.weights].size
    if draft.weights_dtype in QUANTIZED_DTYPES and weights > _MAX_PACKED_BYTES:
        return (
            f"{draft.source.id} is in {draft.weights_dtype}: in one graph, each step would have "
            f"a copy of {weights >> 20} MB of weights"
        )
    return None


def cache_inputs(nodes: GraphBuilder, role: str, model: ModelEntry) -> dict[str, ir.Value]:
    """Add inputs for a model's caches; return them by their names in its decoder."""
    inputs = {}
    for state in model.states:
        name = f"past_key_values.{state.name}"
        inputs[name] = nodes.input(f"{role}.{name}", FLOAT, list(state.sizes(model.capacity)))
    return inputs


def output_name(name: str) -> str:
    """Return the output name of a cache input."""
    return name.replace("past_key_values", "present")


def add_cache_outputs(
    nodes: GraphBuilder, role: str, buffers: dict[str, ir.Value], written: dict[str, ir.Value]
) -> None:
    """Add outputs for a model's caches."""
    for name, value in buffers.items():
        assert value.shape is not None
        output = written[output_name(name)]
        nodes.output(f"{role}.{output_name(name)}", output, FLOAT, list(value.shape))


def add_round_outputs(
    nodes: GraphBuilder, tokens: ir.Value, accepted: ir.Value, next_token: ir.Value
) -> None:
    """Add outputs: the tokens of a round, [K + 1], and the number of accepted draft tokens.

    tokens [K, 1], accepted [1], next_token [1, 1]
    """
    position = nodes("Unsqueeze", accepted, [1])
    next_tokens = nodes("Concat", tokens, next_token, axis=0)
    next_tokens = nodes("ScatterElements", next_tokens, position, next_token, axis=0)
    nodes.output("next_tokens", nodes("Reshape", next_tokens, [-1]), INT, ["R"])
    nodes.output("num_accepted", accepted, INT, [1])


def _replace_unknown(
    nodes: GraphBuilder, tokens: ir.Value, draft: ModelEntry, vocab_size: int
) -> ir.Value:
    """Replace tokens that the draft model does not have by token 0."""
    if draft.vocab_size >= vocab_size:
        return tokens
    return nodes("Where", nodes("Less", tokens, draft.vocab_size), tokens, 0)


def _draft_weights(
    nodes: GraphBuilder, logits: ir.Value, bundle: Bundle, settings: sampling_nodes.SamplingInputs
) -> sampling_nodes.TokenWeights:
    """Return the draft's distribution over the target's tokens. [1, 1, C]"""
    draft, size, seen = bundle.draft_model, bundle.target.vocab_size, settings.seen
    logits = sampling_nodes.token_logits(nodes, logits, draft, 1)
    ids = bundle.ids_of(draft)
    if ids is not None:
        columns = np.array(ids)
        seen = nodes("Gather", seen, columns, axis=1)
        row = sampling_nodes.token_weights(nodes, logits, seen, len(ids), settings, is_one=True)
        empty = nodes("Expand", 0.0, [1, size])
        selected = sampling_nodes.select_columns(nodes, nodes.constant(columns[None]), settings)
        weights = nodes("ScatterElements", empty, selected, row.weights, axis=1)
        argmax = nodes("Gather", columns, row.argmax)
        return sampling_nodes.TokenWeights(
            argmax, sampling_nodes.select_columns(nodes, weights, settings)
        )
    if draft.vocab_size == size:
        return sampling_nodes.token_weights(nodes, logits, seen, size, settings, is_one=True)
    seen = nodes("Slice", seen, [0], [draft.vocab_size], [1])
    row = sampling_nodes.token_weights(nodes, logits, seen, draft.vocab_size, settings, is_one=True)
    weights = nodes("Pad", row.weights, [0, 0, 0, size - draft.vocab_size])
    return sampling_nodes.TokenWeights(
        row.argmax, sampling_nodes.select_columns(nodes, weights, settings)
    )


def draft_graph(root: Path, bundle: Bundle, ops: str) -> ir.Model:
    """Build the graph of a draft step, which returns the next token and its distribution."""
    nodes, model, size = GraphBuilder("draft"), bundle.draft_model, bundle.target.vocab_size
    tokens = nodes.input("tokens", INT, [1, "N"])
    length = nodes.input("draft_length", INT, [1])
    settings = sampling_nodes.sampling_inputs(nodes, size)
    uniform = nodes.input("uniforms", DOUBLE, [1])
    buffers = cache_inputs(nodes, "draft", model)
    part = GraphTemplate(root, model.graph("decoder", ops).file)
    copy = partial(part.copy, nodes, "draft")
    step = draft_step(nodes, bundle, copy, tokens, length, buffers, settings, uniform)
    nodes.output("token", nodes("Reshape", step.token, [-1]), INT, [1])
    weights = sampling_nodes.restore_columns(nodes, step.weights, size, settings)
    nodes.output("weights", weights, FLOAT, [1, size])
    add_cache_outputs(nodes, "draft", buffers, step.outputs)
    return ir.Model(nodes.graph, ir_version=IR_VERSION)


def accept_graph(bundle: Bundle) -> ir.Model:
    """Build the graph of the accept rule over the logits of the verify pass, for any K."""
    nodes, model, size = GraphBuilder("accept"), bundle.target, bundle.target.vocab_size
    logits = nodes.input("logits", FLOAT, [1, "R", model.padded_vocab_size])
    tokens = nodes.input("tokens", INT, ["K"])
    weights = nodes.input("weights", FLOAT, ["K", size])
    limit = nodes.input("num_draft_tokens", INT, [1])
    settings = sampling_nodes.sampling_inputs(nodes, size)
    uniforms = nodes.input("uniforms", DOUBLE, ["R"])
    tokens = nodes("Unsqueeze", tokens, [1])
    seen = sampling_nodes.seen_before_each(nodes, tokens, settings)
    rows = sampling_nodes.token_weights(
        nodes, sampling_nodes.token_logits(nodes, logits, model, -1), seen, size, settings
    )
    weights = sampling_nodes.select_columns(nodes, weights, settings)
    tests = nodes("Slice", uniforms, [0], [-1])
    last = nodes("Slice", uniforms, [-1], [END])
    judged = sampling_nodes.accept_tokens(
        nodes, tokens, weights, rows, limit, tests, last, settings
    )
    add_round_outputs(nodes, tokens, *judged)
    return ir.Model(nodes.graph, ir_version=IR_VERSION)
