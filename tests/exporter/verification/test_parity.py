"""The exported graphs compute what the PyTorch models do."""

import sys

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from checkpoints import make_config, make_model
from comparing import measure, model_of, traced
from rows import LENGTHS
from specedge.errors import ExportError
from specedge.exporter.graph import graphs
from specedge.exporter.tracing import geometry
from specedge.exporter.verification import reference, subgraph
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


def test_every_file_gives_same_bits_and_nothing_is_noted(pairs, exported):
    notes = [note for notes in pairs.notes.values() for note in notes]
    assert [note for note in notes if "bitwise" in note or "no onnx" in note] == []


@pytest.mark.slow
def test_caches_are_updated_in_place(pairs):
    model = pairs.bundle("llama").target
    folder = pairs.bundle("llama").folder / "target"
    shape = geometry.Geometry(
        model.context_length, model.cache.capacity, model.padded_vocab_size, model.cache.layers
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


@pytest.mark.slow
def test_weights_in_half_precision_give_bits_of_float32(pairs, tmp_path):
    bundle = pairs.bundle("bfloat16")
    model = tracing_source(pairs)
    runner = traced(model, tmp_path)
    shape = runner.geometry
    context = bundle.context_length
    other = Runner(
        bundle.folder / "target",
        graphs.graph_files(4, context),
        geometry.measure_geometry(model, context, 4),
    )
    assert shape.padded_vocab_size == 512
    zeros = [np.zeros(dims[1:], np.float32) for dims in shape.cache_shapes()]
    actions = [FillCaches(zeros.__getitem__), PassAction("decoder", np.arange(20), 0)]
    found, wanted = (p.run(actions)[1] for p in (runner, other))
    assert np.array_equal(found, wanted)


def tracing_source(pairs):
    from transformers import AutoModelForCausalLM

    folder = pairs.checkpoint("bfloat16")[1]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.set_attn_implementation("eager")
    return model.eval()


@pytest.mark.slow
def test_onnx_runtime_folds_casts_of_weights(pairs, tmp_path):
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    subgraph.open_session(pairs.bundle("bfloat16").folder / "target/decoder.onnx", options)
    names = [node.op_type for node in ir.load(options.optimized_model_filepath).graph]
    assert names.count("Cast") == 1  # of the rows of a table, which are cast as they are taken
