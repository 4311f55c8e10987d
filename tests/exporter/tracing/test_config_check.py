"""Inspection of models on the meta device, and errors after library changes."""

from __future__ import annotations

import builtins
import tomllib
from pathlib import Path

import psutil
import pytest
import torch
from packaging.requirements import Requirement
from transformers import DeepseekV3Config, JetMoeConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention

from architectures import ARCHITECTURES
from checkpoints import make_config, make_model, make_tokenizer, save
from specedge.bundle.manifest import key_value_states
from specedge.errors import ExportError, MissingExtraError
from specedge.exporter import export, internals
from specedge.exporter.checkpoint import checkpoints
from specedge.exporter.tracing import geometry, tracer

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"
OWN_LAYERS = ["gemma2", "bloom", "falcon, ALiBi", "gptj", "gpt_oss", "deepseek_v3", "smollm3"]


@pytest.mark.parametrize("name", OWN_LAYERS)
def test_observation_on_meta_device_equals_observation_with_weights(name):
    model = make_model(ARCHITECTURES[name][1]())
    shape = geometry.measure_geometry(model, 200, 4)
    assert tracer.observe_config(model.config, 200, 4) == tracer.observe(model, shape)


def test_config_of_any_size_is_checked_without_memory():
    config = DeepseekV3Config(num_hidden_layers=8)  # of 400 GB in float32
    assert len(tracer.observe_config(config, 4096, 4).attention) == 8


def test_example_caches_take_no_memory():
    layers = tuple(key_value_states(i, (8, 128), (8, 128), "float32") for i in range(2))
    shape = geometry.Geometry(1 << 17, 1 << 17, 512, layers)
    before = psutil.Process().memory_info().rss
    *_, caches = tracer.example_inputs(shape, torch.device("cpu"))
    assert psutil.Process().memory_info().rss - before < 1e8
    assert sum(cache.nbytes for cache in caches) > 2e9


def test_unsupported_graph_variant_is_rejected_before_reading_weights(tmp_path):
    model = make_model(ARCHITECTURES["deepseek_v3"][1]())
    folder = save(model, make_tokenizer(tmp_path / "tokenizer"), tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(ExportError, match="other than the keys and values it attends to"):
        export(folder, folder, tmp_path / "bundle", ops="gqa")


def test_index_based_experts_are_rejected_from_config():
    with pytest.raises(ExportError, match="experts do not use transformers' interface"):
        tracer.check_config(JetMoeConfig(), 64, 4, "auto")


def test_model_that_fails_on_meta_device_is_checked_with_weights(monkeypatch):
    def forward(self, hidden_states, **rest):
        return hidden_states * float(hidden_states.sum()), None

    monkeypatch.setattr(LlamaAttention, "forward", forward)
    with pytest.raises(ExportError, match="cannot be run for tracing"):
        tracer.observe_config(make_config("llama"), 64, 4)
    tracer.check_config(make_config("llama"), 64, 4, "auto")


def test_rejected_target_is_not_downloaded_and_draft_not_resolved(tmp_path, monkeypatch):
    def looked_up(role, name, revision, adapter):
        assert role == "target"
        return checkpoints.Checkpoint(
            role, name, tmp_path, None, ["model.safetensors"], object(), None, config, config,
            {}, None, {},
        )  # fmt: skip

    config = ARCHITECTURES["llama"][1]()
    config.attention_dropout = 0.0
    monkeypatch.setattr(checkpoints, "find", looked_up)
    monkeypatch.setattr(
        LlamaAttention, "forward", lambda self, hidden_states, **rest: (hidden_states, None)
    )
    with pytest.raises(ExportError, match=r"target a/b \(llama\) cannot be exported: layer 0"):
        export("c/d", "a/b", tmp_path / "bundle")


def test_attention_bypassing_the_interface_is_reported(monkeypatch):
    def forward(self, hidden_states, **inputs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        keys = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        cache = inputs["cache"] if "cache" in inputs else inputs["past_key_values"]
        cache.update(keys, keys, self.layer_idx)
        return hidden_states, None

    monkeypatch.setattr(LlamaAttention, "forward", forward)
    with pytest.raises(ExportError, match="0 of its 2 layers use transformers' attention interf"):
        tracer.observe_config(make_config("llama"), 64, 4)


def test_model_that_transformers_cannot_build_is_refused_with_its_reason():
    with pytest.raises(ExportError, match=r"cannot build a llama model.*KeyError: 'none'"):
        tracer.observe_config(LlamaConfig(hidden_act="none"), 64, 4)


@pytest.mark.parametrize(
    ("error", "wanted", "said"),
    [
        (
            ModuleNotFoundError("No module named 'optimum'", name="optimum"),
            MissingExtraError,
            "pip",
        ),
        (ModuleNotFoundError("No module named 'x'", name="x"), ExportError, "No module named 'x'"),
        (ImportError("cannot import name 'y'"), ExportError, "ImportError: cannot import name 'y'"),
    ],
)
def test_optimum_is_reported_missing_only_if_missing(monkeypatch, error, wanted, said):
    imported = builtins.__import__

    def importing(name, *args, **kwargs):
        if name == "optimum.utils":
            raise error
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", importing)
    with pytest.raises(wanted, match=said):
        tracer.observe_config(make_config("llama"), 64, 4)


def test_tested_versions_match_install_requirements():
    extras = tomllib.loads(PYPROJECT.read_text("utf-8"))["project"]["optional-dependencies"]
    allowed = {(found := Requirement(line)).name: found.specifier for line in extras["export"]}
    for package, (floor, newest) in internals.TESTED.items():
        major, minor = map(int, newest.split("."))
        assert f"{floor}.99" in allowed[package]
        assert f"{newest}.99" in allowed[package]
        assert f"{major}.{minor + 1}" not in allowed[package]


def test_exports_share_one_registry_of_operators_which_torch_may_lack(monkeypatch):
    from torch.onnx._internal.exporter import _registration

    original = vars(_registration.ONNXRegistry)["from_torchlib"]
    registries = []
    for _ in range(2):
        with internals.reuse_operator_registry():
            registries.append(_registration.ONNXRegistry.from_torchlib(opset_version=20))
    assert registries[0] is registries[1]
    assert vars(_registration.ONNXRegistry)["from_torchlib"] is original
    monkeypatch.delattr(_registration, "ONNXRegistry")
    with internals.reuse_operator_registry():
        pass
