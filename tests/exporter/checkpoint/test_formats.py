"""Weights in each published format are dequantized to their exact values."""

import json
import os

import pytest
import torch
from formats import load, make, pickle_weights, refusal, same
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from checkpoints import make_config, make_model, make_tokenizer, save
from specedge.exporter.checkpoint import placeholders


@pytest.fixture(autouse=True)
def _all_are_large(monkeypatch):
    """Matrices of small models get placeholders, too."""
    monkeypatch.setattr(placeholders, "SMALLEST", 1)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "qwen3_moe", "gpt_oss"])
def test_joined_matrices_equal_the_checkpoints(name, tmp_path):
    folder, model = make(tmp_path, name)
    loaded, notes = load(folder)
    assert same(loaded, model)
    assert notes == ""
    assert loaded.dtype == "bfloat16"
    for parameter in loaded.model.parameters():
        assert (parameter.ndim < 2) == (loaded.sources.stored_matrix(parameter) is None)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_weights_are_read_by_weights_only_loader(zipped, tmp_path):
    folder, model = make(tmp_path, "llama")
    pickle_weights(folder, _use_new_zipfile_serialization=zipped)
    loaded, notes = load(folder)
    assert same(loaded, model)
    assert "weights-only loader" in notes


def test_pickled_weights_in_shards_are_read(tmp_path):
    folder, model = make(tmp_path, "llama")
    state = list(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    places = {}
    for i, part in enumerate((state[::2], state[1::2]), 1):
        name = f"pytorch_model-0000{i}-of-00002.bin"
        torch.save(dict(part), folder / name)
        places |= {key: name for key, _ in part}
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}), "utf-8")
    loaded, notes = load(folder)
    assert same(loaded, model)
    assert "weights-only loader" in notes


class Planted:
    """Object that runs code when it is unpickled."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


def test_code_in_pickled_weights_never_runs(tmp_path):
    folder, _ = make(tmp_path, "llama")
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Planted(tmp_path / "ran")}, folder / "pytorch_model.bin")
    assert "contains objects other than tensors" in refusal(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", {"a": [1, 2]}])
def test_pickled_weights_that_are_damaged_or_of_another_layout_are_refused(content, tmp_path):
    folder, _ = make(tmp_path, "llama")
    (folder / "model.safetensors").unlink()
    if isinstance(content, bytes):
        (folder / "pytorch_model.bin").write_bytes(content)
    else:
        torch.save(content, folder / "pytorch_model.bin")
    assert "pytorch_model.bin cannot be read" in refusal(folder)


def test_unsupported_weight_type_is_rejected(tmp_path):
    folder, _ = make(tmp_path, "llama")
    state = load_file(folder / "model.safetensors")
    save_file({k: t.to(torch.int8) for k, t in state.items()}, folder / "model.safetensors")
    assert "stores int8 weights" in refusal(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_shards_are_loaded_bitwise(dtype, tmp_path):
    model = make_model(make_config("llama")).to(dtype)
    folder = save(model, make_tokenizer(tmp_path / "tokenizer"), tmp_path / "checkpoint")
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="50KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    loaded, _ = load(folder)
    assert same(loaded, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    assert loaded.dtype == str(dtype).removeprefix("torch.")


def restore(folder, change):
    """Write a checkpoint's tensors anew, as `change` has them."""
    state = load_file(folder / "model.safetensors")
    save_file(change(state), folder / "model.safetensors")


Q = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
EXPERT = "model.layers.0.mlp.experts.0.gate_proj.weight"


@pytest.mark.parametrize(
    ("family", "key", "dtype"),
    [
        ("llama", Q, torch.int8),
        ("llama", NORM, torch.int64),
        ("llama", Q, torch.bool),
        ("llama", Q, torch.float8_e4m3fn),
        ("qwen3_moe", EXPERT, torch.uint8),
    ],
)
def test_invalid_weight_type_is_rejected(family, key, dtype, tmp_path):
    folder, _ = make(tmp_path, family)
    restore(folder, lambda state: state | {key: state[key].to(dtype)})
    message = refusal(folder)
    assert f"is stored in {str(dtype).removeprefix('torch.')}" in message
    assert (key if family == "llama" else "experts.gate_up_proj") in message
    assert "the original checkpoint" in message


def test_attention_masks_of_old_files_are_ignored_silently(tmp_path):
    folder, model = make(tmp_path, "gpt2")
    masks = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8),
        "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
    }
    restore(folder, lambda state: state | masks)
    loaded, notes = load(folder)
    assert same(loaded, model)
    assert notes == ""


def test_unused_tensors_are_noted(tmp_path):
    folder, model = make(tmp_path, "llama")
    more = {"model.layers.0.of_tomorrow": torch.ones(3), "model.extra.weight": torch.ones(2, 2)}
    restore(folder, lambda state: state | more)
    loaded, notes = load(folder)
    assert same(loaded, model)
    assert notes == (
        "target: the model does not use 2 of its tensors, such as model.extra.weight, "
        "which are ignored"
    )


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.up_proj.weight_scale_inv",
        "model.layers.0.mlp.experts.up_proj_scales",
        "model.layers.0.mlp.up_proj.qweight",
        "model.layers.0.mlp.up_proj.qzeros",
        "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight",
    ],
)
def test_tensors_of_unsupported_quantization_format_are_rejected(name, tmp_path):
    folder, _ = make(tmp_path, "llama")
    restore(folder, lambda state: state | {name: torch.ones(2, 2)})
    message = refusal(folder)
    assert name in message
    assert "is a part of a weight in an unsupported format" in message


def test_shape_mismatch_is_rejected_with_both_shapes(tmp_path):
    folder, _ = make(tmp_path, "llama")
    restore(folder, lambda state: state | {Q: state[Q][:-1].contiguous()})
    message = refusal(folder)
    assert f"{Q} is [63, 64] in its files and [64, 64] by its config" in message


def test_files_without_tensor_are_refused(tmp_path):
    folder, _ = make(tmp_path, "llama")
    restore(folder, lambda state: {})
    assert "its files contain no tensors; download it again" in refusal(folder)
