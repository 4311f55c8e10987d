"""Text decoders of multimodal checkpoints: published tensor names and configs."""

from __future__ import annotations

import pytest
import torch
from transformers import AyaVisionConfig, LlavaConfig

import published
from cases import exhaustive, slow
from checkpoints import VOCAB_SIZE, make_tokenizer
from published import PUBLISHED, REFUSED
from specedge.errors import CheckpointError, SpecEdgeError
from specedge.exporter import Progress, export
from specedge.exporter.checkpoint import checkpoints, loader, text_decoder
from specedge.exporter.tracing import tracer

WRAPPERS = [name for name, one in PUBLISHED.items() if one.wrapper]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_tensor_names_load_the_text_decoder(name, tokenizer, tmp_path):
    """Multimodal models use their logits for text only, where M-RoPE is plain RoPE."""
    model = published.build(name, tmp_path)
    published.save(name, model, tokenizer, tmp_path)
    found = checkpoints.find("target", str(tmp_path), None)
    assert tracer.observe_config(found.config, 256, 4)
    loaded = loader.load(found, Progress())
    tokens = torch.randint(0, VOCAB_SIZE, (1, 100), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(loaded.model(input_ids=tokens).logits, model(input_ids=tokens).logits)


@pytest.mark.parametrize("name", WRAPPERS)
def test_text_decoder_excludes_other_modalities(name, tokenizer, tmp_path):
    folder = published.save(name, published.build(name, tmp_path), tokenizer, tmp_path)
    loaded = loader.load(checkpoints.find("target", str(folder), None), Progress())
    assert not [n for n, _ in loaded.model.named_modules() if "vis" in n or "multi_modal" in n]


@pytest.mark.parametrize("name", WRAPPERS)
def test_text_decoder_with_missing_weights_is_rejected(name, tokenizer, tmp_path, monkeypatch):
    folder = published.save(name, published.build(name, tmp_path), tokenizer, tmp_path)
    names = text_decoder.internals.rename_keys
    lacking = "layers.1.self_attn.o_proj.weight"

    def renamed(model, keys):
        return {k: v for k, v in names(model, keys).items() if not v.endswith(lacking)}

    monkeypatch.setattr(text_decoder.internals, "rename_keys", renamed)
    with pytest.raises(
        CheckpointError, match=r"lacks weights, such as model\.layers\.1\.self_attn\.o_"
    ):
        loader.load(checkpoints.find("target", str(folder), None), Progress())


FIRST = {message: kind for kind, (message, _) in reversed(REFUSED.items())}


@pytest.mark.parametrize(
    "kind", [(slow if FIRST[REFUSED[kind][0]] == kind else exhaustive)(kind) for kind in REFUSED]
)
def test_unsupported_type_is_refused_before_weights_are_read(kind, tokenizer, tmp_path):
    folder = published.save_refused(kind, tokenizer, tmp_path / "model")
    with pytest.raises(SpecEdgeError, match=REFUSED[kind][0]) as error:
        export(folder, folder, tmp_path / "bundle")
    assert kind.removesuffix("_vl").removesuffix("_omni") in str(error.value)
    assert "\n" not in str(error.value)


def test_text_decoder_in_unknown_module_is_rejected(monkeypatch):
    whole = text_decoder.internals.build_multimodal_model
    monkeypatch.setattr(
        text_decoder.internals, "build_multimodal_model", lambda c: whole(c).model.vision_tower
    )
    with pytest.raises(CheckpointError, match=r"in an unknown module \(with transformers"):
        text_decoder.decoder_config("target x", LlavaConfig())


def test_multimodal_model_that_cannot_be_built_is_refused_in_one_line():
    config = AyaVisionConfig()
    config.vision_config.num_attention_heads = 7
    with pytest.raises(CheckpointError, match=r"cannot build .* model .*ValueError") as error:
        text_decoder.decoder_config("target x", config)
    assert "\n" not in str(error.value)


def test_several_text_models_are_refused():
    config = LlavaConfig()
    config.decoder = config.text_config  # the name of another place where transformers looks
    with pytest.raises(CheckpointError, match="has several text models"):
        text_decoder.decoder_config("target x", config)
