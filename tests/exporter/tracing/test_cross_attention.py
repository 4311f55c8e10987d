"""Encoder-decoders: families, deep models, and faults that an export must find."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cached_property
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cases import exhaustive
from comparing import DeepModel
from encoder_decoders import CONFIGS, make_encoder_decoder
from faults import set_attribute
from specedge.errors import ExportError, ParityError
from specedge.exporter import Progress, export, internals, model_export
from specedge.exporter.checkpoint import checkpoints, loader
from specedge.exporter.graph.nodes import add_constant
from specedge.exporter.tokenizers import pair
from specedge.exporter.tracing import geometry, uncached_graphs
from specedge.exporter.verification.source_states import encoder_digest

TRACE_UNCACHED = uncached_graphs.trace_uncached  # which tests replace
BY_DEFAULT = ("t5", "whisper")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in BY_DEFAULT else exhaustive(name) for name in CONFIGS]
)
def test_family_matches_pytorch_in_float64(name, tmp_path):
    target = make_encoder_decoder(name, tmp_path / "target")
    bundle = export(None, target, tmp_path / "bundle")
    (report,) = bundle.target.parity.values()
    assert report.structure_error < 1e-12
    assert report.invariant_lengths == (1, 2, 3, 5, 9, 18, 36, 64)
    assert len(bundle.target.constants) == 2 * len(bundle.target.layers)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "limit"), [("int8", 0.02), exhaustive("int4", 0.2)])
def test_quantized_decoder_is_as_accurate_as_a_decoder_alone(precision, limit, tmp_path):
    target = make_encoder_decoder("bart", tmp_path / "target")
    bundle = export(None, target, tmp_path / "bundle", precision=precision)
    assert bundle.target.quantization["gqa"].divergence < limit


@pytest.mark.parametrize(
    ("name", "options", "start", "prefix"),
    [
        ("t5", {}, (511,), ()),
        ("bart", {}, (2,), ()),  # its generation_config.json has no forced token
        ("mbart", {"decoder_start_token_id": None}, (1,), ()),
    ],
)
def test_text_begins_with_tokens_of_the_config(name, options, start, prefix, tmp_path):
    target = make_encoder_decoder(name, tmp_path / "target", **options)
    assert pair.decoder_tokens(checkpoints.find("target", str(target), None)) == (start, prefix)
    config = {"forced_bos_token_id": 7, "decoder_start_token_id": start[0]}
    (target / "generation_config.json").write_text(json.dumps(config), "utf-8")
    assert pair.decoder_tokens(checkpoints.find("target", str(target), None)) == (start, (7,))


def test_config_has_the_forced_token_without_a_generation_config(tmp_path):
    target = make_encoder_decoder("bart", tmp_path / "target")
    (target / "generation_config.json").unlink()
    assert pair.decoder_tokens(checkpoints.find("target", str(target), None)) == ((2,), (1,))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bart", exhaustive("whisper")])
def test_draft_with_the_encoder_of_the_target_does_not_store_it(name, tmp_path):
    target = make_encoder_decoder(name, tmp_path / "target")
    draft = make_encoder_decoder(name, tmp_path / "draft", seed=1, decoder_layers=1)
    weights, shared = (load_file(path / "model.safetensors") for path in (draft, target))
    weights |= {key: shared[key] for key in weights if key in shared}
    save_file(weights, draft / "model.safetensors", {"format": "pt"})
    bundle = export(draft, target, tmp_path / "bundle", precision="int8")
    assert bundle.target.has_graph("encoder")
    assert not bundle.draft_model.has_graph("encoder")
    sizes = [bundle.files[model.weights].size for model in (bundle.target, bundle.draft_model)]
    assert sizes[1] < sizes[0] / 2


@pytest.mark.parametrize(
    ("name", "options"),
    [("bart", {"activation_function": "relu"}), ("t5", {"relative_attention_max_distance": 32})],
)
def test_encoders_of_equal_weights_differ_by_their_config(name, options, tmp_path):
    digests = []
    for i, changed in enumerate(({}, {}, options)):
        folder = make_encoder_decoder(name, tmp_path / str(i), **changed)
        loaded = loader.load(checkpoints.find("target", str(folder), None), Progress())
        shape = geometry.measure_geometry(loaded.model, 64, 4)
        digests.append(encoder_digest(loaded.model, loaded.sources, shape, 500))
    assert digests[0] == digests[1] != digests[2]


class DeepEncoderDecoder(DeepModel):
    """Encoder-decoder with middle layers that are verified in float32 only."""

    @cached_property
    def encoder(self):
        names = [file.name for file in self.part.other_files]
        return TRACE_UNCACHED(self.model, self.part.shape, self.part.loaded.sources, names)

    def verify_all(self, folder, change=lambda graph: None, change_encoder=lambda graphs: None):
        graphs = {name: graph.clone() for name, graph in self.encoder.items()}
        change_encoder({name: graph.graph for name, graph in graphs.items()})
        with mock.patch.object(uncached_graphs, "trace_uncached", return_value=graphs):
            report = self.verify(folder, "gqa", change, change_first=change)
        model_export._verify_others(self._moved(folder), ["gqa"], None)
        return report

    def _moved(self, folder):
        return replace(self.part, folder=folder)


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A T5 of eight decoder layers."""
    folder = tmp_path_factory.mktemp("deep")
    target = make_encoder_decoder("t5", folder / "target", num_decoder_layers=8)
    loaded = loader.load(checkpoints.find("target", str(target), None), Progress())
    return DeepEncoderDecoder(loaded.model, folder)


