"""Invalid checkpoints are rejected with an actionable one-line error."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM

import specedge
from checkpoints import END, save
from specedge.errors import CheckpointError, ExportError
from specedge.exporter import export
from specedge.exporter.checkpoint import checkpoints, hub, loader
from specedge.exporter.libraries import first_line
from specedge.exporter.progress import Progress

EMPTY, DEEP = '{"weight_map": {}}', '{"weight_map": ' + "[" * 100_000


def find(folder, revision=None):
    return checkpoints.find("target", str(folder), revision)


def refusal(folder):
    with pytest.raises(CheckpointError) as caught:
        loader.load(find(folder), Progress())
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), "utf-8")


def test_missing_folder_is_rejected(tmp_path):
    assert "does not exist" in refusal(tmp_path / "missing")
    assert "does not exist" in refusal("./missing")


def test_empty_folder_is_refused(tmp_path):
    assert "empty folder" in refusal(tmp_path)


def test_config_without_weights_is_refused(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    assert "no model.safetensors" in refusal(checkpoint)


def test_pickled_weights_of_unknown_layout_are_refused(checkpoint):
    (checkpoint / "model.safetensors").rename(checkpoint / "consolidated.00.pth")
    assert "pytorch_model.bin" in refusal(checkpoint)


@pytest.mark.parametrize(
    "names",
    [
        ["model.onnx"],
        ["model.onnx", "model.onnx_data"],
        ["model_quantized.onnx"],
        ["decoder_model.onnx", "decoder_model_merged.onnx", "decoder_with_past_model.onnx"],
        ["onnx/model.onnx"],
    ],
)
@pytest.mark.parametrize(
    ("config", "readme", "said"),
    [
        ({}, None, "specify the original checkpoint, with config.json"),
        ({"_name_or_path": "gpt2"}, None, "exported from gpt2: specify that"),
        (
            {"_name_or_path": "/a/b"},
            "---\nbase_model: c/d\n---\n",
            "exported from c/d: specify that",
        ),
        ({}, "---\nbase_model:\n- c/d\n---\n", "exported from c/d: specify that"),
        ({"_name_or_path": 7}, "---\nbase_model: []\n---\n", "specify the original checkpoint"),
    ],
)
def test_onnx_export_is_refused_with_checkpoint_it_names(checkpoint, names, config, readme, said):
    (checkpoint / "model.safetensors").unlink()
    edit(checkpoint / "config.json", **config)
    for name in names:
        (checkpoint / name).parent.mkdir(exist_ok=True)
        (checkpoint / name).write_bytes(b"onnx")
    if readme:
        (checkpoint / "README.md").write_text(readme, "utf-8")
    message = refusal(checkpoint)
    assert "is an ONNX export" in message
    assert said in message


def test_onnx_files_next_to_weights_are_ignored(checkpoint):
    (checkpoint / "onnx").mkdir()
    (checkpoint / "onnx/model.onnx").write_bytes(b"onnx")
    assert loader.load(find(checkpoint), Progress()).dtype == "float32"


def test_onnx_repository_on_hub_is_refused_with_checkpoint_it_names(checkpoint, monkeypatch):
    (checkpoint / "README.md").write_text("---\nbase_model: c/d\n---\n", "utf-8")
    names = ("README.md", "config.json", "tokenizer.json", "onnx/model.onnx")
    sizes = {path.name: path.stat().st_size for path in checkpoint.iterdir()}
    files = [SimpleNamespace(rfilename=name, size=sizes.get(name)) for name in names]
    info = SimpleNamespace(siblings=files, sha="abc")
    api = SimpleNamespace(model_info=lambda *args, **kwargs: info)
    monkeypatch.setattr(hub.huggingface_hub, "HfApi", lambda: api)
    monkeypatch.setattr(
        hub.huggingface_hub, "snapshot_download", lambda *args, **kwargs: str(checkpoint)
    )
    assert "exported from c/d: specify that" in refusal("someone/something")


def test_truncated_weights_are_refused(checkpoint):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    assert "model.safetensors cannot be read" in refusal(checkpoint)


def test_missing_weights_are_rejected_instead_of_initialized(checkpoint):
    edit(checkpoint / "config.json", n_layer=3)
    assert "lacks weights" in refusal(checkpoint)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[" * 100_000, '{"model_type": "nothing-like-this"}']
)
def test_unreadable_config_is_refused(checkpoint, text):
    (checkpoint / "config.json").write_text(text, "utf-8")
    assert "config.json" in refusal(checkpoint)


def test_missing_tokenizer_is_refused(checkpoint):
    (checkpoint / "tokenizer.json").unlink()
    assert "tokenizer" in refusal(checkpoint)


def test_remote_code_is_never_executed(checkpoint):
    code = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    edit(checkpoint / "config.json", model_type="own", auto_map=code)
    (checkpoint / "code.py").write_text("raise SystemExit('ran')", "utf-8")
    assert "does not run" in refusal(checkpoint)


def test_adapter_given_as_model_error_names_adapter_option(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "adapter_config.json").write_text("{}", "utf-8")
    assert "the adapter as --adapter" in refusal(checkpoint)


def test_sharded_checkpoint_is_read_and_broken_index_refused(checkpoint):
    config, tokenizer = checkpoint / "config.json", checkpoint / "tokenizer.json"
    assert config.exists()
    assert tokenizer.exists()
    whole = AutoModelForCausalLM.from_pretrained(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    whole.save_pretrained(checkpoint, max_shard_size="50KB")
    index = checkpoint / "model.safetensors.index.json"
    found = checkpoints.find("target", str(checkpoint), None)
    loaded = loader.load(found, Progress())
    assert loaded.dtype == "float32"
    assert torch.equal(loaded.model.lm_head.weight, whole.lm_head.weight)
    for text in (
        "",
        "{}",
        "[]",
        '{"weight_map": {"a": "../b"}}',
        '{"weight_map": {"a": 7}}',
        EMPTY,
        DEEP,
    ):
        index.write_text(text, "utf-8")
        assert "index.json" in refusal(checkpoint)


def test_bundle_given_as_checkpoint_is_rejected(pairs):
    assert "already" in refusal(pairs.bundle("embedded").folder)


@pytest.mark.slow
def test_source_license_and_type_are_recorded(pairs, checkpoint):
    (checkpoint / "README.md").write_text("---\nlicense: mit\ntags: [a]\n---\n# Model\n", "utf-8")
    source = find(checkpoint).source
    assert (source.id, source.revision, source.license) == ("checkpoint", None, "mit")
    bundle = pairs.bundle("bfloat16")
    assert bundle.target.source.license is None
    assert bundle.target.weights_dtype == "bfloat16"
    assert bundle.end_tokens == (0,)


@pytest.mark.parametrize("limit", [None, 64])
def test_recurrent_model_is_refused_with_reason(pairs, tmp_path, limit):
    draft = pairs.checkpoint("gpt2")[0]
    config = MambaConfig(vocab_size=512, hidden_size=16, num_hidden_layers=1)
    save(MambaForCausalLM(config), find(draft).tokenizer, tmp_path / "mamba")
    with pytest.raises(ExportError, match="mamba models have no KV cache"):
        export(draft, tmp_path / "mamba", tmp_path / "bundle", max_length=limit)


@pytest.mark.slow
@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("length", [2, 20])
def test_contexts_shorter_than_pass_and_as_long_as_buffers_are_compared(pairs, tmp_path, length):
    target = pairs.checkpoint("gpt2")[1]
    bundle = export(None, target, tmp_path / "bundle", max_length=length, ops="all")
    assert bundle.context_length == length
    assert list(bundle.target.parity) == ["onnx", "gqa"]
    with specedge.load(tmp_path / "bundle", slots=2) as pipeline:
        batch = pipeline.generate_batch([[1], [2]], 1)
    assert [len(generation.tokens) for generation in batch] == [1, 1]


def test_revision_of_folder_is_refused(checkpoint):
    with pytest.raises(CheckpointError, match="has no revisions"):
        find(checkpoint, "main")


def test_decoder_with_cross_attention_is_refused(checkpoint):
    edit(checkpoint / "config.json", add_cross_attention=True)
    assert "cross-attention" in refusal(checkpoint)


@pytest.mark.parametrize(
    "changes",
    [
        {"text_config": 5},
        {"text_config": {}},
        {"model_type": "llava", "text_config": 5},
        {"model_type": "qwen2_vl", "text_config": 5},
        {"model_type": "gemma3", "text_config": [1]},
        {"model_type": "musicgen"},
        {"model_type": "qwen2_5_omni"},
    ],
)
def test_config_without_text_decoder_is_rejected(checkpoint, changes):
    edit(checkpoint / "config.json", **changes)
    refusal(checkpoint)


def test_decoder_among_several_text_models_is_refused(checkpoint):
    parts = {
        "text_encoder": {"model_type": "t5"},
        "audio_encoder": {"model_type": "encodec"},
        "decoder": {"model_type": "musicgen_decoder"},
    }
    edit(checkpoint / "config.json", model_type="musicgen", **parts)
    assert "(musicgen) is an encoder-decoder" in refusal(checkpoint)


def test_error_that_ends_with_colon_includes_next_line():
    assert first_line(ValueError("\nThere were troubles:\n\n  a is not b.\nc")) == (
        "There were troubles: a is not b"
    )
    assert first_line(ValueError("nothing follows:")) == "nothing follows:"


@pytest.mark.slow
def test_both_models_may_be_one_folder(pairs, tmp_path):
    target = pairs.checkpoint("gpt2")[1]
    options = {"num_draft_tokens": 2, "max_length": 40, "ops": "onnx"}
    bundle = export(target, target, tmp_path / "bundle", **options)
    assert bundle.context_length == 40
    assert bundle.target.graph("verify", "onnx").length == 3
    assert bundle.target.graph("prefill", "onnx").length == 40
    assert find(target).tokenizer.eos_token == END
