"""The comparison with PyTorch notices faults that are planted into a graph."""

import pytest
import torch

from comparing import CONTEXT, graphs_of, measure, model_of, traced
from faults import (
    DIFFERS,
    missing_softcap,
    position_off_by_one,
    stale_row,
    swapped_heads,
    window_off_by_one,
    wrong_scale,
    wrong_scale_of_one_layer,
)
from specedge.errors import ParityError
from specedge.exporter.tracing import tracer


def traced_gemma(**config):
    """A model with softcap and a window in every other layer, and its graph in both op sets."""
    options = {"sliding_window": 24, "attn_logit_softcapping": 3.0, "head_dim": 16}
    model = model_of("gemma2", **options, **config)
    layers, graphs_ = graphs_of(model)
    assert [layer.window for layer in layers[:2]] == [24, None]
    return model, graphs_


@pytest.fixture(scope="module")
def gemma():
    return traced_gemma()


@pytest.fixture(scope="module")
def deep_gemma():
    return traced_gemma(layers=6)


@pytest.mark.slow
@pytest.mark.parametrize("ops", ["onnx", "gqa"])
@pytest.mark.parametrize(
    "fault",
    [
        wrong_scale,
        missing_softcap,
        window_off_by_one,
        position_off_by_one,
        swapped_heads,
        stale_row,
    ],
)
def test_a_planted_fault_is_a_parity_error(fault, ops, gemma, tmp_path, monkeypatch):
    model, graphs_ = gemma
    result = graphs_[ops].clone()
    before = str(result.graph)
    fault(result.graph)
    assert str(result.graph) != before
    monkeypatch.setattr(tracer, "trace", lambda *args: result)
    runner = traced(model, tmp_path, ops)
    with pytest.raises(ParityError, match=DIFFERS):
        measure(model, runner)


@pytest.mark.parametrize("ops", ["onnx", "gqa"])
def test_the_model_of_the_planted_faults_passes_without_one(ops, gemma, tmp_path, monkeypatch):
    model, graphs_ = gemma
    monkeypatch.setattr(tracer, "trace", lambda *args: graphs_[ops].clone())
    found = measure(model, traced(model, tmp_path, ops))
    assert found.invariant_lengths == (1, 2, 3, 5, 9, 18, 36, 64)


def test_a_fault_at_the_last_position_alone_is_found(tmp_path):
    model = model_of("gpt2")
    runner = traced(model, tmp_path)
    with torch.no_grad():
        model.transformer.wpe.weight[CONTEXT - 1, 0] += 0.01
    with pytest.raises(ParityError, match=f"position {CONTEXT - 1} "):
        measure(model, runner)


@pytest.mark.parametrize("ops", ["onnx", "gqa"])
@pytest.mark.parametrize("fault", [wrong_scale, position_off_by_one, stale_row])
def test_a_planted_fault_in_a_model_in_parts_is_found(
    fault, ops, gemma, tmp_path, in_parts, monkeypatch
):
    test_a_planted_fault_is_a_parity_error(fault, ops, gemma, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("ops", ["onnx", "gqa"])
@pytest.mark.parametrize("fault", [window_off_by_one, stale_row])
def test_a_planted_fault_is_found_where_like_layers_are_run_once(
    fault, ops, deep_gemma, tmp_path, in_parts, monkeypatch
):
    test_a_planted_fault_is_a_parity_error(fault, ops, deep_gemma, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("ops", ["onnx", "gqa"])
def test_a_fault_of_one_layer_among_like_ones_is_found(
    ops, deep_gemma, tmp_path, in_parts, monkeypatch
):
    model, graphs_ = deep_gemma
    result = graphs_[ops].clone()
    wrong_scale_of_one_layer(result.graph)
    monkeypatch.setattr(tracer, "trace", lambda *args: result)
    with pytest.raises(ParityError, match=r"logits|present"):
        measure(model, traced(model, tmp_path, ops))