def cross_attention(graph):
    return [node for node in graph if node.op_type == "Attention"]


def ignore_source_length(graph):
    (less,) = (node for node in graph if node.op_type == "Less")
    less.replace_input_with(1, add_constant(graph, np.array([10**6]), "fault"))


def read_another_layer(graph):
    first, second = cross_attention(graph)[2:4]
    first.replace_input_with(1, second.inputs[1])


def exchange_keys_and_values(graph):
    node = cross_attention(graph)[3]
    keys, values = node.inputs[1:3]
    node.replace_input_with(1, values)
    node.replace_input_with(2, keys)


def scale_cross_attention(graph):
    set_attribute(cross_attention(graph)[3], "scale", lambda scale: 1.001 * scale)


def shift_distances(graph):
    (clip,) = (node for node in graph if node.op_type == "Clip" and "clamp" in node.name)
    clip.replace_input_with(1, add_constant(graph, np.array(1), "fault"))


def exchange_states(graphs):
    outputs = graphs["open"].outputs
    first, second = outputs[4], outputs[6]
    first.name, second.name = "x", first.name
    first.name = "present.3.cross.key" if second.name == "present.2.cross.key" else "y"


def drop_last_row(graphs):
    node = next(node for node in reversed(graphs["encoder"]) if node.op_type == "Softmax")
    node.attributes["axis"] = type(node.attributes["axis"])(
        "axis", node.attributes["axis"].type, -2
    )


@pytest.mark.slow
def test_deep_model_is_verified(deep, tmp_path):
    assert deep.part.first_layers.shape.constants == deep.part.shape.constants[:10]
    deep.verify_all(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        ignore_source_length,
        read_another_layer,
        exchange_keys_and_values,
        scale_cross_attention,
        shift_distances,
    ],
)
def test_fault_of_the_decoder_is_found(deep, fault, tmp_path):
    with pytest.raises(ParityError):
        deep.verify_all(tmp_path, fault)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [exchange_states, drop_last_row])
def test_fault_of_the_encoder_is_found(deep, fault, tmp_path):
    with pytest.raises(ParityError):
        deep.verify_all(tmp_path, change_encoder=fault)


def test_model_that_ignores_its_cross_attention_cache_is_refused():
    layer = internals.ConstantCacheLayer(torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2, 8))
    with pytest.raises(ExportError, match="in every pass instead of reading them from its cache"):
        layer.update(layer.keys, layer.values)
