"""Every family through export, parity and 200 greedy tokens: docs/architectures.md's tables.

`pytest -m architectures` runs them all and writes the tables; a choice of them (`-k`) writes their
rows alone. A plain run takes the families that need code of their own, and looks only whether the
tables have every case.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import published
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
from published import PUBLISHED, REFUSED
from rotary import KINDS, ORIGINAL, compared
from specedge.errors import SpecEdgeError
from specedge.exporter import Progress, export, model_files
from specedge.exporter.checkpoint.lazy_weights import Sources
from specedge.exporter.checkpoint.loading import Loaded
from specedge.exporter.compare import parity, reference
from specedge.exporter.compare.runner import Player
from specedge.exporter.tracing.module_patches import fix_rotary
from tables import Table

DOCUMENT = Path(__file__).parents[3] / "docs" / "architectures.md"
MEASURED = (
    "what is special",
    "op set",
    "logits",
    "caches",
    "same bits for passes of",
    "200 greedy tokens, speculative against plain (acceptance at K = 1, 4)",
    "and against transformers",
)
FAMILIES = Table(DOCUMENT, "families", ("architecture", *MEASURED), tuple(ARCHITECTURES))
AS_PUBLISHED = Table(DOCUMENT, "published", ("repository", *MEASURED), tuple(PUBLISHED))
REFUSALS = Table(DOCUMENT, "refused", ("model type", "what is said"), tuple(REFUSED))
ROTARY = Table(
    DOCUMENT,
    "rotary",
    ("scaling", "up to position 4,095", "from 4,096 on", "plain factors there"),
    KINDS,
)
TABLES = (AS_PUBLISHED, FAMILIES, REFUSALS, ROTARY)
OWN_CODE = ("bloom", pytest.param("gpt_oss", marks=pytest.mark.architectures))
PROMPT = list(range(40, 52))
LENGTH = 200
NEAR = 1e-4  # of the logits' spread: what float32 sums in another order may differ by


def model_of(name):
    torch.manual_seed(0)
    return make_model(ARCHITECTURES[name][1]())


@pytest.mark.parametrize("name", OWN_CODE)
def test_families_with_code_of_their_own_equal_pytorch_in_float64(name, tmp_path):
    model = model_of(name)
    loaded = Loaded(model, "float32", Sources())
    part = model_files.measured("target", loaded, 96, 4, VOCAB_SIZE, tmp_path, Progress())
    (written,), _ = model_files.write([part], "auto")
    assert written == ["onnx", "gqa"]
    references = reference.references("target", model, Sources(), part.shape, VOCAB_SIZE)
    assert references[0].logits.dtype == np.float64
    for ops in written:
        player = Player(tmp_path, part.lengths, part.shape, ops)
        found = parity.measure("target", references, player)
        assert found.differing == []
        assert found.parity.structure_error < 1e-12
        assert found.parity.row_independent_lengths == (1, 2, 3, 5, 9, 64)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.title)
def test_each_table_has_all_its_cases(table):
    assert table.written() == list(table.names)


@pytest.mark.parametrize("table", [FAMILIES, AS_PUBLISHED], ids=lambda table: table.title)
def test_each_family_was_exported_in_an_op_set_and_wrote_its_text(table):
    for name in table.names:
        rows = table.rows_of(name)
        assert any("equal (" in row for row in rows), name
        assert not any("differs from" in row or "not run" in row for row in rows), name


@pytest.mark.architectures
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_family_is_exact_from_end_to_end(name, tmp_path):
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    model = model_of(name)
    target = save(model, tokenizer, tmp_path / "target")
    draft = save(add_noise(model, 0.03), tokenizer, tmp_path / "draft")
    loader = AutoModelForCausalLM
    exported_and_run(FAMILIES, name, ARCHITECTURES[name][0], draft, target, tmp_path, loader)


@pytest.mark.architectures
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_checkpoint_is_exact_from_end_to_end(name, tmp_path):
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    model = published.build(name, tmp_path / "target")
    target = published.save(name, model, tokenizer, tmp_path / "target")
    draft = published.save(name, add_noise(model, 0.03), tokenizer, tmp_path / "draft")
    special, loader = PUBLISHED[name].special, published.loader(name)
    exported_and_run(AS_PUBLISHED, name, special, draft, target, tmp_path, loader)


def exported_and_run(table, name, special, draft, target, tmp_path, loader):
    """Export a pair, play it, compare it with transformers; the table's rows."""
    table.begin(name)
    progress = Progress()
    bundle = export(draft, target, tmp_path / "bundle", max_length=CONTEXT, progress=progress)
    for ops, found in bundle.target.parity.items():
        pipeline = specedge.load(bundle.folder, ops=ops)
        plain = pipeline.generate(PROMPT, LENGTH, num_draft_tokens=0, ignore_eos=True).tokens
        rates = []
        for k in (1, 4):
            one = pipeline.generate(PROMPT, LENGTH, num_draft_tokens=k, ignore_eos=True)
            assert one.tokens == plain, k
            rates.append(f"{one.stats.accepted_over_tested:.2f}")
        flips = compare_with_transformers(loader, target, plain)
        held = ", ".join(map(str, found.row_independent_lengths))
        errors = f"{found.logits_error:.1e}", f"{found.cache_error:.1e}"
        table.add(name, special, ops, *errors, held, f"equal ({', '.join(rates)})", flips)
    for note in notes_of(progress, "gqa"):
        table.add(name, "", "gqa", note, "", "", "", "")


def notes_of(progress, ops):
    start = f"target: no {ops} graphs, because "
    return [f"none: {n.removeprefix(start)}" for n in progress.notes if n.startswith(start)]


def compare_with_transformers(loader, folder, tokens):
    """Equal, or where the two part with the margin there, which must be as small as rounding."""
    model = loader.from_pretrained(folder, dtype=torch.float32).eval()
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


@pytest.mark.architectures
@pytest.mark.parametrize("kind", REFUSED)
def test_a_refusal_is_in_the_table(kind, tmp_path):
    REFUSALS.begin(kind)
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    folder = published.save_refused(kind, tokenizer, tmp_path / kind)
    with pytest.raises(SpecEdgeError) as error:
        export(folder, folder, tmp_path / "bundle", max_length=CONTEXT)
    REFUSALS.add(kind, str(error.value).replace(str(folder), "..."))


@pytest.mark.architectures
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_rotary_scaling_is_in_the_table(kind, tmp_path):
    ROTARY.begin(kind)
    errors, plain = compared(kind, tmp_path)
    assert errors[ORIGINAL:].max() < 1e-4
    early, late = (part.max() for part in (errors[:ORIGINAL], errors[ORIGINAL:]))
    ROTARY.add(kind, f"{early:.1e}", f"{late:.1e}", f"{plain:.1e}")


@pytest.fixture(scope="session", autouse=True)
def _write_tables():
    yield
    for table in TABLES:
        table.write()
