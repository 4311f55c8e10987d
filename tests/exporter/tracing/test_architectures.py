"""Families through export, verification and 200 greedy tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Llama4ForConditionalGeneration

import published
from architectures import ARCHITECTURES
from cases import exhaustive
from checkpoints import (
    VOCAB_SIZE,
    add_noise,
    make_model,
    make_tokenizer,
    save,
)
from end_to_end import check_pair
from published import PUBLISHED
from rotary import KINDS, ORIGINAL, compared
from specedge.bundle.graph_variants import OPS
from specedge.exporter import Progress, model_export
from specedge.exporter.checkpoint.loader import LoadedCheckpoint
from specedge.exporter.checkpoint.placeholders import WeightSources
from specedge.exporter.verification import parity, reference
from specedge.exporter.verification.runner import Runner

OWN_CODE = ("bloom", exhaustive("gpt_oss"))


def model_of(name):
    torch.manual_seed(0)
    return make_model(ARCHITECTURES[name][1]())


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN_CODE)
def test_families_with_custom_code_match_pytorch_in_float64(name, tmp_path):
    model = model_of(name)
    loaded = LoadedCheckpoint(model, "float32", WeightSources())
    part = model_export.measure_model("target", loaded, 96, 4, VOCAB_SIZE, tmp_path, Progress())
    (written,), _ = model_export.write_models([part], OPS)
    assert list(written) == ["onnx", "gqa"]
    references = reference.compute_references(
        "target", model, WeightSources(), part.shape, VOCAB_SIZE
    )
    assert references[0].logits.dtype == np.float64
    for ops in written:
        runner = Runner(tmp_path, part.files, part.shape, ops)
        found, differing = parity.verify("target", references, runner)
        assert differing == []
        assert found.structure_error < 1e-12
        assert found.invariant_lengths == (1, 2, 3, 5, 9, 18, 36, 64)


@pytest.mark.slow(exhaustive=True)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_family_is_exact_from_end_to_end(name, tmp_path):
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    model = model_of(name)
    target = save(model, tokenizer, tmp_path / "target")
    draft = save(add_noise(model, 0.03), tokenizer, tmp_path / "draft")
    check_pair(draft, target, tmp_path, in_float32(target))


@pytest.mark.slow(exhaustive=True)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_checkpoint_is_exact_from_end_to_end(name, tmp_path):
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    model = published.build(name, tmp_path / "target")
    target = published.save(name, model, tokenizer, tmp_path / "target")
    draft = published.save(name, add_noise(model, 0.03), tokenizer, tmp_path / "draft")
    check_pair(draft, target, tmp_path, in_float32(target, published.loader(name)))


def in_float32(folder, loader=AutoModelForCausalLM):
    model = loader.from_pretrained(folder, dtype=torch.float32).eval()
    # Its pass reads `image_outputs`, which its language model does not return (5.24).
    return model.language_model if isinstance(model, Llama4ForConditionalGeneration) else model


@pytest.mark.slow(exhaustive=True)
@pytest.mark.parametrize("kind", KINDS)
def test_rotary_scaling_matches_transformers(kind, tmp_path):
    errors, _ = compared(kind, tmp_path)
    assert errors[ORIGINAL:].max() < 1e-4
