"""Every family through export, parity and 200 greedy tokens: docs/architectures.md's table.

`pytest -m architectures` runs them all and writes the table anew; a plain run takes the families
that need code of their own, and looks only whether the table has every family.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import specedge
from architectures import ARCHITECTURES, CONTEXT
from checkpoints import (
    VOCAB_SIZE,
    add_noise,
    greedy_tokens,
    make_model,
    make_tokenizer,
    save,
)
from specedge.exporter import Progress, export, model_files, parity, reference
from specedge.exporter.checkpoints import Loaded
from specedge.exporter.playing import Player
from specedge.exporter.sources import Sources
from specedge.exporter.swaps import fix_rotary

TABLE = Path(__file__).parents[2] / "docs" / "architectures.md"
OWN_CODE = ("bloom", "falcon, new decoder", "falcon, ALiBi", "gptj", "gpt_oss", "qwen2_moe")
PROMPT = list(range(40, 52))
LENGTH = 200
NEAR = 1e-4  # of the logits' spread: what float32 sums in another order may differ by
rows: list[str] = []


def model_of(name):
    torch.manual_seed(0)
    return make_model(ARCHITECTURES[name][1]())


@pytest.mark.parametrize("name", OWN_CODE)
def test_families_with_code_of_their_own_equal_pytorch_in_float64(name, tmp_path, monkeypatch):
    model = model_of(name)
    loaded = Loaded(model, "float32", Sources())
    part = model_files.measured("target", loaded, 96, 4, VOCAB_SIZE, tmp_path, Progress())
    (written,), _ = model_files.write([part], "auto")
    assert written == ["onnx", "gqa"]
    types, run = [], reference.reference
    monkeypatch.setattr(reference, "reference", lambda *args: types.append(args[-1]) or run(*args))
    references = reference.references(model, Sources(), part.shape, VOCAB_SIZE)
    assert set(types) == {torch.float64}
    for ops in written:
        player = Player(tmp_path, part.lengths, part.shape, ops)
        found = parity.measure("target", references, player)
        assert found.differing == []
        assert found.parity.row_independent_lengths == (1, 2, 3, 5, 9, 64)


def test_the_table_has_every_family():
    table = TABLE.read_text("utf-8")
    for name in ARCHITECTURES:
        assert f"| {name} |" in table


@pytest.mark.architectures
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_family_is_exact_from_end_to_end(name, tmp_path):
    special, _ = ARCHITECTURES[name]
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    model = model_of(name)
    target = save(model, tokenizer, tmp_path / "target")
    draft = save(add_noise(model, 0.03), tokenizer, tmp_path / "draft")
    progress = Progress()
    bundle = export(draft, target, tmp_path / "bundle", max_length=CONTEXT, progress=progress)
    for ops, found in bundle.target.parity.items():
        assert found.logits_std >= 2
        pipeline = specedge.load(bundle.folder, ops=ops)
        plain = pipeline.generate(PROMPT, LENGTH, num_draft_tokens=0, ignore_eos=True).tokens
        rates = []
        for k in (1, 4):
            one = pipeline.generate(PROMPT, LENGTH, num_draft_tokens=k, ignore_eos=True)
            assert one.tokens == plain, k
            rates.append(f"{one.stats.accepted_over_tested:.2f}")
        flips = compare_with_transformers(target, plain)
        held = ", ".join(map(str, found.row_independent_lengths))
        rows.append(
            f"| {name} | {special} | {ops} | {found.logits_error:.1e} | {found.cache_error:.1e} "
            f"| {held} | equal ({', '.join(rates)}) | {flips} |"
        )
    rows.extend(f"| {name} | | gqa | {note} | | | | |" for note in notes_of(progress, "gqa"))


def notes_of(progress, ops):
    start = f"target: no {ops} graphs, because "
    return [f"none: {n.removeprefix(start)}" for n in progress.notes if n.startswith(start)]


def compare_with_transformers(folder, tokens):
    """Equal, or where the two part with the margin there, which must be as small as rounding."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
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


@pytest.fixture(scope="session", autouse=True)
def _write_table():
    yield
    names = {row.split(" | ")[0].strip("| ") for row in rows}
    if names == ARCHITECTURES.keys():
        head, _, _ = TABLE.read_text("utf-8").partition("| architecture |")
        columns = (
            "| architecture | what is special | op set | logits | caches | same bits for passes of "
            "| 200 greedy tokens, speculative against plain (acceptance at K = 1, 4) "
            "| and against transformers |"
        )
        rule = "|---" * 8 + "|"
        TABLE.write_text("\n".join([head.rstrip(), "", columns, rule, *rows]) + "\n", "utf-8")
