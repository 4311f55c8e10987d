"""Graph of an encoder-decoder's source: the constant states of target and draft from its tokens."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from specedge.bundle import Bundle
from specedge.bundle.manifest import ENCODER, OPEN

from ..graph.nodes import FLOAT, INT, GraphBuilder, GraphTemplate
from .round_graphs import IR_VERSION, replace_unknown


def source_obstacle(bundle: Bundle) -> str | None:
    """Return the reason why an encoder-decoder has no host graphs; None for other models."""
    encoder, defaults = bundle.target.encoder, bundle.decoding_defaults
    if encoder is not None and encoder.num_mel_bins is not None:
        return "it reads speech, and the source of host graphs is tokens"
    for name in ("no_repeat_ngram_size", "begin_suppress_tokens"):
        if getattr(defaults, name):
            return f"host graphs do not apply {name} of its generation config"
    return None


def source_graph(bundle: Bundle, ops: Mapping[str, str]) -> ir.Model:
    """Build the graph that computes the constant states of the models in `ops`. tokens [1, N]

    A draft model reads the beginning that its encoder can read, without unknown tokens.
    """
    nodes = GraphBuilder("open")
    source = nodes.input("source", INT, [1, "N"])
    hidden: dict[tuple[str, ir.Value], ir.Value] = {}
    for role, model in bundle.models.items():
        assert model.encoder is not None
        tokens = replace_unknown(nodes, source, model, bundle.target.vocab_size)
        if model.encoder.max_length < bundle.max_prompt_length:
            tokens = nodes("Slice", tokens, [0], [model.encoder.max_length], [1])
        owner = role if model.has_graph(ENCODER) else "target"
        if (owner, tokens) not in hidden:
            file = bundle.models[owner].graph(ENCODER, ops[owner]).file
            encoder = GraphTemplate(bundle.folder, file)
            outputs = encoder.copy(nodes, f"{role}.encoder", {"source": tokens})
            hidden[owner, tokens] = outputs["hidden"]
        template = GraphTemplate(bundle.folder, model.graph(OPEN, ops[role]).file)
        states = template.copy(nodes, f"{role}.open", {"hidden": hidden[owner, tokens]})
        for state in model.constants:
            name, shape = f"present.{state.name}", list(model.state_shape(state))
            nodes.output(f"{role}.{name}", states[name], FLOAT, shape)
    return ir.Model(nodes.graph, ir_version=IR_VERSION)
