"""A LoRA adapter is merged as peft merges it, a matrix at a time, or refused with the reason."""

import json

import peft
import pytest
import torch
from formats import adapted, stored_numbers
from transformers import AutoModelForCausalLM

from cases import exhaustive
from checkpoints import make_checkpoint, make_config, make_model, make_tokenizer, save
from specedge.errors import CheckpointError
from specedge.exporter import Progress, export
from specedge.exporter.checkpoint import checkpoints, loader, placeholders
from specedge.exporter.checkpoint.lazy_tensors import LazyTensor, materialize

TOKENS = torch.arange(12)[None]


@pytest.fixture(autouse=True)
def _all_are_large(monkeypatch):
    """Matrices of small models get placeholders, too."""
    monkeypatch.setattr(placeholders, "SMALLEST", 1)


@pytest.fixture(scope="session", params=["llama", exhaustive("gpt2")])
def base(request, tmp_path_factory):
    """A checkpoint in bfloat16; gpt2's matrices are transposed, and its head is its embedding."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(make_config(request.param)).to(torch.bfloat16)
    return save(model, make_tokenizer(folder / "tokenizer"), folder / "model")


def load(base, adapter):
    progress = Progress()
    found = checkpoints.find("target", str(base), None, str(adapter))
    return found, loader.load(found, progress), progress.notes


def refusal(base, adapter):
    with pytest.raises(CheckpointError) as caught:
        load(base, adapter)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), "utf-8")


def targets(base, *more):
    return [*(("c_attn", "c_fc") if "gpt2" in str(base) else ("q_proj", "down_proj")), *more]


def embedding(base):
    return "wte" if "gpt2" in str(base) else "embed_tokens"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"use_dora": True},
        {"bias": "all"},
        {"rank_pattern": {"c_fc": 2, "q_proj": 2}},
    ],
)
def test_merged_adapter_equals_peft(base, options, tmp_path):
    adapter, wanted = adapted(base, tmp_path / "adapter", target_modules=targets(base), **options)
    _, loaded, notes = load(base, adapter)
    found = stored_numbers(loaded)
    for name, parameter in wanted.named_parameters():
        assert torch.equal(found[name], parameter), name
    with torch.no_grad(), loaded.sources.materialized(loaded.model):
        assert torch.allclose(loaded.model(TOKENS).logits, wanted(TOKENS).logits, atol=1e-5)
    assert any("is merged into the model in float32" in note for note in notes)
    behind = [loaded.sources.stored_matrix(p) for p in loaded.model.parameters()]
    assert 0 < sum(isinstance(matrix, LazyTensor) for matrix in behind) < len(behind)


@pytest.mark.parametrize("saved", [True, False])
def test_adapter_embeddings_are_merged_or_replaced(base, saved, tmp_path):
    if saved:
        options = {"target_modules": targets(base), "modules_to_save": [embedding(base)]}
    else:
        options = {"target_modules": targets(base, embedding(base))}
    adapter, wanted = adapted(base, tmp_path / "adapter", **options)
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    apart = peft.PeftModel.from_pretrained(whole, adapter).eval()  # merging in place alters a head
    _, loaded, _ = load(base, adapter)
    table = loaded.model.get_input_embeddings().weight
    stored = loaded.sources.stored_matrix(table)
    table = table if stored is None else materialize(stored)
    assert torch.equal(table, wanted.get_input_embeddings().weight)
    with torch.no_grad(), loaded.sources.materialized(loaded.model):
        assert torch.allclose(loaded.model(TOKENS).logits, apart(TOKENS).logits, atol=1e-5)


@pytest.mark.slow
@pytest.mark.slow(after_first=True)
def test_adapted_models_are_exported_with_source_in_manifest(base, tmp_path):
    adapter, _ = adapted(base, tmp_path / "adapter", target_modules=targets(base))
    options = {"max_length": 40, "ops": "onnx"}
    bundle = export(
        base, base, tmp_path / "bundle", adapter=adapter, draft_adapter=adapter, **options
    )
    assert bundle.target.source.id == bundle.draft.source.id == "model + adapter"
    plain = export("self:1", base, tmp_path / "plain", **options)
    assert plain.target.source.id == "model"
    weights = "target/weights.bin"
    assert bundle.path(weights).read_bytes() != plain.path(weights).read_bytes()


@pytest.mark.slow(exhaustive=True)
def test_self_draft_has_the_targets_adapter(base, tmp_path):
    adapter, _ = adapted(base, tmp_path / "adapter", target_modules=targets(base))
    bundle = export("self:1", base, tmp_path / "bundle", max_length=40, adapter=adapter)
    assert bundle.draft.source.id == "model + adapter self:1"
    with pytest.raises(CheckpointError, match="omit --draft-adapter"):
        export("self:1", base, tmp_path / "other", draft_adapter=adapter)


def test_pickled_adapters_are_read(base, tmp_path):
    adapter, wanted = adapted(base, tmp_path / "adapter", target_modules=targets(base))
    weights = peft.load_peft_weights(str(adapter))
    (adapter / "adapter_model.safetensors").unlink()
    torch.save(weights, adapter / "adapter_model.bin")
    _, loaded, _ = load(base, adapter)
    with torch.no_grad(), loaded.sources.materialized(loaded.model):
        assert torch.allclose(loaded.model(TOKENS).logits, wanted(TOKENS).logits, atol=1e-5)


def test_adapter_of_another_method_is_refused(base, tmp_path):
    assert "specify a LoRA adapter" in refusal(base, base)
    adapter, _ = adapted(base, tmp_path / "adapter", target_modules=targets(base))
    for changes, said in (
        ({"init_lora_weights": "pissa_niter_4"}, "started from pissa_niter_4"),
        ({"init_lora_weights": True, "lora_bias": True}, "has lora_bias"),
        ({"lora_bias": False, "layer_replication": [[0, 1]]}, "has layer_replication"),
        ({"peft_type": "IA3"}, "is a IA3 adapter; only LoRA"),
    ):
        edit(adapter, **changes)
        assert said in refusal(base, adapter)
    (adapter / "adapter_config.json").write_text("{", "utf-8")
    assert "adapter_config.json cannot be read" in refusal(base, adapter)
    (adapter / "adapter_model.safetensors").unlink()
    assert "specify a LoRA adapter" in refusal(base, adapter)


def test_adapter_of_another_model_is_rejected(base, tmp_path):
    other = make_checkpoint(
        tmp_path / "other", "qwen2", make_tokenizer(tmp_path / "tokenizer"), hidden=32
    )
    adapter, _ = adapted(other, tmp_path / "adapter", target_modules=["q_proj"])
    assert "does not fit the model" in refusal(base, adapter)
    deeper = make_checkpoint(
        tmp_path / "deeper", "llama", make_tokenizer(tmp_path / "tokenizer"), layers=3
    )
    adapter, _ = adapted(deeper, tmp_path / "adapter-2", target_modules=["q_proj"])
    assert "does not fit the model" in refusal(base, adapter)


@pytest.mark.parametrize(
    ("trained_on", "model", "differ"),
    [
        ("org/one", "org/two", True),
        ("org/one", "Org/One", False),
        ("org/one", ".", False),
        (None, "org/two", False),
        ("/a/b/c", "org/two", False),
    ],
)
def test_adapter_of_another_repository_is_refused_before_any_weights(
    base, trained_on, model, differ, tmp_path
):
    from specedge.exporter.checkpoint import adapters

    adapter, _ = adapted(base, tmp_path / "adapter", target_modules=targets(base))
    edit(adapter, base_model_name_or_path=trained_on)
    if differ:
        with pytest.raises(CheckpointError, match=f"was trained on {trained_on}, not on {model}"):
            adapters.find("target adapter", str(adapter), model)
    else:
        adapters.find("target adapter", str(adapter), model)
