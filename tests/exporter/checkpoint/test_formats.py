"""Weights in each format that people publish give the numbers that the format stands for."""

import json
import os

import pytest
import torch
from formats import load, make, refusal, same
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from checkpoints import make_config, make_model, make_tokenizer, save
from specedge.exporter.checkpoint import lazy_weights


@pytest.fixture(autouse=True)
def _all_are_large(monkeypatch):
    """Matrices of small models get stand-ins, too."""
    monkeypatch.setattr(lazy_weights, "SMALLEST", 1)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "qwen3_moe", "gpt_oss"])
def test_a_models_matrices_are_its_checkpoints_also_where_transformers_joins_them(name, tmp_path):
    folder, model = make(tmp_path, name)
    loaded, notes = load(folder)
    assert same(loaded, model)
    assert notes == ""
    assert loaded.dtype == "bfloat16"
    for parameter in loaded.model.parameters():
        assert (parameter.ndim < 2) == (loaded.sources.behind(parameter) is None)


def pickle_weights(folder, **options):
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin", **options)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_weights_are_read_by_the_weights_only_loader(zipped, tmp_path):
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
    """What runs code when it is unpickled."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


def test_code_in_pickled_weights_never_runs(tmp_path):
    folder, _ = make(tmp_path, "llama")
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Planted(tmp_path / "ran")}, folder / "pytorch_model.bin")
    assert "holds more than tensors" in refusal(folder)
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


def test_numbers_of_a_type_that_is_not_known_are_refused(tmp_path):
    folder, _ = make(tmp_path, "llama")
    state = load_file(folder / "model.safetensors")
    save_file({k: t.to(torch.int8) for k, t in state.items()}, folder / "model.safetensors")
    assert "stores int8 weights" in refusal(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_shards_in_half_precision_give_their_own_bits(dtype, tmp_path):
    model = make_model(make_config("llama")).to(dtype)
    folder = save(model, make_tokenizer(tmp_path / "tokenizer"), tmp_path / "checkpoint")
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="50KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    loaded, _ = load(folder)
    assert same(loaded, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    assert loaded.dtype == str(dtype).removeprefix("torch.")
