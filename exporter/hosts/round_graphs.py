"""Graphs of a speculative round: K draft steps, the target's verify pass, and the accept rule.

The fused graph is a whole round, for hosts that call `Run` once per round. The split graphs are a
draft step and the accept rule, between which the host runs the target's decoder: for hosts that
vary K, run the models on two devices, or have a packed draft model or a draft head. N input tokens,
K draft tokens, V entries of the target's vocabulary, R rows, F and H channels of hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir

from specedge.bundle import Bundle
from specedge.bundle.manifest import FUSE, ModelEntry
from specedge.bundle.precision import QUANTIZED_DTYPES

from ..graph.nodes import DOUBLE, END, FLOAT, INT, GraphBuilder, GraphTemplate
from ..graph.sampling_nodes import SamplingNodes, TokenWeights, token_logits

IR_VERSION = 10
PLAIN_K = 1  # smallest K of a host graph
_MAX_PACKED_BYTES = 8 << 20  # maximum bytes of packed weights per draft step


class RoundBuilder:
    """Builder of a round of the models in `ops`, over the weights files of the bundle."""

    def __init__(self, bundle: Bundle, num_draft_tokens: int, ops: Mapping[str, str]) -> None:
        self._bundle, self._k, self._ops = bundle, num_draft_tokens, ops
        nodes = self._nodes = GraphBuilder("round")
        self._tokens = nodes.input("tokens", INT, [1, "N"])
        self._draft_length = nodes.input("draft_length", INT, [1])
        self._target_length = nodes.input("target_length", INT, [1])
        self._limit = nodes.input("num_draft_tokens", INT, [1])
        self._sampling = sampling_inputs(nodes, bundle)
        self._uniforms = nodes.input("uniforms", DOUBLE, [2 * num_draft_tokens + 1])
        source_length = source_length_input(nodes, bundle)
        self._states = {
            role: state_inputs(nodes, role, bundle.models[role], source_length)
            for role in ("draft", "target")
            if role in ops
        }

    def plain_model(self) -> ir.Model:
        """Build the round of a bundle without a draft model: one pass of the target, one token.

        It ignores the draft inputs, returns its token K + 1 times, and accepts no draft token.
        """
        nodes, target, sampling = self._nodes, self._bundle.target, self._sampling
        missing = nodes("Sub", self._target_length, self._draft_length)
        fed = nodes("Slice", self._tokens, missing, [END], [1])
        outputs = self._target_pass(fed, -1)
        logits = token_logits(nodes, outputs["logits"], target, 1)
        banned = sampling.banned()
        row = sampling.token_weights(logits, sampling.seen, target.vocab_size, True, banned)
        uniform = nodes("Slice", self._uniforms, [-1], [END])
        token, _ = sampling.choose_token(row, uniform)
        next_tokens = nodes("Concat", *[token] * (self._k + 1), axis=0)
        nodes.output("next_tokens", nodes("Reshape", next_tokens, [-1]), INT, ["R"])
        nodes.output("num_accepted", nodes("Mul", self._limit, 0), INT, [1])
        add_cache_outputs(nodes, "target", self._states["target"], outputs)
        return ir.Model(nodes.graph, ir_version=IR_VERSION)

    def _target_pass(self, tokens: ir.Value, logits_from: int) -> dict[str, ir.Value]:
        """Add a pass of the target over tokens [1, N]; return its outputs by name."""
        file = self._bundle.target.graph("decoder", self._ops["target"]).file
        inputs = {"input_ids": tokens, "past_length": self._target_length}
        inputs |= {"logits_from": self._nodes.constant([logits_from])} | self._states["target"]
        return GraphTemplate(self._bundle.folder, file).copy(self._nodes, "target", inputs)

    def fused_model(self) -> ir.Model:
        """Build a whole speculative round."""
        nodes, k = self._nodes, self._k
        sizes = np.array([1] * k + [k, 1])
        first = nodes("Split", self._uniforms, sizes, axis=0, num_outputs=k + 2)
        *uniforms, tests, last = first, *nodes.others(first)
        steps = self._draft(uniforms)
        tokens = nodes("Concat", *(step.token for step in steps), axis=0)
        distributions = nodes("Concat", *(step.weights for step in steps), axis=0)
        seen = nodes("Concat", self._sampling.seen, *(step.after.seen for step in steps), axis=0)
        rows, outputs = self._verify(tokens, seen)
        judged = self._sampling.accept_tokens(tokens, distributions, rows, self._limit, tests, last)
        add_round_outputs(nodes, tokens, *judged)
        for i, step in enumerate(steps[:-1]):
            add_cache_outputs(nodes, f"draft.{i}", self._states["draft"], step.outputs)
        add_cache_outputs(nodes, "draft", self._states["draft"], steps[-1].outputs)
        add_cache_outputs(nodes, "target", self._states["target"], outputs)
        return ir.Model(nodes.graph, ir_version=IR_VERSION)

    def _draft(self, uniforms: list[ir.Value]) -> list[DraftStep]:
        """Add K draft steps, each of which updates the caches that the previous one returns."""
        nodes, draft = self._nodes, self._bundle.draft_model
        part = GraphTemplate(self._bundle.folder, draft.graph("decoder", self._ops["draft"]).file)
        states, sampling, steps = self._states["draft"], self._sampling, list[DraftStep]()
        fed, length, num_fed = self._tokens, self._draft_length, self._num_fed()
        for i, uniform in enumerate(uniforms):
            copy = partial(part.copy, nodes, f"draft.{i}")
            step = draft_step(sampling, self._bundle, copy, fed, length, states, uniform)
            states = {
                name: step.outputs.get(output_name(name), value) for name, value in states.items()
            }
            fed, length, num_fed = step.token, nodes("Add", length, num_fed), nodes.constant([1])
            sampling = step.after
            steps.append(step)
        return steps

    def _num_fed(self) -> ir.Value:
        """Return N. [1]"""
        nodes = self._nodes
        ones = nodes("Add", nodes("Mul", self._tokens, 0), 1)
        return nodes("ReduceSum", ones, [1], keepdims=0)

    def _verify(self, tokens: ir.Value, seen: ir.Value) -> tuple[TokenWeights, dict[str, ir.Value]]:
        """Add the verify pass; return the distributions of K + 1 rows, and the pass's outputs.

        tokens [K, 1], seen [K + 1, V]
        """
        nodes, k, target = self._nodes, self._k, self._bundle.target
        missing = nodes("Sub", self._target_length, self._draft_length)
        fed = nodes("Slice", self._tokens, missing, [END], [1])
        fed = nodes("Concat", fed, nodes("Reshape", tokens, [1, k]), axis=1)
        outputs = self._target_pass(fed, -1 - k)
        logits = token_logits(nodes, outputs["logits"], target, k + 1)
        banned = self._sampling.banned(tokens)
        rows = self._sampling.token_weights(logits, seen, target.vocab_size, banned=banned)
        return rows, outputs


@dataclass(frozen=True)
class DraftStep:
    """Draft step.

    Attributes:
        token: Its token, [1, 1].
        weights: Distribution it was sampled from, [1, C].
        after: Sampling after it, with the token in the history.
        outputs: Outputs of the draft model's pass.
    """

    token: ir.Value
    weights: ir.Value
    after: SamplingNodes
    outputs: dict[str, ir.Value]


def draft_step(
    sampling: SamplingNodes,
    bundle: Bundle,
    copy: Callable[[dict[str, ir.Value]], dict[str, ir.Value]],
    tokens: ir.Value,
    length: ir.Value,
    states: dict[str, ir.Value],
    uniform: ir.Value,
) -> DraftStep:
    """Feed tokens [1, N] to a copy of the draft model and choose the next one."""
    fed = replace_unknown(sampling.nodes, tokens, bundle.draft_model, bundle.target.vocab_size)
    last = sampling.nodes.constant([-1])
    outputs = copy({"input_ids": fed, "past_length": length, "logits_from": last} | states)
    row = _draft_weights(sampling, outputs["logits"], bundle)
    token, _ = sampling.choose_token(row, uniform)
    return DraftStep(token, row.weights, sampling.append(token), outputs)


def check_fused(bundle: Bundle, boundaries: Collection[int]) -> str | None:
    """Return the reason why a round cannot, or should not, be one graph; None otherwise.

    `boundaries` are cache lengths that no pass of the models may cross.
    """
    draft = bundle.draft_model
    if boundaries:
        return (
            f"{bundle.target.source.id} or {draft.source.id} has attention heads of more than 128 "
            f"channels, so that no pass may cross {max(boundaries)} cached tokens, as passes of "
            "fused rounds would"
        )
    if draft.reads_hidden:
        return (
            f"{draft.source.id} reads the target's hidden states, which fused rounds do not return"
        )
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


def sampling_inputs(nodes: GraphBuilder, bundle: Bundle) -> SamplingNodes:
    """Add the inputs of sampling."""
    return SamplingNodes.with_inputs(nodes, bundle.target.vocab_size, bundle.decoding_defaults)


def source_length_input(nodes: GraphBuilder, bundle: Bundle) -> ir.Value | None:
    """Add an input for the length of an encoder-decoder's source."""
    return None if bundle.target.encoder is None else nodes.input("source_length", INT, [1])


