"""Exported graphs match the PyTorch models."""

import sys

import numpy as np
import pytest

from checkpoints import make_config, make_model
from comparing import measure, model_of, traced
from rows import LENGTHS
from specedge.errors import ExportError
from specedge.exporter.graph import graphs
from specedge.exporter.tracing import geometry
from specedge.exporter.verification import reference
from specedge.exporter.verification.runner import FillCaches, PassAction, ReadRows, Runner


def test_logits_and_caches_equal_pytorch_models(exported):
    for model in exported.models.values():
        for found in model.parity.values():
            assert 0 < found.structure_error < 1e-12
            assert 0 < found.logits_error < 1e-5
            assert 0 < found.cache_error < 1e-5
            assert found.error_ratio > 0
            assert found.num_positions == model.context_length


def test_exports_are_batch_invariant(exported):
    for model in exported.models.values():
        for found in model.parity.values():
            wanted = tuple(t for t in LENGTHS if t <= model.context_length)
            assert found.invariant_lengths == wanted


def test_caches_are_updated_in_place(pairs):
    model = pairs.bundle("gpt2").target
    folder = pairs.bundle("gpt2").folder / "target"
    shape = geometry.Geometry(
        model.context_length, model.capacity, model.padded_vocab_size, model.layers
    )
    runner = Runner(folder, graphs.graph_files(4, model.context_length), shape)
    zeros = [np.zeros(dims[1:], np.float32) for dims in shape.cache_shapes()]
    actions = [
        FillCaches(zeros.__getitem__),
        PassAction("decoder", np.arange(7), 3),
        ReadRows(0, shape.capacity),
    ]
    rows = runner.run(actions)[2][0]
    assert np.abs(rows[:, 3:10]).min(axis=2).max() > 0
    assert not rows[:, :3].any()
    assert not rows[:, 10:].any()


@pytest.mark.slow
def test_late_positions_of_long_context_are_compared(tmp_path):
    model = make_model(make_config("llama", kv_heads=2, context=1400, layers=1))
    runner = traced(model, tmp_path, context=1400)
    assert reference.compared_positions(runner.geometry, 1) == [(0, 256), (1352, 1400)]
    found = measure(model, runner)
    assert found.num_positions == 304


def test_unsupported_attention_option_is_refused(tmp_path, monkeypatch):
    model = model_of()
    code = sys.modules[type(model).__module__]
    plain = code.LlamaAttention.forward

    def unusual(self, *args, **kwargs):
        return plain(self, *args, surprise=1.0, **kwargs)

    monkeypatch.setattr(code.LlamaAttention, "forward", unusual)
    with pytest.raises(ExportError, match="attention has surprise"):
        traced(model, tmp_path)
