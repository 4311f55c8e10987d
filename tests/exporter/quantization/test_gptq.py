"""Rounding that makes up for its own errors."""

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


def test_columns_cost_a_product_less_than_the_nearest_integers(problem):
    weights, x, hessian = problem
    found, nearest = (
        gptq.quantize_columns(weights, gptq.inverse_factor(hessian)),
        rounding.quantize_columns(weights),
    )
    assert found.values.dtype == np.int8
    np.testing.assert_allclose(found.scales, nearest.scales, rtol=1e-6)
    ours, plain = (off(x, weights, torch.from_numpy(i.values * i.scales)) for i in (found, nearest))
    assert ours < 0.6 * plain


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [96, 80])
def test_blocks_cost_a_product_less_than_the_nearest_integers(problem, bits, size):
    weights, x, hessian = problem
    weights, x, hessian = weights[:size], x[:, :size], hessian[:size, :size]
    nearest = rounding.quantize_blocks(weights, bits, x.square().mean(0).numpy())
    found = gptq.quantize_blocks(weights, gptq.inverse_factor(hessian), bits)
    assert found.values.shape == nearest.values.shape
    assert found.values.dtype == nearest.values.dtype
    ours, plain = (off(x, weights, rounding.dequantize(b, bits)[:size]) for b in (found, nearest))
    assert ours < 0.8 * plain


def test_what_integers_hold_exactly_is_left_as_it_is(problem):
    _, _, hessian = problem
    integers = torch.randint(-127, 128, (96, 40)).float()
    integers[0] = 127
    found = gptq.quantize_columns(integers * 0.5, gptq.inverse_factor(hessian))
    assert np.array_equal(found.values, integers.numpy())


def test_powers_are_moved_into_the_weights_first(problem):
    weights, x, hessian = problem
    powers = np.where(np.arange(96) % 7 == 0, 3.0, 0.0)
    factors = torch.from_numpy(np.exp2(powers)).float()
    found = gptq.quantize_columns(weights, gptq.inverse_factor(hessian, powers), powers)
    nearest = rounding.quantize_columns(weights, powers)
    ours, plain = (
        off(x / factors, weights * factors[:, None], torch.from_numpy(i.values * i.scales))
        for i in (found, nearest)
    )
    assert ours < 0.8 * plain


def test_inputs_that_are_always_zero_are_no_trouble(problem):
    weights, _, hessian = problem
    hessian[3] = hessian[:, 3] = 0
    assert np.isfinite(gptq.quantize_columns(weights, gptq.inverse_factor(hessian)).scales).all()
    zero = gptq.quantize_columns(weights, gptq.inverse_factor(torch.zeros(96, 96)))
    assert np.array_equal(zero.values, rounding.quantize_columns(weights).values)
