"""A pair exported, run, and compared with plain decoding and transformers."""

from __future__ import annotations

import numpy as np
import torch

import specedge
from architectures import CONTEXT
from checkpoints import greedy_tokens
from specedge.exporter import export
from specedge.exporter.tracing.module_patches import freeze_rotary

PROMPT = list(range(40, 52))
LENGTH = 200
NEAR = 1e-4  # of the logits' standard deviation: float32 rounding by summation order


def check_pair(draft, target, folder, model, **options):
    """Export a pair; its greedy text equals plain decoding's and transformers'."""
    bundle = export(
        draft, target, folder / "bundle", max_length=CONTEXT, **{"ops": "all"} | options
    )
    for ops in bundle.target.parity:
        pipeline = specedge.load(bundle.folder, ops=ops)
        plain = pipeline.generate(PROMPT, LENGTH, num_draft_tokens=0, ignore_eos=True).tokens
        for k in (1, 4):
            speculative = pipeline.generate(PROMPT, LENGTH, num_draft_tokens=k, ignore_eos=True)
            assert speculative.tokens == plain, (ops, k)
        compare_with_transformers(model, plain)


def compare_with_transformers(model, tokens):
    """Equal tokens, up to a near-tie whose margin is as small as rounding."""
    freeze_rotary(model, CONTEXT)
    generated = greedy_tokens(model, PROMPT, LENGTH)
    if generated == tokens:
        return
    first = next(i for i in range(LENGTH) if generated[i] != tokens[i])
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *tokens[:first]]])).logits[0, -1].numpy()
    best, ours = float(np.max(logits)), float(logits[tokens[first]])
    margin = (best - ours) / float(logits.std())
    assert abs(margin) < NEAR