def state_inputs(
    nodes: GraphBuilder, role: str, model: ModelEntry, source_length: ir.Value | None
) -> dict[str, ir.Value]:
    """Add inputs for a model's states; return them by their names in its decoder.

    With the constant states of an encoder-decoder, the length of the source that it has read; of a
    draft head, the hidden states that it reads.
    """
    inputs = {}
    if source_length is not None and model.encoder is not None:
        inputs["source_length"] = nodes("Min", source_length, [model.encoder.max_length])
    if model.hidden is not None and model.hidden.draft_size is not None:
        inputs["hidden"] = nodes.input("hidden", FLOAT, [1, "N", model.hidden.draft_size])
    for state in model.states:
        name = f"past_key_values.{state.name}"
        inputs[name] = nodes.input(f"{role}.{name}", FLOAT, list(model.state_shape(state)))
    return inputs


def output_name(name: str) -> str:
    """Return the output name of a cache input."""
    return name.replace("past_key_values", "present")


def add_cache_outputs(
    nodes: GraphBuilder, role: str, states: dict[str, ir.Value], written: dict[str, ir.Value]
) -> None:
    """Add outputs for the states that a model's passes write."""
    for name, value in states.items():
        if (output := written.get(output_name(name))) is not None:
            assert value.shape is not None
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


