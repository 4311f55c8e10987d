"""Hidden states that a target's graphs return for a draft model."""

import functools
from unittest import mock

import numpy as np
import onnx
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from architectures import ARCHITECTURES
from cases import exhaustive, slow
from checkpoints import make_config, make_model, make_tokenizer, save
from comparing import CONTEXT, DeepModel, computed, measure, model_of, traced
from encoder_decoders import make_encoder_decoder
from specedge.bundle.manifest import HiddenStates
from specedge.errors import ExportError, ParityError
from specedge.exporter import bundle_export, export
from specedge.exporter.checkpoint.decoder_layers import layer_list
from specedge.exporter.checkpoint.encoder_decoder import as_decoder
from specedge.exporter.graph.graphs import GraphFile
from specedge.exporter.quantization.float_model import FloatModel
from specedge.exporter.tracing import geometry
from specedge.exporter.tracing.hidden_states import HIDDEN_STATES
from specedge.exporter.verification import runner
from specedge.exporter.verification.runner import FillNoise, PassAction, ReadHiddenStates

LAYERS = 6
TOKENS = np.arange(9)
STATES = (0, 2, 3, 4)  # of three layers: an input, another one, an output, a normalized output


def deep(name):
    config = ARCHITECTURES[name][1]()
    if types := getattr(config, "layer_types", None):
        config.layer_types = [types[i % len(types)] for i in range(LAYERS)]
    config.num_hidden_layers = LAYERS
    torch.manual_seed(0)
    return make_model(config)


def expected_states(model, layers):
    """Return transformers' hidden states, the last one normalized, and the last layer's output."""
    _, modules = layer_list(model)
    inputs = []
    hook = modules[-1].register_forward_hook(
        lambda _, __, output: inputs.append(output if torch.is_tensor(output) else output[0])
    )
    with torch.no_grad():
        output = model(torch.from_numpy(TOKENS)[None], output_hidden_states=True)
    hook.remove()
    *states, normalized = output.hidden_states
    states += [inputs[0], normalized]
    return torch.cat([states[layer] for layer in layers], -1)[0].numpy()


def returned_states(runner, name="decoder"):
    length = runner.files[name].length or len(TOKENS)
    tokens = np.resize(TOKENS, length)
    actions = [FillNoise(0, 20), PassAction(name, tokens, 0), ReadHiddenStates()]
    return runner.run(actions)[-1]


@pytest.mark.parametrize(
    ("name", "ops", "layers"),
    [
        ("llama", "gqa", (0, 3, LAYERS, LAYERS + 1)),
        ("gpt2", "onnx", (LAYERS + 1,)),
        slow("llama", "onnx", (LAYERS,)),
        *(slow(x, "gqa", (1, LAYERS)) for x in ("qwen3", "gemma3_text", "olmo2", "mixtral")),
        *(
            exhaustive(name, ops, (0, 3, LAYERS, LAYERS + 1))
            for name in ARCHITECTURES
            for ops in ("onnx", "gqa")
        ),
    ],
)
def test_graphs_return_the_hidden_states_that_transformers_does(name, ops, layers, tmp_path):
    model = deep(name)
    exported = traced(model, tmp_path, ops, context=64, hidden_layers=layers)
    expected = expected_states(model, layers)
    for file in exported.files:
        states = returned_states(exported, file)
        assert states.dtype == np.float32
        size = min(len(states), len(TOKENS))
        np.testing.assert_allclose(states[:size], expected[:size], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "ops"), [("llama", "gqa"), slow("llama", "onnx"), slow("gpt2", "gqa")]
)
@pytest.mark.parametrize("in_parts", [False, slow(True)])
def test_hidden_states_are_verified(kind, ops, in_parts, tmp_path, monkeypatch):
    if in_parts:
        monkeypatch.setattr(runner, "WHOLE_BYTES", 0)
    model = model_of(kind, layers=3)
    exported = traced(model, tmp_path, ops, hidden_layers=STATES)
    references = computed(model, exported)
    measure(model, exported, references=references)
    (reference,) = references
    last = reference.end - 1
    for i, is_exact in ((1, True), (2, False)):  # compared in float64, and in float32 alone
        reference.is_exact, states = is_exact, reference.hidden[i]
        before = states.copy()
        states[-1, 3] += 1e-3 * np.abs(states[-1]).max()
        with pytest.raises(
            ParityError, match=rf"hidden state {STATES[i]} at position {last} differs"
        ):
            measure(model, exported, references=references)
        states[:] = before


