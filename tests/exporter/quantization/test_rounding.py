"""Weight quantization and its error."""

import numpy as np
import pytest
import torch

from specedge.exporter.quantization import rounding


@pytest.fixture
def random():
    return np.random.default_rng(0)


@pytest.mark.parametrize("shape", [(64, 48), (3, 64, 48)])
def test_quantization_error_is_at_most_half_a_step(random, shape):
    weights = torch.from_numpy(random.standard_normal(shape, np.float32))
    found = rounding.quantize_columns(weights)
    assert found.values.dtype == np.int8
    assert found.scales.shape == (*shape[:-2], 1, shape[-1])
    off = np.abs(found.values * found.scales - weights.numpy())
    assert (off <= 0.501 * found.scales).all()
    assert (np.abs(found.values).max(-2) == 127).all()


def test_strip_wise_quantization_equals_whole_matrix(random, monkeypatch):
    weights = torch.from_numpy(random.standard_normal((40, 100), np.float32))
    whole = rounding.quantize_columns(weights)
    monkeypatch.setattr(rounding, "_STRIP_SIZE", 7 * 40)
    parts = rounding.quantize_columns(weights)
    assert np.array_equal(whole.values, parts.values)
    assert np.array_equal(whole.scales, parts.scales)


def test_zero_column_quantizes_to_zeros():
    found = rounding.quantize_columns(torch.zeros(8, 4))
    assert not found.values.any()
    assert np.isfinite(found.scales).all()


def test_estimated_error_equals_integer_product_error(random):
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


def test_outlier_channel_error_is_reduced_by_parts(random):
    weights = torch.from_numpy(random.standard_normal((64, 48), np.float32))
    x = random.standard_normal((20, 64), np.float32)
    x[:, 5] *= 512
    weights[5] /= 512
    assert rounding.product_error(weights, x) > 0.5
    assert rounding.product_error(weights, x, 8) < 0.6 * rounding.product_error(weights, x)
