"""Graph of an encoder-decoder's source: the constant states of target and draft.

The source is tokens, or audio of which the graph computes the log-mel spectrogram.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from specedge.bundle import Bundle
from specedge.bundle.manifest import ENCODER, FEATURES, OPEN, ModelEntry

from ..graph.nodes import FLOAT, INT, GraphBuilder, GraphTemplate
from .round_graphs import IR_VERSION, replace_unknown


def source_graph(bundle: Bundle, ops: Mapping[str, str]) -> ir.Model:
    """Build the graph that computes the constant states of the models in `ops`.

    Its input is `source` [1, N], or `audio` [1, samples]. A draft model reads the beginning of the
    tokens that its encoder can read, without unknown tokens.
    """
    nodes = GraphBuilder("open")
    is_speech = bundle.reads_speech
    if is_speech:
        source = _spectrogram(nodes, bundle, ops["target"])
    else:
        source = nodes.input("source", INT, [1, "N"])
    hidden: dict[tuple[str, ir.Value], ir.Value] = {}
    for role, model in bundle.models.items():
        assert model.encoder is not None
        model_source = source if is_speech else _readable_tokens(nodes, bundle, model, source)
        owner = role if model.has_graph(ENCODER) else "target"
        if (owner, model_source) not in hidden:
            file = bundle.models[owner].graph(ENCODER, ops[owner]).file
            encoder = GraphTemplate(bundle.folder, file)
            outputs = encoder.copy(nodes, f"{role}.encoder", {"source": model_source})
            hidden[owner, model_source] = outputs["hidden"]
        template = GraphTemplate(bundle.folder, model.graph(OPEN, ops[role]).file)
        states = template.copy(nodes, f"{role}.open", {"hidden": hidden[owner, model_source]})
        for state in model.constants:
            name, shape = f"present.{state.name}", list(model.state_shape(state))
            nodes.output(f"{role}.{name}", states[name], FLOAT, shape)
    return ir.Model(nodes.graph, ir_version=IR_VERSION)


def _spectrogram(nodes: GraphBuilder, bundle: Bundle, ops: str) -> ir.Value:
    encoder = bundle.target.encoder
    assert encoder is not None
    audio = nodes.input("audio", FLOAT, [1, encoder.num_samples])
    template = GraphTemplate(bundle.folder, bundle.target.graph(FEATURES, ops).file)
    return template.copy(nodes, FEATURES, {"audio": audio})["source"]


def _readable_tokens(
    nodes: GraphBuilder, bundle: Bundle, model: ModelEntry, tokens: ir.Value
) -> ir.Value:
    assert model.encoder is not None
    tokens = replace_unknown(nodes, tokens, model, bundle.target.vocab_size)
    if model.encoder.max_length < bundle.max_prompt_length:
        tokens = nodes("Slice", tokens, [0], [model.encoder.max_length], [1])
    return tokens
