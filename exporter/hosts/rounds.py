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
from specedge.manifest import Model
from specedge.precision import DTYPES

from . import drawing
from .joining import NewRows
from .nodes import DOUBLE, END, FLOAT, INT, Nodes
from .parts import Part

IR_VERSION = 10
_SMALL = 8 << 20  # bytes of caches and weights that each draft step may copy


def fused(root: Path, bundle: Bundle, num_draft_tokens: int, ops: Mapping[str, str]) -> ir.Model:
    """The round over the weights files of the bundle in `root`, in the op sets of both models."""
    return _Round(root, bundle, num_draft_tokens, ops).model()


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
        steps, written = self._draft()
        tokens = nodes("Concat", *(step.token for step in steps), axis=0)
        distributions = nodes("Concat", *(step.weights for step in steps), axis=0)
        rows, made = self._verify(tokens)
        tests = nodes("Slice", self._uniforms, [k], [2 * k])
        last = nodes("Slice", self._uniforms, [2 * k], [2 * k + 1])
        judged = drawing.judge(nodes, tokens, distributions, rows, self._limit, tests, last)
        verdict(nodes, tokens, *judged)
        commit(nodes, "draft", self._caches["draft"], written)
        commit(nodes, "target", self._caches["target"], made)
        return ir.Model(nodes.graph, ir_version=IR_VERSION)

    def _draft(self) -> tuple[list[Step], dict[str, ir.Value]]:
        """K steps, and the buffers as they are then by what graphs call them as outputs."""
        nodes, draft = self._nodes, self._bundle.draft
        joined = _is_joined(draft)
        ops = "onnx" if joined else self._ops["draft"]
        part = Part(self._root, draft.graph("decoder", ops).file)
        new = NewRows(nodes, self._draft_length, draft.cache.capacity) if joined else None
        buffers, settings, steps = dict(self._caches["draft"]), self._settings, list[Step]()
        fed, place, places = self._tokens, self._draft_length, self._places()
        for i in range(self._k):
            if new is not None:
                new.step(places)
            rewrite = new.rewrite if new is not None else None
            copy = partial(part.copy, nodes, f"draft.{i}", rewrite=rewrite)
            uniform = nodes("Slice", self._uniforms, [i], [i + 1])
            step = draft_step(nodes, self._bundle, copy, fed, place, buffers, settings, uniform)
            if new is None:
                buffers = {name: step.made[present(name)] for name in buffers}
            seen = drawing.also_seen(nodes, settings.seen, step.token)
            settings = replace(settings, seen=seen)
            fed = nodes("Reshape", step.token, [1, 1])
            places = place = nodes("Add", nodes("Slice", places, [-1], [END]), 1)
            steps.append(step)
        if new is not None:
            committed = new.commit()
            buffers = {name: committed[value] for name, value in buffers.items()}
        return steps, {present(name): value for name, value in buffers.items()}

    def _places(self) -> ir.Value:
        """Where the fed tokens are in the text. [N]"""
        nodes = self._nodes
        numbers = nodes("CumSum", nodes("Add", nodes("Mul", self._tokens, 0), 1), np.array(1))
        offsets = nodes("Reshape", nodes("Sub", numbers, 1), [-1])
        return nodes("Add", offsets, self._draft_length)

    def _verify(self, tokens: ir.Value) -> tuple[ir.Value, dict[str, ir.Value]]:
        """The target's weights after each drafted token and before them [K + 1, V], and all that
        its pass gives.
        """
        nodes, k, target = self._nodes, self._k, self._bundle.target
        missing = nodes("Sub", self._target_length, self._draft_length)
        fed = nodes("Slice", self._tokens, missing, [END], [1])
        fed = nodes("Concat", fed, nodes("Reshape", tokens, [1, k]), axis=1)
        inputs = {"input_ids": fed, "past_length": self._target_length}
        inputs |= {"logits_from": nodes("Identity", [-1 - k])} | self._caches["target"]
        part = Part(self._root, target.graph("decoder", self._ops["target"]).file)
        made = part.copy(nodes, "target", inputs)
        rows = of_tokens(nodes, made["logits"], target, k + 1)
        return drawing.target_weights(nodes, rows, tokens, target.vocab_size, self._settings), made


