"""GPTQ: quantization with error compensation."""

import numpy as np
import pytest
import torch

from specedge.exporter.quantization import gptq, rounding


@pytest.fixture
def problem():
    """A matrix [K, N], correlated inputs [n, K], and the Hessian [K, K]."""
    torch.manual_seed(0)
    size, width = 96, 40
    mixing = torch.randn(size, size) * torch.logspace(0, -2, size)
    x = torch.randn(400, size) @ mixing
    return torch.randn(size, width), x, x.T @ x


def off(x, weights, rounded):
    return float((x @ rounded - x @ weights).norm() / (x @ weights).norm())


def test_per_channel_gptq_has_lower_error_than_rounding(problem):
    weights, x, hessian = problem
    found, nearest = (
        gptq.quantize_columns(weights.clone(), gptq.inverse_factor(hessian)),
        rounding.quantize_columns(weights),
    )
    assert found.values.dtype == np.int8
    np.testing.assert_allclose(found.scales, nearest.scales, rtol=1e-6)
    ours, plain = (off(x, weights, torch.from_numpy(i.values * i.scales)) for i in (found, nearest))
    assert ours < 0.6 * plain


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [96, 80])
def test_block_wise_gptq_has_lower_error_than_rounding(problem, bits, size):
    weights, x, hessian = problem
    weights, x, hessian = weights[:size], x[:, :size], hessian[:size, :size]
    nearest = rounding.quantize_blocks(weights, bits, x.square().mean(0).numpy())
    found = gptq.quantize_blocks(weights, gptq.inverse_factor(hessian), bits)
    assert found.values.shape == nearest.values.shape
    assert found.values.dtype == nearest.values.dtype
    ours, plain = (off(x, weights, rounding.dequantize(b, bits)[:size]) for b in (found, nearest))
    assert ours < 0.8 * plain


def test_exactly_representable_weights_are_unchanged(problem):
    _, _, hessian = problem
    integers = torch.randint(-127, 128, (96, 40)).float()
    integers[0] = 127
    found = gptq.quantize_columns(integers * 0.5, gptq.inverse_factor(hessian))
    assert np.array_equal(found.values, integers.numpy())


def test_zero_inputs_fall_back_to_rounding(problem):
    weights, _, hessian = problem
    hessian[3] = hessian[:, 3] = 0
    assert np.isfinite(
        gptq.quantize_columns(weights.clone(), gptq.inverse_factor(hessian)).scales
    ).all()
    zero = gptq.quantize_columns(weights.clone(), gptq.inverse_factor(torch.zeros(96, 96)))
    assert np.array_equal(zero.values, rounding.quantize_columns(weights).values)


def test_only_the_upper_triangle_of_the_hessian_is_read(problem):
    _, _, hessian = problem
    triangle = hessian.triu()
    assert torch.equal(gptq.inverse_factor(triangle), gptq.inverse_factor(hessian))
