"""Random checkpoints have the shapes, names and files of the published ones."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import shapes

# As each model's page says.
NUM_PARAMETERS = {
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "google/gemma-3-1b-it": 999_885_952,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "TinyLlama/TinyLlama_v1.1": 1_100_048_384,
    "openai-community/gpt2": 124_439_808,
    "openai-community/gpt2-medium": 354_823_168,
    "openai-community/gpt2-xl": 1_557_611_200,
}
SMALL = {"vocab_size": 600, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}


def config_of(name, folder):
    (folder / "config.json").write_text(json.dumps(shapes.SHAPES[name]))
    return AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_a_shape_has_the_published_number_of_parameters(name, tmp_path):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(name, tmp_path))
    assert sum(p.numel() for p in model.parameters()) == NUM_PARAMETERS[name]


def test_positions_are_scaled_as_published(tmp_path):
    rope = config_of("meta-llama/Llama-3.2-1B", tmp_path).rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("llama3", 32.0, 500000.0)
    gemma = config_of("google/gemma-3-1b-it", tmp_path)
    assert [i for i, t in enumerate(gemma.layer_types) if t == "full_attention"] == [5, 11, 17, 23]
    assert gemma.rope_parameters["full_attention"]["rope_theta"] == 1000000
    assert gemma.rope_parameters["sliding_attention"]["rope_theta"] == 10000


def test_a_checkpoint_in_shards_is_read_whole_and_no_two_matrices_are_alike(tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, "SHARD", 100_000)
    folder = shapes.write(tmp_path / "small", {**shapes.SHAPES["Qwen/Qwen2.5-7B"], **SMALL})
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert model.dtype == torch.bfloat16
    matrices = [p for p in model.parameters() if p.ndim == 2 and p.shape[0] != 600]
    rows = torch.cat([p.float()[:, :50] for p in matrices])
    assert len(rows.unique(dim=0)) == len(rows)
    assert all(0.015 < p.detach().float().std() < 0.025 for p in matrices)
    assert len(AutoTokenizer.from_pretrained(folder)) <= 512


def test_gpt2_is_one_file_with_keys_as_it_was_published(tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, "SHARD", 100_000)
    small = {"vocab_size": 600, "n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 32}
    folder = shapes.write(tmp_path / "small", {**shapes.SHAPES["openai-community/gpt2"], **small})
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert {"wte.weight", "h.0.attn.c_attn.weight", "h.0.attn.bias"} <= {*file.keys()}
        assert torch.equal(file.get_tensor("h.0.attn.bias")[0, 0], torch.ones(32, 32).tril())
    _, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
