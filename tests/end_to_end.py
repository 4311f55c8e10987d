"""A pair exported, run, and compared with transformers: rows of docs/architectures.md's tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

import specedge
from architectures import CONTEXT
from checkpoints import greedy_tokens
from specedge.exporter import Progress, export
from specedge.exporter.tracing.module_patches import fix_rotary

DOCUMENT = Path(__file__).parents[1] / "docs" / "architectures.md"
MEASURED = (
    "what is special",
    "op set",
    "logits",
    "caches",
    "same bits for passes of",
    "200 greedy tokens, speculative against plain (acceptance at K = 1, 4)",
    "and against transformers",
)
PROMPT = list(range(40, 52))
LENGTH = 200
NEAR = 1e-4  # of the logits' spread: what float32 sums in another order may differ by


def exported_and_run(table, name, special, draft, target, tmp_path, model, **options):
    """Export a pair, run it, compare it with transformers' model; the table's rows."""
    table.begin(name)
    progress = Progress()
    options |= {"max_length": CONTEXT, "progress": progress}
    bundle = export(draft, target, tmp_path / "bundle", **options)
    for ops, found in bundle.target.parity.items():
        pipeline = specedge.load(bundle.folder, ops=ops)
        plain = pipeline.generate(PROMPT, LENGTH, num_draft_tokens=0, ignore_eos=True).tokens
        rates = []
        for k in (1, 4):
            one = pipeline.generate(PROMPT, LENGTH, num_draft_tokens=k, ignore_eos=True)
            assert one.tokens == plain, k
            rates.append(f"{one.stats.accepted_over_tested:.2f}")
        flips = compare_with_transformers(model, plain)
        held = ", ".join(map(str, found.row_independent_lengths))
        errors = f"{found.logits_error:.1e}", f"{found.cache_error:.1e}"
        table.add(name, special, ops, *errors, held, f"equal ({', '.join(rates)})", flips)
    for note in notes_of(progress, "gqa"):
        table.add(name, "", "gqa", note, "", "", "", "")


def notes_of(progress, ops):
    start = f"target: no {ops} graphs, because "
    return [f"none: {n.removeprefix(start)}" for n in progress.notes if n.startswith(start)]


def compare_with_transformers(model, tokens):
    """Equal, or where the two part with the margin there, which must be as small as rounding."""
    fix_rotary(model, CONTEXT)
    generated = greedy_tokens(model, PROMPT, LENGTH)
    if generated == tokens:
        return "equal"
    first = next(i for i in range(LENGTH) if generated[i] != tokens[i])
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *tokens[:first]]])).logits[0, -1].numpy()
    best, ours = float(np.max(logits)), float(logits[tokens[first]])
    margin = (best - ours) / float(logits.std())
    assert abs(margin) < NEAR
    return f"near-tie at token {first}, margin {margin:.0e}"
