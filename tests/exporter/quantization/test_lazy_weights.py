"""Quantized exports of large models, whose float weights are in no file."""

import numpy as np
import pytest
import torch

from checkpoints import make_config, make_model, make_tokenizer, save
from quantized import SIZES
from specedge.errors import ExportError
from specedge.exporter import export
from specedge.exporter.checkpoint.lazy_tensors import LazyTensor
from specedge.exporter.graph import external_data
from specedge.exporter.graph.external_data import WeightsFile
from specedge.exporter.quantization import rotation_rewriter
from specedge.exporter.verification import runner

OPTIONS = {"max_length": 40, "ops": "gqa"}


@pytest.fixture
def target(tmp_path):
    model = make_model(make_config("llama", **SIZES, kv_heads=2, tied=False)).bfloat16()
    return save(model, make_tokenizer(tmp_path / "tokenizer"), tmp_path / "target")


@pytest.fixture
def exported(tmp_path, monkeypatch, target):
    """Return a function that exports a model as a large one, with the bytes of float files."""
    monkeypatch.setattr(runner, "WHOLE_BYTES", 0)
    finish = WeightsFile.finish

    def exported(precision, is_sparse):
        written = []

        def finished(file, advance=lambda amount: None, **options):
            finish(file, advance, is_sparse=is_sparse)
            written.append(512 * (file.folder / external_data.FILE).stat().st_blocks)

        monkeypatch.setattr(WeightsFile, "finish", finished)
        bundle = export(None, target, tmp_path / f"{is_sparse}", precision=precision, **OPTIONS)
        return bundle.files, written

    return exported


@pytest.mark.parametrize(
    "precision", ["int8", pytest.param("int4", marks=pytest.mark.slow),
                  pytest.param("int8-block", marks=pytest.mark.slow)]
)  # fmt: skip
def test_bundle_is_the_same_without_files_of_float_weights(exported, precision):
    expected, written = exported(precision, is_sparse=False)
    files, lazily_written = exported(precision, is_sparse=True)
    assert files["target/weights.bin"] == expected["target/weights.bin"]
    assert min(written) > max(lazily_written) == 0


def test_each_matrix_is_changed_once(exported, monkeypatch):
    changed, change_matrix = [], rotation_rewriter.change_matrix

    def change(stored, *args):
        changed.append(stored.tensor.name)
        return change_matrix(stored, *args)

    monkeypatch.setattr(rotation_rewriter, "change_matrix", change)
    exported("int8", is_sparse=True)
    assert len(changed) == len({*changed}) == 7 * SIZES["layers"] + 1


def test_damaged_weight_is_reported(exported, monkeypatch):
    nan = torch.full((64, 64), torch.nan)
    monkeypatch.setattr(rotation_rewriter, "change_matrix", lambda *args: nan)
    with pytest.raises(ExportError, match="has NaN values"):
        exported("int8", is_sparse=True)


def test_values_read_last_are_kept_within_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(external_data, "_CACHE_BYTES", 2 * 1024)
    reads, lazy = [], {}

    def compute(number):
        reads.append(number)
        return torch.full((256,), float(number))

    like = torch.empty(256, device="meta")
    with WeightsFile(tmp_path, "float32", lazy) as file:
        for number in range(3):
            tensor = LazyTensor(like, lambda number=number: compute(number))
            file.add(number, tensor, torch.float32, f"tensor{number}")
    tensors = [*lazy.values()]
    for number in (0, 1, 0, 2, 0, 1):  # 1 is the oldest when 2 is read
        assert np.array_equal(tensors[number].read(), np.full(256, number))
    assert reads == [0, 1, 2, 1]
