"""Error bounds per row, relative to the float32 error of the row."""

import weakref
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from comparing import computed, measure, model_of, traced
from specedge.errors import ParityError
from specedge.exporter.checkpoint.placeholders import WeightSources
from specedge.exporter.tracing import geometry
from specedge.exporter.verification import reference
from specedge.exporter.verification.row_errors import ErrorCheck, float32_error_bounds

ROWS = np.random.default_rng(0).standard_normal((2, 5, 8))  # [H, n, D]
FLOAT32 = np.full((2, 5), 1e-6)


def judged(found, wanted=ROWS, float32=FLOAT32, **options):
    judge = ErrorCheck("target", "the exact result", **options)
    judge.compare("cache", "present.0.key", found, wanted, float32, start=100)
    return judge


def moved(amount, place=(1, 3, 4), wanted=ROWS):
    found = wanted.copy()
    found[place] += amount * np.abs(wanted[place[:2]]).max()
    return found


def test_multiple_of_float32_error_is_accepted_and_recorded():
    judge = judged(moved(5e-6))
    assert judge.ratio == pytest.approx(5)
    assert judge.row == pytest.approx(5e-6)


def test_larger_error_is_rejected_with_head_and_position():
    message = (
        r"^target: present\.0\.key head 1 at position 103 differs from the exact result by 1.7e-05 "
        r"of the row's largest value, allowed are 16 times float32's own 1.0e-06$"
    )
    with pytest.raises(ParityError, match=message):
        judged(moved(1.7e-5))


def test_outlier_channel_does_not_mask_errors_in_other_rows():
    massive = ROWS.copy()
    massive[0, 0, 0] = 1e4
    with pytest.raises(ParityError, match="head 1 at position 103"):
        judged(moved(1e-4, wanted=massive), massive)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_values_are_refused(value):
    with pytest.raises(ParityError, match="head 1 at position 103"):
        judged(moved(value))


def test_tolerance_is_relative_to_largest_value():
    judged(moved(1e-3), tolerance=2e-3)
    with pytest.raises(ParityError, match=r"of the largest value, --tolerance is 0\.0001$"):
        judged(moved(1e-3), tolerance=1e-4)


def test_zero_row_must_stay_zero():
    zeros = ROWS.copy()
    zeros[1, 3] = 0
    judged(zeros.copy(), zeros)
    found = zeros.copy()
    found[1, 3, 4] = 1e-9
    with pytest.raises(ParityError, match="head 1 at position 103"):
        judged(found, zeros)


def test_lucky_float32_rows_are_bounded_by_the_median():
    error = np.array([0.0, 1e-6, 1e-6])
    exact = np.ones((3, 4))
    assert float32_error_bounds(error, exact) == pytest.approx(np.full(3, 1e-6), rel=0.2)


def test_model_not_computable_in_float32_is_rejected():
    model = model_of()
    model.lm_head.weight.data[:, 0] = 1e7  # which all logits have in common
    shape = geometry.measure_geometry(model, 96, 4)
    with pytest.raises(ParityError, match="is not accurate in float32"):
        reference.compute_references("target", model, WeightSources(), shape, 512)


def test_reference_holds_the_history_of_one_layer_at_a_time():
    model, alive, most = model_of(layers=6), Counter(), 0
    shape = geometry.measure_geometry(model, 512, 4)

    def history(i):
        nonlocal most
        heads, size = shape.cache_shapes()[i][1::2]
        rows = np.zeros((heads, 500, size), np.float32)
        alive["arrays"] += 1
        weakref.finalize(rows, alive.subtract, ["arrays"])
        most = max(most, alive["arrays"])
        return rows

    choices = reference.RoutingRecorder()
    with torch.no_grad():
        reference._run_passes(
            model, np.arange(4), 500, history, shape, choices, lambda logits: None
        )
    assert most <= 2


def changed(model, value, layer=None):
    with torch.no_grad():
        (model.lm_head if layer is None else model.model.layers[layer].mlp.down_proj).weight[:] = (
            value
        )
    return model


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (changed(model_of(layers=2), float("nan"), 1), "its logits are NaN or infinite"),
        (changed(model_of(layers=1), 0.0), "its logits are the same for all tokens"),
    ],
)
def test_model_with_degenerate_logits_is_refused(model, said):
    shape = geometry.measure_geometry(model, 96, 4)
    with pytest.raises(ParityError, match=said):
        reference.compute_references("target", model, WeightSources(), shape, 512)


def test_tolerance_is_recorded_and_does_not_accept_another_model(tmp_path):
    model = model_of()
    runner = traced(model, tmp_path)
    found = measure(model, runner, tolerance=0.01)
    assert found.tolerance == found.bound == 0.01
    model.model.norm.weight.data *= 1.001
    references = computed(model, runner)
    for tolerance in (None, 0.01):
        with pytest.raises(ParityError, match="both in float64"):
            measure(model, runner, tolerance, references)


def test_large_vocabulary_has_shorter_passes_and_stretches():
    small, large = (geometry.measure_geometry(model_of(layers=1), 96, 4) for _ in range(2))
    large = replace(large, context_length=1024, padded_vocab_size=262144)
    small = replace(small, context_length=1024)
    assert [reference.chunk_length(shape) for shape in (small, large)] == [256, 64]
    assert reference.compared_positions(small, 10_000) == [(0, 1024)]
    assert reference.compared_positions(large, 10_000) == [(0, 32), (1012, 1024)]
