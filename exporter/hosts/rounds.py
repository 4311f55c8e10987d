"""A round as graphs: K draft steps, the target's pass over them, and the accept rule.

`fused` is all of it in one graph, for hosts that take one `Run` a round. Letters: N tokens to feed,
K draft tokens, V the target's vocabulary entries, R rows.
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

from . import drawing
from .nodes import DOUBLE, END, FLOAT, INT, Nodes
from .parts import Part

IR_VERSION = 10
PLAIN_K = 1  # the smallest that a host's graph may have
_SMALL = 8 << 20  # bytes of packed weights that each draft step may have of its own


def fused(root: Path, bundle: Bundle, num_draft_tokens: int, ops: Mapping[str, str]) -> ir.Model:
    """The round over the weights files of the bundle in `root`, in the op sets of both models."""
    return _Round(root, bundle, num_draft_tokens, ops).model()


def plain(root: Path, bundle: Bundle, ops: str) -> ir.Model:
    """Return the round of a bundle without a draft model: a pass of the target, and one token.

    Its inputs and outputs are those of a fused round of `PLAIN_K` draft tokens, of which it accepts
    none, so hosts run it as they run others.
    """
    nodes, target = Nodes("round"), bundle.target
    tokens = nodes.input("tokens", INT, [1, "N"])
    draft_length = nodes.input("draft_length", INT, [1])
    length = nodes.input("target_length", INT, [1])
    limit = nodes.input("num_draft_tokens", INT, [1])
    settings = drawing.settings(nodes, target.vocab_size)
    uniforms = nodes.input("uniforms", DOUBLE, [2 * PLAIN_K + 1])
    buffers = caches(nodes, "target", target)
    fed = nodes("Slice", tokens, nodes("Sub", length, draft_length), [END], [1])
    inputs = {"input_ids": fed, "past_length": length, "logits_from": nodes.constant([-1])}
    part = Part(root, target.graph("decoder", ops).file)
    made = part.copy(nodes, "target", inputs | buffers)
    logits = of_tokens(nodes, made["logits"], target, 1)
    row = drawing.rows(nodes, logits, settings.seen, target.vocab_size, settings, is_one=True)
    token = drawing.choose(nodes, row, nodes("Slice", uniforms, [-1], [END]), settings)
    found = nodes("Concat", *[token] * (PLAIN_K + 1), axis=0)
    nodes.output("next_tokens", nodes("Reshape", found, [-1]), INT, ["R"])
    nodes.output("num_accepted", nodes("Mul", limit, 0), INT, [1])
    commit(nodes, "target", buffers, made)
    return ir.Model(nodes.graph, ir_version=IR_VERSION)


class _Round:
    """The graph of a round as it grows."""

    def __init__(
        self, root: Path, bundle: Bundle, num_draft_tokens: int, ops: Mapping[str, str]
    ) -> None:
        self._root, self._bundle, self._k, self._ops = root, bundle, num_draft_tokens, ops
        nodes = self._nodes = Nodes("round")
        self._tokens = nodes.input("tokens", INT, [1, "N"])
        self._draft_length = nodes.input("draft_length", INT, [1])
        self._target_length = nodes.input("target_length", INT, [1])
        self._limit = nodes.input("num_draft_tokens", INT, [1])
        self._settings = drawing.settings(nodes, bundle.target.vocab_size)
        self._uniforms = nodes.input("uniforms", DOUBLE, [2 * num_draft_tokens + 1])
        self._caches = {
            role: caches(nodes, role, bundle.models[role]) for role in ("draft", "target")
        }

    def model(self) -> ir.Model:
        nodes, k = self._nodes, self._k
        sizes = np.array([1] * k + [k, 1])
        first = nodes("Split", self._uniforms, sizes, axis=0, num_outputs=k + 2)
        *uniforms, tests, last = first, *nodes.others(first)
        steps = self._draft(uniforms)
        tokens = nodes("Concat", *(step.token for step in steps), axis=0)
        distributions = nodes("Concat", *(step.weights for step in steps), axis=0)
        seen = nodes("Concat", self._settings.seen, *(step.seen for step in steps), axis=0)
        rows, made = self._verify(tokens, seen)
        judged = drawing.judge(
            nodes, tokens, distributions, rows, self._limit, tests, last, self._settings
        )
        verdict(nodes, tokens, *judged)
        for i, step in enumerate(steps[:-1]):
            commit(nodes, f"draft.{i}", self._caches["draft"], step.made)
        commit(nodes, "draft", self._caches["draft"], steps[-1].made)
        commit(nodes, "target", self._caches["target"], made)
        return ir.Model(nodes.graph, ir_version=IR_VERSION)

    def _draft(self, uniforms: list[ir.Value]) -> list[Step]:
        """K steps, of which each writes the buffers that the one before it gives."""
        nodes, draft = self._nodes, self._bundle.draft_model
        part = Part(self._root, draft.graph("decoder", self._ops["draft"]).file)
        buffers, settings, steps = self._caches["draft"], self._settings, list[Step]()
        fed, length, num_fed = self._tokens, self._draft_length, self._num_fed()
        for i, uniform in enumerate(uniforms):
            copy = partial(part.copy, nodes, f"draft.{i}")
            step = draft_step(nodes, self._bundle, copy, fed, length, buffers, settings, uniform)
            buffers = {name: step.made[present(name)] for name in buffers}
            settings = replace(settings, seen=step.seen)
            fed, length, num_fed = step.token, nodes("Add", length, num_fed), nodes.constant([1])
            steps.append(step)
        return steps

    def _num_fed(self) -> ir.Value:
        """N. [1]"""
        nodes = self._nodes
        ones = nodes("Add", nodes("Mul", self._tokens, 0), 1)
        return nodes("ReduceSum", ones, [1], keepdims=0)

    def _verify(self, tokens: ir.Value, seen: ir.Value) -> tuple[drawing.Rows, dict[str, ir.Value]]:
        """The target's rows after each drafted token and before them, and all that its pass gives.

        tokens [K, 1], seen [K + 1, V]
        """
        nodes, k, target = self._nodes, self._k, self._bundle.target
        missing = nodes("Sub", self._target_length, self._draft_length)
        fed = nodes("Slice", self._tokens, missing, [END], [1])
        fed = nodes("Concat", fed, nodes("Reshape", tokens, [1, k]), axis=1)
        inputs = {"input_ids": fed, "past_length": self._target_length}
        inputs |= {"logits_from": nodes.constant([-1 - k])} | self._caches["target"]
        part = Part(self._root, target.graph("decoder", self._ops["target"]).file)
        made = part.copy(nodes, "target", inputs)
        logits = of_tokens(nodes, made["logits"], target, k + 1)
        return drawing.rows(nodes, logits, seen, target.vocab_size, self._settings), made


@dataclass(frozen=True)
class Step:
    """A draft token [1, 1], its distribution [1, C], what is seen after it [1, V], and all that the
    draft's pass gives.
    """

    token: ir.Value
    weights: ir.Value
    seen: ir.Value
    made: dict[str, ir.Value]


def draft_step(
    nodes: Nodes,
    bundle: Bundle,
    copy: Callable[[dict[str, ir.Value]], dict[str, ir.Value]],
    tokens: ir.Value,
    length: ir.Value,
    buffers: dict[str, ir.Value],
    settings: drawing.Settings,
    uniform: ir.Value,
) -> Step:
    """Feed tokens [1, N] to a copy of the draft and draw the next one."""
    fed = _known(nodes, tokens, bundle.draft_model, bundle.target.vocab_size)
    last = nodes.constant([-1])
    made = copy({"input_ids": fed, "past_length": length, "logits_from": last} | buffers)
    row = _draft_row(nodes, made["logits"], bundle, settings)
    token = drawing.choose(nodes, row, uniform, settings)
    return Step(token, row.weights, drawing.also_seen(nodes, settings.seen, token), made)


def check_fused(bundle: Bundle) -> str | None:
    """Why a round cannot be one graph, or should not be."""
    draft = bundle.draft_model
    if draft.context_length < bundle.target.context_length:
        return f"{draft.source.id} has a shorter context than the target, which one graph cannot do"
    weights = bundle.files[draft.weights].size
    if draft.weights_dtype in QUANTIZED_DTYPES and weights > _SMALL:
        return (
            f"{draft.source.id} is in {draft.weights_dtype}: in one graph each step would hold "
            f"{weights >> 20} MB of weights of its own"
        )
    return None


def caches(nodes: Nodes, role: str, model: ModelEntry) -> dict[str, ir.Value]:
    """Inputs for a model's buffers, by what its own graphs call them."""
    found = {}
    for i, layer in enumerate(model.cache.layers):
        for kind, size in (("key", layer.key_size), ("value", layer.value_size)):
            shape = [1, layer.heads, model.cache.capacity, size]
            name = f"past_key_values.{i}.{kind}"
            found[name] = nodes.input(f"{role}.{name}", FLOAT, shape)
    return found


