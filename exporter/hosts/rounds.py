"""A round as graphs: K draft steps, the target's pass over them, and the accept rule.

`fused` is all of it in one graph, for hosts that take one `Run` a round. Letters: N tokens to feed,
K draft tokens, V the target's vocabulary entries, R rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir

from specedge.bundle import Bundle
from specedge.manifest import Model
from specedge.precision import DTYPES

from . import drawing
from .joining import NewRows
from .nodes import Nodes
from .parts import Part

_INT, _FLOAT, _DOUBLE = ir.DataType.INT64, ir.DataType.FLOAT, ir.DataType.DOUBLE
_END = np.iinfo(np.int64).max
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
        self._tokens = nodes.input("tokens", _INT, [1, "N"])
        self._draft_length = nodes.input("draft_length", _INT, [1])
        self._target_length = nodes.input("target_length", _INT, [1])
        self._limit = nodes.input("num_draft_tokens", _INT, [1])
        self._settings = drawing.settings(nodes, bundle.target.vocab_size)
        self._uniforms = nodes.input("uniforms", _DOUBLE, [2 * num_draft_tokens + 1])
        self._caches = {
            role: caches(nodes, role, bundle.models[role]) for role in ("draft", "target")
        }

    def model(self) -> ir.Model:
        nodes, k = self._nodes, self._k
        drafted, distributions, seen, draft_caches = self._draft()
        tokens = nodes("Concat", *drafted, axis=0)
        missing = nodes("Sub", self._target_length, self._draft_length)
        fed = nodes("Slice", self._tokens, missing, [_END], [1])
        fed = nodes("Concat", fed, nodes("Reshape", tokens, [1, k]), axis=1)
        target = self._bundle.target
        inputs = {"input_ids": fed, "past_length": self._target_length}
        inputs |= {"logits_from": nodes("Identity", [-1 - k])} | self._caches["target"]
        part = Part(self._root, target.graph("decoder", self._ops["target"]).file)
        made = part.copy(nodes, "target", inputs)
        rows = of_tokens(nodes, made["logits"], target, k + 1)
        rows = drawing.penalised(nodes, rows, nodes("Concat", *seen, axis=0), self._settings)
        weights = drawing.weights(nodes, rows, target.vocab_size, self._settings)
        accepted, next_token = drawing.judge(
            nodes, tokens, nodes("Concat", *distributions, axis=0), weights, self._limit,
            nodes("Slice", self._uniforms, [k], [2 * k]),
            nodes("Slice", self._uniforms, [2 * k], [2 * k + 1]),
        )  # fmt: skip
        verdict(nodes, tokens, accepted, next_token)
        for role, written in (("draft", draft_caches), ("target", made)):
            commit(nodes, role, self._caches[role], written)
        return ir.Model(nodes.graph, ir_version=IR_VERSION)

    def _draft(
        self,
    ) -> tuple[list[ir.Value], list[ir.Value], list[ir.Value], dict[str, ir.Value]]:
        """Draft tokens [1] each, their distributions [1, V], what was seen before each and after
        the last [1, V], and the buffers as they are then.
        """
        nodes, draft, size = self._nodes, self._bundle.draft, self._bundle.target.vocab_size
        offsets = nodes("CumSum", nodes("Add", nodes("Mul", self._tokens, 0), 1), np.array(1))
        offsets = nodes("Reshape", nodes("Sub", offsets, 1), [-1])
        places = nodes("Add", offsets, self._draft_length)
        joined = _is_joined(draft)
        ops = "onnx" if joined else self._ops["draft"]
        file = draft.graph("decoder", ops).file
        part = Part(self._root, file)
        new = NewRows(nodes, self._draft_length, draft.cache.capacity) if joined else None
        buffers = dict(self._caches["draft"])
        fed, place = known(nodes, self._tokens, draft, size), self._draft_length
        tokens, distributions, seen = [], [], [self._settings.seen]
        for i in range(self._k):
            inputs = {"input_ids": fed, "past_length": place} | buffers
            inputs["logits_from"] = nodes("Identity", [-1])
            if new is not None:
                new.step(places)
                made = part.copy(nodes, f"draft.{i}", inputs, new.rewrite)
            else:
                made = part.copy(nodes, f"draft.{i}", inputs)
                buffers = {name: made[present(name)] for name in buffers}
            row = draft_weights(nodes, made["logits"], self._bundle, seen[-1], self._settings)
            uniform = nodes("Slice", self._uniforms, [i], [i + 1])
            tokens.append(drawing.draw(nodes, row, uniform))
            distributions.append(row)
            seen.append(drawing.also_seen(nodes, seen[-1], tokens[-1]))
            fed = nodes("Reshape", tokens[-1], [1, 1])
            places = place = nodes("Add", nodes("Slice", places, [-1], [_END]), 1)
        if new is not None:
            committed = new.commit()
            buffers = {name: committed[value] for name, value in buffers.items()}
        written = {present(name): value for name, value in buffers.items()}
        return tokens, distributions, seen, written


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
            found[name] = nodes.input(f"{role}.{name}", _FLOAT, shape)
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
        nodes.output(f"{role}.{present(name)}", output, _FLOAT, list(value.shape))


def verdict(nodes: Nodes, tokens: ir.Value, accepted: ir.Value, next_token: ir.Value) -> None:
    """Outputs for the tokens of a round, [K + 1], and how many of them were drafted."""
    padded = nodes("Concat", tokens, next_token, axis=0)
    places = nodes("Sub", nodes("CumSum", nodes("Add", nodes("Mul", padded, 0), 1), np.array(0)), 1)
    found = nodes("Where", nodes("Less", places, accepted), padded, next_token)
    nodes.output("next_tokens", found, _INT, ["R"])
    nodes.output("num_accepted", accepted, _INT, [1])


def of_tokens(nodes: Nodes, logits: ir.Value, model: Model, rows: int) -> ir.Value:
    """Logits [1, R, C] of the vocabulary alone. -> [R, V]"""
    found = nodes("Reshape", logits, [rows, model.padded_vocab_size])
    if model.padded_vocab_size <= model.vocab_size:
        return found
    return nodes("Slice", found, [0], [model.vocab_size], [1])


def known(nodes: Nodes, tokens: ir.Value, draft: Model, vocab_size: int) -> ir.Value:
    """Tokens as a draft is fed: those that it does not have are token 0 to it."""
    if draft.vocab_size >= vocab_size:
        return tokens
    return nodes("Where", nodes("Less", tokens, draft.vocab_size), tokens, 0)


def draft_weights(
    nodes: Nodes, logits: ir.Value, bundle: Bundle, seen: ir.Value, settings: drawing.Settings
) -> ir.Value:
    """The weights of a draft's row among all tokens of the target. [1, 1, C] -> [1, V]"""
    draft, size = bundle.draft, bundle.target.vocab_size
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
