"""Common mistakes are reported in one line with the fix."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from checkpoints import make_checkpoint, make_tokenizer
from specedge.errors import CheckpointError, ExportError
from specedge.exporter import export
from specedge.exporter.checkpoint import checkpoints, folders


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return make_checkpoint(folder / "model", "llama", make_tokenizer(folder / "t"), layers=1)


@pytest.fixture
def checkpoint(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "model")


def edit(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | values), "utf-8")


def test_checkpoint_without_any_vocabulary_is_refused(checkpoint):
    for path in checkpoint.glob("tokenizer*"):
        path.unlink()
    edit(checkpoint, model_type="qwen2")  # for which transformers makes an empty tokenizer
    with pytest.raises(CheckpointError, match=r"has no tokenizer; put its tokenizer.json next to"):
        checkpoints.find("target", str(checkpoint), None)


def test_heads_of_older_eagle_versions_are_refused_by_name(tmp_path):
    """Their config.json is that of a Llama model (yuhuili/EAGLE-LLaMA3-Instruct-8B)."""
    config = LlamaConfig(num_hidden_layers=1, architectures=["LlamaForCausalLM"])
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()), "utf-8")
    torch.save({"fc.weight": torch.zeros(8, 16)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="as heads of EAGLE-1 and 2, which are not") as caught:
        checkpoints.find("draft", str(tmp_path), None)
    assert "\n" not in str(caught.value)


def test_encoder_without_tokenizer_is_reported_as_encoder(checkpoint):
    for path in checkpoint.glob("tokenizer*"):
        path.unlink()
    (checkpoint / "config.json").write_text('{"model_type": "vit"}', "utf-8")
    with pytest.raises(CheckpointError, match=r"\(vit\) is an encoder"):
        checkpoints.find("target", str(checkpoint), None)


def test_unknown_model_type_error_lists_versions(checkpoint):
    edit(checkpoint, model_type="frobnicate")
    with pytest.raises(CheckpointError, match=r"'frobnicate', which transformers does not know \("):
        checkpoints.find("target", str(checkpoint), None)


def test_model_without_layers_is_rejected(checkpoint, tmp_path):
    edit(checkpoint, num_hidden_layers=0)
    with pytest.raises(ExportError, match=r"config\.json says 0 layers"):
        export(checkpoint, checkpoint, tmp_path / "bundle")


@pytest.mark.slow
def test_nan_weights_error_names_the_tensor(checkpoint, tmp_path):
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][-1] = torch.nan
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ExportError, match=r"embed_tokens.* has NaN values"):
        export("self:1", _deeper(checkpoint), tmp_path / "bundle", ops="onnx")
    assert not (tmp_path / "bundle").exists()


def _deeper(checkpoint):
    """The same layer twice."""
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    tensors |= {k.replace("layers.0", "layers.1"): v.clone() for k, v in tensors.items()}
    save_file(tensors, path, {"format": "pt"})
    edit(checkpoint, num_hidden_layers=2)
    return checkpoint


def test_checkpoint_is_not_its_own_base(checkpoint):
    edit(checkpoint, _name_or_path=str(checkpoint))
    assert folders.base_checkpoint("target", str(checkpoint), checkpoint) is None
    (checkpoint / "README.md").write_text("---\nbase_model: org/base\n---\n", "utf-8")
    assert folders.base_checkpoint("target", str(checkpoint), checkpoint) == "org/base"