def replace_unknown(
    nodes: GraphBuilder, tokens: ir.Value, draft: ModelEntry, vocab_size: int
) -> ir.Value:
    """Replace tokens that the draft model does not have by token 0."""
    if draft.vocab_size >= vocab_size:
        return tokens
    return nodes("Where", nodes("Less", tokens, draft.vocab_size), tokens, 0)


def _draft_weights(sampling: SamplingNodes, logits: ir.Value, bundle: Bundle) -> TokenWeights:
    """Return the draft's distribution over the target's tokens. [1, 1, C]"""
    nodes, seen, banned = sampling.nodes, sampling.seen, sampling.banned()
    draft, size = bundle.draft_model, bundle.target.vocab_size
    logits, ids = token_logits(nodes, logits, draft, 1), bundle.ids_of(draft)
    if ids is not None:
        columns = np.array(ids)
        seen = nodes("Gather", seen, columns, axis=1)
        if banned is not None:
            banned = nodes("Gather", banned, columns, axis=1)
        row = sampling.token_weights(logits, seen, len(ids), True, banned)
        empty = nodes("Expand", 0.0, [1, size])
        selected = sampling.select_columns(nodes.constant(columns[None]))
        selected = nodes("Where", sampling.is_sampled(), selected, 0)  # the column that is kept
        weights = nodes("ScatterElements", empty, selected, row.weights, axis=1)
        argmax = nodes("Gather", columns, row.argmax)
        return TokenWeights(argmax, sampling.select_columns(weights))
    if draft.vocab_size == size:
        return sampling.token_weights(logits, seen, size, True, banned)
    seen = nodes("Slice", seen, [0], [draft.vocab_size], [1])
    if banned is not None:
        banned = nodes("Slice", banned, [0], [draft.vocab_size], [1])
    row = sampling.token_weights(logits, seen, draft.vocab_size, True, banned)
    weights = nodes("Pad", row.weights, [0, 0, 0, size - draft.vocab_size])
    return TokenWeights(row.argmax, sampling.select_columns(weights))