@pytest.fixture(scope="module")
def deep_models(tmp_path_factory):
    """Models of 9 layers, whose graphs return the hidden states of some of them."""
    model = make_model(make_config("llama", kv_heads=2, context=CONTEXT, layers=9))

    @functools.cache
    def make(layers):
        return DeepModel(model, tmp_path_factory.mktemp("deep"), layers)

    return make


@pytest.mark.parametrize("wrong", [(2, 6, 10), (1, 7, 10), (1, 6, 9), (6, 1, 10)])
def test_wrong_hidden_states_of_deep_models_are_refused(wrong, deep_models, tmp_path):
    """Another layer, the final norm in or out, and another order."""
    right, other = deep_models((1, 6, 10)), deep_models(wrong)
    assert right.part.layers.num_representative < 6
    traces = mock.patch.dict(right.traces, {"gqa": other.trace("gqa")})
    with traces, pytest.raises(ParityError, match="hidden state"):
        right.verify(tmp_path, "gqa", lambda graph: None)


@pytest.mark.parametrize("layers", [(1, 6, 10), (2, 4, 6)])
def test_hidden_states_of_deep_models_are_verified(layers, deep_models, tmp_path):
    report = deep_models(layers).verify(tmp_path, "gqa", lambda graph: None)
    assert report.structure_error < 1e-10
    assert report.error_ratio < 16


def test_graphs_without_hidden_states_are_unchanged(tmp_path):
    graph = onnx.load(traced(model_of(), tmp_path).path("decoder"), load_external_data=False).graph
    assert not [value for value in graph.output if value.name == "hidden"]
    assert not [node for node in graph.node if "hidden" in {*node.input, *node.output}]


def test_missing_layers_and_encoder_decoders_are_refused(tmp_path):
    model = model_of()
    with pytest.raises(ExportError, match="the hidden states of layer 9, and the target has 2"):
        traced(model, tmp_path, hidden_layers=(1, 9))
    folder = make_encoder_decoder("t5", tmp_path / "t5")
    decoder = as_decoder(AutoModelForSeq2SeqLM.from_pretrained(folder))
    with pytest.raises(ExportError, match="t5 models are encoder-decoders"):
        geometry.measure_geometry(decoder, 64, 4, (1,))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "precision", "options", "tolerance"),
    [
        ("llama", "int8", {"compute": "fp16"}, 0.1),
        ("gpt2", "fp32", {"cache": "fp16"}, 0.01),
        ("mixtral", "fp32", {"compute": "fp16"}, 0.01),
    ],
)
def test_every_graph_of_a_bundle_returns_hidden_states(
    family, precision, options, tolerance, tmp_path, monkeypatch
):
    """In the original basis, whose residual stream int8 rotates."""
    model = deep(family)
    target = save(model, make_tokenizer(tmp_path / "tokenizer"), tmp_path / "target")
    layers = (1, 3, LAYERS + 1)
    monkeypatch.setattr(bundle_export._Job, "hidden_layers", layers)
    bundle = export(
        None, target, tmp_path / "bundle", precision=precision, ops="all", max_length=96, **options
    )
    entry, expected = bundle.target, expected_states(model, layers)
    assert entry.hidden == HiddenStates(layers, expected.shape[1])
    for graph in entry.graphs:
        outputs = [port.name for port in entry.signatures[graph.signature].outputs]
        path = bundle.path(graph.file)
        assert [x.name for x in onnx.load(path, load_external_data=False).graph.output] == outputs
        assert HIDDEN_STATES in outputs
    for ops in entry.parity:
        model_files = [GraphFile("decoder", None)]
        shape = FloatModel("target", entry, path.parent).geometry
        target_runner = runner.Runner(path.parent, model_files, shape, ops)
        if target_runner.can_run():
            states = returned_states(target_runner)
            for actual, exact in zip(*(np.split(x, 3, 1) for x in (states, expected)), strict=True):
                assert np.linalg.norm(actual - exact) < tolerance * np.linalg.norm(exact)
