"""A round in parts, for hosts that vary K, run the models on two devices, or hold a packed draft.

`draft` is one draft step, `accept` the accept rule; between them the host runs the target's own
decoder. Letters: N tokens to feed, K draft tokens, V the target's vocabulary entries.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import onnx_ir as ir

from specedge.bundle import Bundle

from . import drawing
from .nodes import DOUBLE, END, FLOAT, INT, Nodes
from .parts import Part
from .rounds import IR_VERSION, caches, commit, draft_step, of_tokens, verdict


def draft(root: Path, bundle: Bundle, ops: str) -> ir.Model:
    """A draft step: tokens to feed, and the token drawn after them with its distribution."""
    nodes, model, size = Nodes("draft"), bundle.draft_model, bundle.target.vocab_size
    tokens = nodes.input("tokens", INT, [1, "N"])
    length = nodes.input("draft_length", INT, [1])
    settings = drawing.settings(nodes, size)
    uniform = nodes.input("uniforms", DOUBLE, [1])
    buffers = caches(nodes, "draft", model)
    part = Part(root, model.graph("decoder", ops).file)
    copy = partial(part.copy, nodes, "draft")
    step = draft_step(nodes, bundle, copy, tokens, length, buffers, settings, uniform)
    nodes.output("token", nodes("Reshape", step.token, [-1]), INT, [1])
    weights = drawing.whole(nodes, step.weights, size, settings)
    nodes.output("weights", weights, FLOAT, [1, size])
    commit(nodes, "draft", buffers, step.made)
    return ir.Model(nodes.graph, ir_version=IR_VERSION)


def accept(bundle: Bundle) -> ir.Model:
    """The accept rule over the logits of the target's pass, of any K."""
    nodes, model, size = Nodes("accept"), bundle.target, bundle.target.vocab_size
    logits = nodes.input("logits", FLOAT, [1, "R", model.padded_vocab_size])
    tokens = nodes.input("tokens", INT, ["K"])
    weights = nodes.input("weights", FLOAT, ["K", size])
    limit = nodes.input("num_draft_tokens", INT, [1])
    settings = drawing.settings(nodes, size)
    uniforms = nodes.input("uniforms", DOUBLE, ["R"])
    tokens = nodes("Unsqueeze", tokens, [1])
    seen = drawing.seen_before(nodes, tokens, settings)
    rows = drawing.rows(nodes, of_tokens(nodes, logits, model, -1), seen, size, settings)
    weights = drawing.of_columns(nodes, weights, settings)
    tests = nodes("Slice", uniforms, [0], [-1])
    last = nodes("Slice", uniforms, [-1], [END])
    judged = drawing.judge(nodes, tokens, weights, rows, limit, tests, last, settings)
    verdict(nodes, tokens, *judged)
    return ir.Model(nodes.graph, ir_version=IR_VERSION)
