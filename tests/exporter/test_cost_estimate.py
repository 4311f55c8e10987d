"""Cost estimates of models with experts, from published configs without weights."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import transformers

import eagle_heads
from architectures import ARCHITECTURES
from checkpoints import make_model, make_tokenizer, save
from eagle_heads import HeadSpec
from specedge.errors import ExportError
from specedge.exporter import Progress, cost_estimate, export
from specedge.exporter.checkpoint import eagle
from specedge.exporter.graph.graphs import graph_files
from specedge.exporter.request import ExportRequest

CONTEXT, K = 4096, 4
GB = 1e9
# Name: its config where it is not the class's default; billions of parameters, and of those that a
# token is multiplied with, as published; whether its caches allow gqa.
PUBLISHED = {
    "Mixtral 8x7B": (
        transformers.MixtralConfig(vocab_size=32000, max_position_embeddings=32768),
        46.7, 12.9, True,
    ),
    "Qwen3-30B-A3B": (
        transformers.Qwen3MoeConfig(
            vocab_size=151936, hidden_size=2048, num_hidden_layers=48, num_attention_heads=32,
            num_key_value_heads=4, head_dim=128, moe_intermediate_size=768, num_experts=128,
            num_experts_per_tok=8, max_position_embeddings=40960,
        ),
        30.5, 3.3, True,
    ),
    "gpt-oss-20b": (
        transformers.GptOssConfig(num_hidden_layers=24, num_local_experts=32),
        20.9, 3.6, True,
    ),
    "DeepSeek-V3": (transformers.DeepseekV3Config(), 671.0, 37.0, False),
    # None of its experts is left out in any graph variant.
    "Llama-4-Scout": (
        transformers.Llama4TextConfig(num_local_experts=16, num_hidden_layers=48),
        107.8, 106.7, True,
    ),
}  # fmt: skip


MIXTRAL = PUBLISHED["Mixtral 8x7B"][0]


def has(size, monkeypatch):
    """Let this machine have so many bytes of memory."""
    monkeypatch.setattr(cost_estimate, "system_memory", lambda: SimpleNamespace(total=size))


def announced(config, memory, monkeypatch, ops="auto"):
    has(int(memory), monkeypatch)
    checkpoint, progress = SimpleNamespace(role="target", name="x", config=config), Progress()
    cost_estimate.check_costs(checkpoint, CONTEXT, K, ops, progress)
    (note,) = progress.notes
    return note


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_model_has_parameters_that_are_published(name):
    config, billions, multiplied, gqa = PUBLISHED[name]
    found = cost_estimate.estimate_costs(config, CONTEXT, K)
    assert found.num_parameters / 1e9 == pytest.approx(billions, abs=0.05)
    # Published counts have the embedding in them in some models, and not in others.
    assert found.read("gqa") / 4e9 == pytest.approx(multiplied, rel=0.1)
    assert found.read("onnx") == 4 * (found.num_parameters - found.num_looked_up)
    assert found.operations("onnx") == found.read("onnx") / 2
    assert found.supports("gqa") == gqa
    for length in graph_files(K, CONTEXT):
        assert found.weights < found.peak(length, "gqa") < 1.02 * found.weights
        assert found.weights < found.peak(length, "onnx") < 1.7 * found.weights


def test_note_states_costs_per_token(monkeypatch):
    note = announced(MIXTRAL, 200 * GB, monkeypatch, "all")
    assert note == (
        "target: 2 of 8 experts per token, 186.8 GB of weights in float32, exported in 17.41 GB of "
        "memory; onnx reads 186.3 GB and computes 93.1 GFLOP per token, in memory of 307.1 GB for "
        "decoder, step, catchup, verify, prefill; gqa reads 51 GB and computes 48 GFLOP per token, "
        "in memory of 188 GB for decoder and 187.9 GB for step, catchup, verify, prefill"
    )


def test_note_omits_unsupported_graph_variant(monkeypatch):
    note = announced(ARCHITECTURES["deepseek_v3"][1](), 200 * GB, monkeypatch)
    assert "gqa" not in note
    assert "onnx reads 0" in note


def test_model_larger_than_memory_is_refused(monkeypatch):
    with pytest.raises(ExportError, match=r"17\.41 GB of memory, and this machine has 16 GB"):
        announced(MIXTRAL, 16 * GB, monkeypatch)


def test_dense_model_has_no_estimate():
    assert cost_estimate.estimate_costs(ARCHITECTURES["llama"][1](), CONTEXT, K) is None


def test_model_larger_than_memory_is_refused_before_weights_are_read(tmp_path, monkeypatch):
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    folder = save(make_model(ARCHITECTURES["mixtral"][1]()), tokenizer, tmp_path / "target")
    (folder / "model.safetensors").write_bytes(b"nothing that could be read")
    has(1000, monkeypatch)
    with pytest.raises(ExportError, match="and this machine has 1e-06 GB"):
        export("self:1", folder, tmp_path / "bundle")


@pytest.mark.parametrize(
    ("ids", "is_measured"), [(None, False), ((2, 3, 5), False), ((1, 3, 5), True)]
)
def test_hidden_states_are_predicted_to_be_measured_for_ambiguous_ids_alone(ids, is_measured):
    spec = HeadSpec(layer_ids=ids)
    target = transformers.LlamaConfig(
        hidden_size=spec.target_hidden, vocab_size=spec.vocab_size, num_hidden_layers=6
    )
    head = eagle.read_config("draft head", eagle_heads.head_config(spec))
    head = eagle.pair_with(head, "head", "target", target)
    seconds = cost_estimate.predict_seconds(
        [
            SimpleNamespace(role=role, config=config)
            for role, config in (("target", target), ("draft", head))
        ],
        ExportRequest("head", "target"),
    )
    assert (seconds["Checking the draft's weights"] > 2) == is_measured