def present(name: str) -> str:
    """What graphs call a buffer as an output."""
    return name.replace("past_key_values", "present")


def commit(
    nodes: Nodes, role: str, buffers: dict[str, ir.Value], written: dict[str, ir.Value]
) -> None:
    """Outputs for a model's buffers."""
    for name, value in buffers.items():
        assert value.shape is not None
        output = written[present(name)]
        nodes.output(f"{role}.{present(name)}", output, FLOAT, list(value.shape))


def verdict(nodes: Nodes, tokens: ir.Value, accepted: ir.Value, next_token: ir.Value) -> None:
    """Outputs for the tokens of a round, [K + 1], and how many of them were drafted.

    tokens [K, 1], accepted [1], next_token [1, 1]
    """
    place = nodes("Unsqueeze", accepted, [1])
    found = nodes("Concat", tokens, next_token, axis=0)
    found = nodes("ScatterElements", found, place, next_token, axis=0)
    nodes.output("next_tokens", nodes("Reshape", found, [-1]), INT, ["R"])
    nodes.output("num_accepted", accepted, INT, [1])


def of_tokens(nodes: Nodes, logits: ir.Value, model: ModelEntry, rows: int) -> ir.Value:
    """Logits [1, R, C] of the vocabulary alone. -> [R, V]"""
    found = nodes("Reshape", logits, [rows, model.padded_vocab_size])
    if model.padded_vocab_size <= model.vocab_size:
        return found
    return nodes("Slice", found, [0], [model.vocab_size], [1])


