"""A round in parts, for hosts that vary K, run the models on two devices, or hold a packed draft.

`draft` is one draft step, `accept` the accept rule; between them the host runs the target's own
decoder. Letters: N tokens to feed, K draft tokens, V the target's vocabulary entries.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

from specedge.bundle import Bundle

from . import drawing
from .nodes import Nodes
from .parts import Part
from .rounds import IR_VERSION, caches, commit, draft_weights, known, of_tokens, verdict

_INT, _FLOAT, _DOUBLE = ir.DataType.INT64, ir.DataType.FLOAT, ir.DataType.DOUBLE
_END = np.iinfo(np.int64).max


def draft(root: Path, bundle: Bundle, ops: str) -> ir.Model:
    """A draft step: tokens to feed, and the token drawn after them with its distribution."""
    nodes, model, size = Nodes("draft"), bundle.draft, bundle.target.vocab_size
    tokens = nodes.input("tokens", _INT, [1, "N"])
    length = nodes.input("draft_length", _INT, [1])
    settings = drawing.settings(nodes, size)
    uniform = nodes.input("uniforms", _DOUBLE, [1])
    buffers = caches(nodes, "draft", model)
    inputs = {"input_ids": known(nodes, tokens, model, size), "past_length": length} | buffers
    inputs["logits_from"] = nodes("Identity", [-1])
    made = Part(root, model.graph("decoder", ops).file).copy(nodes, "draft", inputs)
    weights = draft_weights(nodes, made["logits"], bundle, settings.seen, settings)
    nodes.output("token", drawing.draw(nodes, weights, uniform), _INT, [1])
    nodes.output("weights", weights, _FLOAT, [1, size])
    commit(nodes, "draft", buffers, made)
    return ir.Model(nodes.graph, ir_version=IR_VERSION)


def accept(bundle: Bundle) -> ir.Model:
    """The accept rule over the logits of the target's pass, of any K."""
    nodes, model, size = Nodes("accept"), bundle.target, bundle.target.vocab_size
    logits = nodes.input("logits", _FLOAT, [1, "R", model.padded_vocab_size])
    tokens = nodes.input("tokens", _INT, ["K"])
    weights = nodes.input("weights", _FLOAT, ["K", size])
    limit = nodes.input("num_draft_tokens", _INT, [1])
    settings = drawing.settings(nodes, size)
    uniforms = nodes.input("uniforms", _DOUBLE, ["R"])
    rows = of_tokens(nodes, logits, model, -1)
    seen = drawing.seen_before(nodes, settings, tokens)
    rows = drawing.penalised(nodes, rows, seen, settings)
    rows = drawing.weights(nodes, rows, size, settings)
    tests = nodes("Slice", uniforms, [0], [-1])
    last = nodes("Slice", uniforms, [-1], [_END])
    accepted, next_token = drawing.judge(nodes, tokens, weights, rows, limit, tests, last)
    verdict(nodes, tokens, accepted, next_token)
    return ir.Model(nodes.graph, ir_version=IR_VERSION)