@dataclass(frozen=True)
class Step:
    """A draft token [1], its distribution [1, V], and all that the draft's pass gives."""

    token: ir.Value
    weights: ir.Value
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
    fed = _known(nodes, tokens, bundle.draft, bundle.target.vocab_size)
    last = nodes("Identity", [-1])
    made = copy({"input_ids": fed, "past_length": length, "logits_from": last} | buffers)
    row = _draft_weights(nodes, made["logits"], bundle, settings)
    return Step(drawing.draw(nodes, row, uniform), row, made)


def _is_joined(draft: Model) -> bool:
    """Whether draft steps attend over old and new rows apart, which copies no buffer.

    Their last bits are not the runtime's. In float32 that changes a draw in a million; where x is
    rounded to bytes it is one in thousands, so there steps copy their buffers.
    """
    return draft.weights_dtype in DTYPES


def check_fused(bundle: Bundle) -> str | None:
    """Why a round cannot be one graph, or should not be."""
    draft = bundle.draft
    if draft.context_length < bundle.target.context_length:
        return f"{draft.source.id} has a shorter context than the target, which one graph cannot do"
    if _is_joined(draft):
        ops = draft.parity.keys()
        return None if "onnx" in ops else f"{draft.source.id} has no graphs in the op set 'onnx'"
    weights = bundle.files[draft.weights].size
    if draft.cache.size + weights > _SMALL:
        return (
            f"{draft.source.id} is in {draft.weights_dtype}: in one graph each step would copy "
            f"{draft.cache.size >> 20} MB of caches and hold {weights >> 20} MB of weights"
        )
    return None


def caches(nodes: Nodes, role: str, model: Model) -> dict[str, ir.Value]:
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
    """Outputs for the tokens of a round, [K + 1], and how many of them were drafted."""
    padded = nodes("Concat", tokens, next_token, axis=0)
    places = nodes("Sub", nodes("CumSum", nodes("Add", nodes("Mul", padded, 0), 1), np.array(0)), 1)
    found = nodes("Where", nodes("Less", places, accepted), padded, next_token)
    nodes.output("next_tokens", found, INT, ["R"])
    nodes.output("num_accepted", accepted, INT, [1])


def of_tokens(nodes: Nodes, logits: ir.Value, model: Model, rows: int) -> ir.Value:
    """Logits [1, R, C] of the vocabulary alone. -> [R, V]"""
    found = nodes("Reshape", logits, [rows, model.padded_vocab_size])
    if model.padded_vocab_size <= model.vocab_size:
        return found
    return nodes("Slice", found, [0], [model.vocab_size], [1])


def _known(nodes: Nodes, tokens: ir.Value, draft: Model, vocab_size: int) -> ir.Value:
    """Tokens as a draft is fed: those that it does not have are token 0 to it."""
    if draft.vocab_size >= vocab_size:
        return tokens
    return nodes("Where", nodes("Less", tokens, draft.vocab_size), tokens, 0)


def _draft_weights(
    nodes: Nodes, logits: ir.Value, bundle: Bundle, settings: drawing.Settings
) -> ir.Value:
    """The weights of a draft's row among all tokens of the target. [1, 1, C] -> [1, V]"""
    draft, size, seen = bundle.draft, bundle.target.vocab_size, settings.seen
    ids = bundle.ids_of(draft)
    if ids is not None:
        columns = np.array(ids)
        row = nodes("Reshape", logits, [1, len(ids)])
        row = drawing.penalised(nodes, row, nodes("Gather", seen, columns, axis=1), settings)
        weights = drawing.weights(nodes, row, len(ids), settings)
        empty = nodes("Expand", 0.0, [1, size])
        return nodes("ScatterElements", empty, columns[None], weights, axis=1)
    row = of_tokens(nodes, logits, draft, 1)
    if draft.vocab_size == size:
        row = drawing.penalised(nodes, row, seen, settings)
        return drawing.weights(nodes, row, size, settings)
    row = drawing.penalised(
        nodes, row, nodes("Slice", seen, [0], [draft.vocab_size], [1]), settings
    )
    weights = drawing.weights(nodes, row, draft.vocab_size, settings)
    return nodes("Pad", weights, [0, 0, 0, size - draft.vocab_size])