def _known(nodes: Nodes, tokens: ir.Value, draft: ModelEntry, vocab_size: int) -> ir.Value:
    """Tokens as a draft is fed: those that it does not have are token 0 to it."""
    if draft.vocab_size >= vocab_size:
        return tokens
    return nodes("Where", nodes("Less", tokens, draft.vocab_size), tokens, 0)


def _draft_row(
    nodes: Nodes, logits: ir.Value, bundle: Bundle, settings: drawing.Settings
) -> drawing.Rows:
    """A draft's row among all tokens of the target. [1, 1, C]"""
    draft, size, seen = bundle.draft_model, bundle.target.vocab_size, settings.seen
    ids = bundle.ids_of(draft)
    if ids is not None:
        columns = np.array(ids)
        logits = nodes("Reshape", logits, [1, len(ids)])
        seen = nodes("Gather", seen, columns, axis=1)
        row = drawing.rows(nodes, logits, seen, len(ids), settings, is_one=True)
        empty = nodes("Expand", 0.0, [1, size])
        places = drawing.of_columns(nodes, nodes.constant(columns[None]), settings)
        weights = nodes("ScatterElements", empty, places, row.weights, axis=1)
        likeliest = nodes("Gather", columns, row.likeliest)
        return drawing.Rows(likeliest, drawing.of_columns(nodes, weights, settings))
    logits = of_tokens(nodes, logits, draft, 1)
    if draft.vocab_size == size:
        return drawing.rows(nodes, logits, seen, size, settings, is_one=True)
    seen = nodes("Slice", seen, [0], [draft.vocab_size], [1])
    row = drawing.rows(nodes, logits, seen, draft.vocab_size, settings, is_one=True)
    weights = nodes("Pad", row.weights, [0, 0, 0, size - draft.vocab_size])
    return drawing.Rows(row.likeliest, drawing.of_columns(nodes, weights, settings))
