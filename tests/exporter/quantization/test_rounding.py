"""Integers for weights, and what they cost."""

import numpy as np
import pytest
import torch

from specedge.exporter.quantization import rounding


@pytest.fixture
def random():
    return np.random.default_rng(0)


@pytest.mark.parametrize("shape", [(64, 48), (3, 64, 48)])
def test_a_weight_is_off_by_half_a_step_of_its_column_at_most(random, shape):
    weights = torch.from_numpy(random.standard_normal(shape, np.float32))
    found = rounding.quantize_columns(weights)
    assert found.values.dtype == np.int8
    assert found.scales.shape == (*shape[:-2], 1, shape[-1])
    off = np.abs(found.values * found.scales - weights.numpy())
    assert (off <= 0.501 * found.scales).all()
    assert (np.abs(found.values).max(-2) == 127).all()


def test_a_matrix_that_is_rounded_in_strips_is_the_same_as_in_one(random, monkeypatch):
    weights = torch.from_numpy(random.standard_normal((40, 100), np.float32))
    whole = rounding.quantize_columns(weights)
    monkeypatch.setattr(rounding, "_STRIP_SIZE", 7 * 40)
    parts = rounding.quantize_columns(weights)
    assert np.array_equal(whole.values, parts.values)
    assert np.array_equal(whole.scales, parts.scales)


def test_a_column_of_zeros_stays_zeros():
    found = rounding.quantize_columns(torch.zeros(8, 4))
    assert not found.values.any()
    assert np.isfinite(found.scales).all()


def test_powers_of_two_that_a_channel_gives_to_its_weights_change_no_product(random):
    """Channels of equal magnitude, so that rounding does not differ."""
    weights = torch.from_numpy(random.standard_normal((32, 16), np.float32))
    powers = random.integers(-3, 4, 32).astype(np.float64)
    moved = rounding.quantize_columns(
        weights * torch.from_numpy(np.exp2(-powers))[:, None].float(), powers
    )
    plain = rounding.quantize_columns(weights)
    assert np.array_equal(moved.values, plain.values)
    assert np.array_equal(moved.scales, plain.scales)


def test_the_error_is_that_of_the_integer_product(random):
    weights = torch.from_numpy(random.standard_normal((64, 48), np.float32))
    x = random.standard_normal((20, 64), np.float32)
    integers = rounding.quantize_columns(weights)
    scale = np.abs(x).max(1, keepdims=True) / 127
    found = np.rint(x / scale).astype(np.int32) @ integers.values.astype(np.int32)
    found = found * scale * integers.scales
    wanted = x @ weights.numpy()
    off = np.sqrt(((found - wanted) ** 2).sum() / (wanted**2).sum())
    assert rounding.product_error(weights, x) == pytest.approx(off, rel=1e-3)
    assert 0.003 < off < 0.02


def test_a_channel_that_dwarfs_the_others_costs_less_with_parts_and_nothing_if_moved(random):
    weights = torch.from_numpy(random.standard_normal((64, 48), np.float32))
    x = random.standard_normal((20, 64), np.float32)
    usual = rounding.product_error(weights, x)
    x[:, 5] *= 512
    weights[5] /= 512
    powers = np.zeros(64)
    powers[5] = 9
    assert rounding.product_error(weights, x) > 0.5
    assert rounding.product_error(weights, x, None, 8) < 0.6 * rounding.product_error(weights, x)
    assert rounding.product_error(weights, x, powers) == pytest.approx(usual, rel=1e-3)
