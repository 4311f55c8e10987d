"""The graph of log-mel spectrograms against transformers' feature extractor."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from transformers import WhisperFeatureExtractor

from manifests import make_model
from specedge.bundle.manifest import (
    EncoderEntry,
    GraphEntry,
    cross_attention_states,
    signatures,
)
from specedge.errors import ExportError
from specedge.exporter.graph.graphs import save_graph
from specedge.exporter.graph.log_mel import build_log_mel
from specedge.exporter.verification import spectrograms
from specedge.exporter.verification.subgraph import open_session

SECONDS = 2


def extractor_of(**options):
    return WhisperFeatureExtractor(**{"chunk_length": SECONDS, **options})


def graph_of(extractor):
    return build_log_mel(extractor.mel_filters, extractor.n_fft, extractor.n_samples)


def run(path, audio):
    session = open_session(path, ort.SessionOptions())
    return session.run(None, {"audio": audio})[0]


@pytest.fixture(scope="module", params=[80, 128])
def features(request, tmp_path_factory):
    extractor = extractor_of(feature_size=request.param)
    path = tmp_path_factory.mktemp("features") / "features.onnx"
    save_graph(graph_of(extractor), path)
    return extractor, path


def signals():
    random, times = np.random.default_rng(0), np.arange(SECONDS * 16_000) / 16_000
    return {
        "noise": random.normal(0, 0.1, len(times)),
        "tone": 0.9 * np.sin(2 * np.pi * 440 * times),
        "quiet": 1e-4 * random.normal(size=len(times)) * (times < 1),
        "silence": np.zeros(len(times)),
        "click": np.eye(1, len(times), len(times) - 1)[0],
    }


@pytest.mark.parametrize("name", signals())
def test_spectrograms_are_transformers(features, name):
    extractor, path = features
    audio = signals()[name].astype(np.float32)
    expected = extractor(audio, sampling_rate=16_000, return_tensors="np")["input_features"]
    actual = run(path, audio[None])
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, atol=2e-5)


def test_shorter_audio_is_followed_by_zeros(features):
    extractor, path = features
    audio = signals()["noise"][:12_345].astype(np.float32)
    expected = extractor(audio, sampling_rate=16_000, return_tensors="np")["input_features"]
    padded = np.pad(audio, (0, SECONDS * 16_000 - len(audio)))
    np.testing.assert_allclose(run(path, padded[None]), expected, atol=2e-5)


def test_the_graph_has_standard_operators_of_an_old_opset(features):
    model = ir.load(features[1])
    assert model.graph.opset_imports[""] <= 20
    assert {node.domain for node in model.graph} == {""}


@pytest.mark.parametrize("other", [{"n_fft": 512}, {"feature_size": 81}])
def test_another_graph_is_refused(other, tmp_path):
    path = tmp_path / "features.onnx"
    save_graph(graph_of(extractor_of(**other)), path)
    with pytest.raises((ExportError, ValueError), match=r"has an error of|broadcast"):
        spectrograms.check_log_mel(path, extractor_of())


def test_a_slightly_wrong_filter_is_refused(tmp_path):
    extractor, path = extractor_of(), tmp_path / "features.onnx"
    save_graph(build_log_mel(extractor.mel_filters * 1.0001, 400, extractor.n_samples), path)
    with pytest.raises(ExportError, match=r"has an error of 1\.\de-05, more than 16 times"):
        spectrograms.check_log_mel(path, extractor)


def make_whisper(num_mel_bins, **encoder):
    """Entry of a model whose encoder reads spectrograms."""
    sizes = {"max_length": 100 * SECONDS, "hidden_size": 8, "capacity": 50 * SECONDS}
    reader = EncoderEntry(num_mel_bins=num_mel_bins, **sizes | encoder)
    model, heads = make_model("target"), (2, 4)
    states = (*model.states, *cross_attention_states(0, heads, heads, "float32"))
    opens = GraphEntry("open", "onnx", None, "constant_states", "target/open.onnx")
    return replace(
        model,
        encoder=reader,
        states=states,
        signatures=signatures(states, model.capacity, model.padded_vocab_size, reader),
        graphs=(*model.graphs, opens),
    )


def checkpoint_of(folder, **options):
    extractor_of(**options).save_pretrained(folder)
    return SimpleNamespace(folder=folder, role="target", name="whisper")


def test_a_target_gets_the_graph_of_its_feature_extractor(tmp_path):
    (tmp_path / "target").mkdir()
    model = spectrograms.add_log_mel(make_whisper(80), checkpoint_of(tmp_path), tmp_path)
    graph = model.graph("features", "onnx")
    (source,) = model.signatures[graph.signature].outputs
    session = open_session(tmp_path / graph.file, ort.SessionOptions())
    assert session.get_outputs()[0].shape == source.at(1, 1, 1)
    assert session.get_inputs()[0].shape == [1, SECONDS * 16_000]
    tokens = make_whisper(None, capacity=200)
    assert spectrograms.add_log_mel(tokens, None, tmp_path) is tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feature_size": 128}, "feature_size 128; the format has 80"),
        ({"sampling_rate": 8_000}, "n_samples 16000; the format has 32000"),
        ({"hop_length": 320}, "hop_length 320; the format has 160"),
        ({"dither": 0.1}, r"dither 0\.1"),
    ],
)
def test_other_feature_extractors_are_refused(options, message, tmp_path):
    with pytest.raises(ExportError, match=message):
        spectrograms.add_log_mel(make_whisper(80), checkpoint_of(tmp_path, **options), tmp_path)


def test_a_missing_feature_extractor_is_named(tmp_path):
    checkpoint = SimpleNamespace(folder=tmp_path, role="target", name="whisper")
    with pytest.raises(ExportError, match=r"whisper has no preprocessor_config\.json"):
        spectrograms.add_log_mel(make_whisper(80), checkpoint, tmp_path)


def test_a_model_of_tokens_has_no_graph_of_spectrograms():
    model = make_whisper(None, capacity=200)
    graph = GraphEntry("features", "onnx", None, "hidden_states", "target/features.onnx")
    with pytest.raises(ValueError, match="graphs has 'features', and the model reads no spectro"):
        replace(model, graphs=(*model.graphs, graph))
