"""Every family through export, parity and 200 greedy tokens: docs/architectures.md's tables.

`pytest --exhaustive -m slow` of this file runs them all and writes the tables; a choice (`-k`) its
rows alone. A plain run takes the families that need code of their own, and looks only whether the
tables have every case.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import published
from architectures import ARCHITECTURES, CONTEXT
from checkpoints import (
    VOCAB_SIZE,
    add_noise,
    make_model,
    make_tokenizer,
    save,
)
from end_to_end import DOCUMENT, MEASURED, exported_and_run
from published import PUBLISHED, REFUSED
from rotary import KINDS, ORIGINAL, compared
from specedge.errors import SpecEdgeError
from specedge.exporter import Progress, export, model_files
from specedge.exporter.checkpoint.lazy_weights import Sources
from specedge.exporter.checkpoint.loading import Loaded
from specedge.exporter.verification import parity, reference
from specedge.exporter.verification.runner import Runner
from tables import Table

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
OWN_CODE = ("bloom", pytest.param("gpt_oss", marks=pytest.mark.slow(exhaustive=True)))


def model_of(name):
    torch.manual_seed(0)
    return make_model(ARCHITECTURES[name][1]())


@pytest.mark.slow
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
        runner = Runner(tmp_path, part.lengths, part.shape, ops)
        found, differing = parity.measure("target", references, runner)
        assert differing == []
        assert found.structure_error < 1e-12
        assert found.row_independent_lengths == (1, 2, 3, 5, 9, 18, 36, 64)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.title)
def test_each_table_has_all_its_cases(table):
    assert table.written() == list(table.names)


@pytest.mark.parametrize("table", [FAMILIES, AS_PUBLISHED], ids=lambda table: table.title)
def test_each_family_was_exported_in_an_op_set_and_wrote_its_text(table):
    for name in table.names:
        rows = table.rows_of(name)
        assert any("equal (" in row for row in rows), name
        assert not any("differs from" in row or "not run" in row for row in rows), name


@pytest.mark.slow(exhaustive=True)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_family_is_exact_from_end_to_end(name, tmp_path):
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    model = model_of(name)
    target = save(model, tokenizer, tmp_path / "target")
    draft = save(add_noise(model, 0.03), tokenizer, tmp_path / "draft")
    special = ARCHITECTURES[name][0]
    exported_and_run(FAMILIES, name, special, draft, target, tmp_path, in_float32(target))


@pytest.mark.slow(exhaustive=True)
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_checkpoint_is_exact_from_end_to_end(name, tmp_path):
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    model = published.build(name, tmp_path / "target")
    target = published.save(name, model, tokenizer, tmp_path / "target")
    draft = published.save(name, add_noise(model, 0.03), tokenizer, tmp_path / "draft")
    special, theirs = PUBLISHED[name].special, in_float32(target, published.loader(name))
    exported_and_run(AS_PUBLISHED, name, special, draft, target, tmp_path, theirs)


def in_float32(folder, loader=AutoModelForCausalLM):
    return loader.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.slow(exhaustive=True)
@pytest.mark.parametrize("kind", REFUSED)
def test_a_refusal_is_in_the_table(kind, tmp_path):
    REFUSALS.begin(kind)
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    folder = published.save_refused(kind, tokenizer, tmp_path / kind)
    with pytest.raises(SpecEdgeError) as error:
        export(folder, folder, tmp_path / "bundle", max_length=CONTEXT)
    REFUSALS.add(kind, str(error.value).replace(str(folder), "..."))


@pytest.mark.slow(exhaustive=True)
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
