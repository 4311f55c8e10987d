"""Rotary factors at contexts beyond 4,096, and notes about length-dependent ones."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from rotary import CONTEXT, ORIGINAL, compared, config_of
from specedge.exporter.tracing.module_patches import freeze_rotary


@pytest.mark.slow
@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("kind", ["yarn", "longrope"])  # the table has all
def test_late_positions_of_long_contexts_match_transformers(kind, tmp_path):
    errors, plain = compared(kind, tmp_path)
    assert errors[ORIGINAL:].max() < 1e-4
    assert (plain > 0.05) is (kind != "default")


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
@pytest.mark.parametrize(("context", "said"), [(ORIGINAL, False), (CONTEXT, True)])
def test_note_of_frozen_long_context_factors(kind, context, said):
    model = AutoModelForCausalLM.from_config(config_of(kind))
    before = model.model.rotary_emb.inv_freq.clone()
    assert freeze_rotary(model, context) is said
    assert torch.equal(model.model.rotary_emb.inv_freq, before) is not said


def test_only_dynamic_rotary_factors_of_a_layer_type_are_frozen():
    model = AutoModelForCausalLM.from_config(config_of("longrope"))
    rotary = model.model.rotary_emb
    rotary.rope_type = {"full_attention": "longrope", "sliding_attention": "default"}
    rotary.full_attention_inv_freq = rotary.inv_freq.clone()
    rotary.forward = lambda x, positions, layer_type: rotary.full_attention_inv_freq.mul_(2)
    assert freeze_rotary(model, CONTEXT)
    assert rotary.rope_type == {"full_attention": "fixed", "sliding_attention": "default"}
