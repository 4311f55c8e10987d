"""The comparison with PyTorch notices faults that are planted into a graph."""

import functools

import pytest
import torch

from cases import exhaustive, slow
from comparing import computed, graph_of, measure, model_of, traced
from faults import (
    DIFFERS,
    position_off_by_one,
    stale_row,
    window_off_by_one,
    wrong_scale,
    wrong_scale_of_one_layer,
)
from specedge.errors import ParityError
from specedge.exporter.tracing import tracer


class Gemma:
    """Model with a softcap and a window in every other layer, and both graph variants of it."""

    def __init__(self, **config):
        options = {"sliding_window": 24, "attn_logit_softcapping": 3.0, "head_dim": 16}
        self.model = model_of("gemma2", **options, **config)
        self.graph = functools.cache(functools.partial(graph_of, self.model))
        self.references = None

    def verify(self, graph, ops, folder, monkeypatch):
        """Verify a changed graph; PyTorch computes its references once."""
        monkeypatch.setattr(tracer, "trace", lambda *args: tracer.TracedModel(graph))
        runner = traced(self.model, folder, ops)
        self.references = self.references or computed(self.model, runner)
        return measure(self.model, runner, references=self.references)


@pytest.fixture(scope="module")
def gemma():
    return Gemma()


@pytest.fixture(scope="module")
def deep_gemma():
    return Gemma(layers=6)


def check_refused(fault, ops, gemma, tmp_path, monkeypatch):
    changed = gemma.graph(ops).clone()
    before = str(changed.graph)
    fault(changed.graph)
    assert str(changed.graph) != before
    with pytest.raises(ParityError, match=DIFFERS):
        gemma.verify(changed, ops, tmp_path, monkeypatch)


@pytest.mark.parametrize("ops", ["onnx", slow("gqa")])
def test_fault_free_model_passes(ops, gemma, tmp_path, monkeypatch):
    report = gemma.verify(gemma.graph(ops).clone(), ops, tmp_path, monkeypatch)
    assert report.invariant_lengths == (1, 2, 3, 5, 9, 18, 36, 64)


def test_fault_only_at_last_position_is_detected(tmp_path):
    model = model_of("gpt2")
    runner = traced(model, tmp_path)
    with torch.no_grad():
        model.transformer.wpe.weight[-1, 0] += 0.01
    with pytest.raises(ParityError, match=f"position {model.config.n_positions - 1} "):
        measure(model, runner)


@pytest.mark.parametrize(
    ("fault", "ops"),
    [
        (wrong_scale, "onnx"),
        (stale_row, "onnx"),
        *(slow(fault, "gqa") for fault in (position_off_by_one, stale_row)),
    ],
)
def test_planted_fault_in_partitioned_model_is_found(
    fault, ops, gemma, tmp_path, in_parts, monkeypatch
):
    check_refused(fault, ops, gemma, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("ops", ["onnx", "gqa"])
@pytest.mark.parametrize("fault", [window_off_by_one, stale_row])
def test_planted_fault_is_detected_with_representative_layers(
    fault, ops, deep_gemma, tmp_path, in_parts, monkeypatch
):
    check_refused(fault, ops, deep_gemma, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("ops", ["onnx", exhaustive("gqa")])
def test_fault_in_one_of_many_identical_layers_is_detected(
    ops, deep_gemma, tmp_path, in_parts, monkeypatch
):
    changed = deep_gemma.graph(ops).clone()
    wrong_scale_of_one_layer(changed.graph)
    with pytest.raises(ParityError, match=r"logits|present"):
        deep_gemma.verify(changed, ops, tmp_path, monkeypatch)