def draft_graph(bundle: Bundle, ops: str) -> ir.Model:
    """Build the graph of a draft step, which returns the next token and its distribution."""
    nodes, model, size = GraphBuilder("draft"), bundle.draft_model, bundle.target.vocab_size
    tokens = nodes.input("tokens", INT, [1, "N"])
    length = nodes.input("draft_length", INT, [1])
    sampling = sampling_inputs(nodes, bundle)
    uniform = nodes.input("uniforms", DOUBLE, [1])
    states = state_inputs(nodes, "draft", model, source_length_input(nodes, bundle))
    part = GraphTemplate(bundle.folder, model.graph("decoder", ops).file)
    copy = partial(part.copy, nodes, "draft")
    step = draft_step(sampling, bundle, copy, tokens, length, states, uniform)
    nodes.output("token", nodes("Reshape", step.token, [-1]), INT, [1])
    weights = sampling.restore_columns(step.weights)
    nodes.output("weights", weights, FLOAT, [1, size])
    if model.hidden is not None and model.hidden.draft_size is not None:
        hidden = nodes("Slice", step.outputs["next_hidden"], [-1], [END], [1])
        nodes.output("next_hidden", hidden, FLOAT, [1, 1, model.hidden.draft_size])
    add_cache_outputs(nodes, "draft", states, step.outputs)
    return ir.Model(nodes.graph, ir_version=IR_VERSION)


def fuse_graph(bundle: Bundle, ops: str) -> ir.Model:
    """Build the graph of the states that a draft head reads, from those of the target."""
    nodes, model = GraphBuilder(FUSE), bundle.draft_model
    assert model.hidden is not None
    hidden = nodes.input("hidden", FLOAT, [1, "N", model.hidden.size])
    template = GraphTemplate(bundle.folder, model.graph(FUSE, ops).file)
    fused = template.copy(nodes, FUSE, {"hidden": hidden})["fused"]
    nodes.output("fused", fused, FLOAT, [1, "N", model.hidden.draft_size or model.hidden.size])
    return ir.Model(nodes.graph, ir_version=IR_VERSION)


def accept_graph(bundle: Bundle) -> ir.Model:
    """Build the graph of the accept rule over the logits of the verify pass, for any K."""
    nodes, model, size = GraphBuilder("accept"), bundle.target, bundle.target.vocab_size
    logits = nodes.input("logits", FLOAT, [1, "R", model.padded_vocab_size])
    tokens = nodes.input("tokens", INT, ["K"])
    weights = nodes.input("weights", FLOAT, ["K", size])
    limit = nodes.input("num_draft_tokens", INT, [1])
    sampling = sampling_inputs(nodes, bundle)
    uniforms = nodes.input("uniforms", DOUBLE, ["R"])
    tokens = nodes("Unsqueeze", tokens, [1])
    seen = sampling.seen_before_each(tokens)
    logits, banned = token_logits(nodes, logits, model, -1), sampling.banned(tokens)
    rows = sampling.token_weights(logits, seen, size, banned=banned)
    weights = sampling.select_columns(weights)
    tests = nodes("Slice", uniforms, [0], [-1])
    last = nodes("Slice", uniforms, [-1], [END])
    judged = sampling.accept_tokens(tokens, weights, rows, limit, tests, last)
    add_round_outputs(nodes, tokens, *judged)
    return ir.Model(nodes.graph, ir_version=IR_VERSION)
