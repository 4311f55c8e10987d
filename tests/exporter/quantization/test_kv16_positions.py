"""Caches in float16 where scores have a bias by position."""

import numpy as np
import pytest

from architectures import ARCHITECTURES
from checkpoints import make_model, make_tokenizer, save
from specedge.exporter import Progress, export
from specedge.exporter.graph import half_precision
from specedge.runtime.backend.onnx_model import OrtModel
from specedge.runtime.backend.sessions import Device

CONTEXT, CHUNK = 1024, 62


def logits(bundle, ops, tokens):
    model = OrtModel(bundle, bundle.target, Device(), ops)
    chunks = [tokens[i : i + CHUNK] for i in range(0, len(tokens), CHUNK)]
    return np.concatenate([model.forward(chunk).array().copy() for chunk in chunks])


def export_alibi(folder, **options):
    """Export an ALiBi model with an additional float16 cache variant."""
    config = ARCHITECTURES["bloom"][1]()
    config.max_position_embeddings = CONTEXT
    model = save(make_model(config), make_tokenizer(folder / "tokenizer"), folder / "model")
    return export(
        None, model, folder / "bundle", ops="onnx", cache="fp16", max_length=CONTEXT, **options
    )


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    progress = Progress()
    return export_alibi(tmp_path_factory.mktemp("right"), progress=progress), progress


@pytest.mark.slow
def test_alibi_accuracy_is_uniform_across_positions(right):
    bundle, _ = right
    tokens = np.random.default_rng(0).integers(1, 500, 16 * CHUNK).tolist()
    wanted, found = (logits(bundle, ops, tokens) for ops in ("onnx", "onnx-kv16"))
    errors = np.abs(found - wanted).max(1) / np.abs(wanted).max()
    near, far = errors[: 4 * CHUNK].max(), errors[-4 * CHUNK :].max()
    assert far < 1.5 * near


def late(bundle, progress):
    """Return figures of both reports and notes about the end of the context."""
    reports = [model.quantization["onnx-kv16"].exceptions for model in bundle.models.values()]
    said = [line.partition(" the KL")[0] for lines in reports for line in lines if "KL" in line]
    return said, [note.partition(" the KL")[0] for note in progress.notes if " KL" in note]


@pytest.mark.slow
def test_report_accepts_accurate_late_positions(right):
    assert late(*right) == ([], [])


@pytest.mark.slow(exhaustive=True)
def test_report_detects_errors_only_at_late_positions(tmp_path, monkeypatch):
    """Uncentered float16 biases of adjacent positions coincide near position 1,000."""
    monkeypatch.setattr(half_precision, "_center_biases", lambda graph: None)
    progress = Progress()
    said, noted = late(export_alibi(tmp_path, progress=progress), progress)
    assert said == ["near position 1024"]
    assert noted == ["target (onnx-kv16): near position 1024"]
