"""Distributions of logits, and samples from them."""

import numpy as np
import pytest

from fakes import logits_of
from specedge.runtime.sampling.distribution import Distribution
from specedge.runtime.sampling.history import History
from specedge.runtime.sampling.probabilities import probabilities
from specedge.sampling_options import Sampling

NOTHING = History([0])


def distribution(logits, sampling):
    """The whole row of probabilities."""
    return probabilities(logits, sampling, NOTHING).row(len(logits))


def test_temperature_divides_the_logits():
    logits = np.array([0.0, 1.0, 2.0])
    expected = np.exp(logits / 0.5) / np.exp(logits / 0.5).sum()
    np.testing.assert_allclose(distribution(logits, Sampling(0.5)), expected, rtol=1e-12)


def test_tiny_temperature_is_one_hot_without_nan():
    for temperature in (1e-30, 1e-44, 1e-300):
        probs = distribution(np.array([1.0, 5.0, 3.0], np.float32), Sampling(temperature))
        assert probs.tolist() == [0, 1, 0]


def test_top_k_keeps_every_tie_with_the_kth():
    probs = distribution(logits_of(0.1, 0.4, 0.25, 0.25), Sampling(1.0, top_k=2))
    np.testing.assert_allclose(probs, np.array([0, 0.4, 0.25, 0.25]) / 0.9)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.4, [1]), (0.41, [1, 2]), (0.7, [1, 2]), (0.71, [0, 1, 2]), (0.99, None)]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, kept):
    whole = np.array([0.2, 0.4, 0.3, 0.1])
    probs = distribution(logits_of(*whole), Sampling(1.0, top_p=top_p))
    assert np.flatnonzero(probs).tolist() == ([0, 1, 2, 3] if kept is None else kept)
    np.testing.assert_allclose(probs[probs > 0], (whole / whole[probs > 0].sum())[probs > 0])


def test_min_p_is_relative_to_maximum_probability():
    probs = distribution(logits_of(0.5, 0.3, 0.15, 0.05), Sampling(1.0, min_p=0.4))
    np.testing.assert_allclose(probs, [0.625, 0.375, 0, 0])


def by_sorting(logits, sampling):
    """The rules spelled out over whole rows."""
    scaled = (logits - logits.max()) / logits.dtype.type(sampling.temperature)
    if 0 < sampling.top_k < len(logits):
        scaled[logits < np.sort(logits)[-sampling.top_k]] = -np.inf
    probs = np.exp(scaled) / np.exp(scaled).sum()
    order = np.argsort(-probs, kind="stable")
    if sampling.top_p < 1:
        probs[order[np.cumsum(probs[order], dtype=float) - probs[order] >= sampling.top_p]] = 0
    probs /= probs.sum()
    probs[probs < sampling.min_p * probs.max()] = 0
    return probs / probs.sum()


@pytest.mark.parametrize("size", [3, 64, 65, 6463])
@pytest.mark.parametrize("kind", ["random", "ties", "infinities"])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.8, top_k=50),
        Sampling(0.7, top_k=99, top_p=0.9),
        Sampling(1.3, top_k=2000, min_p=0.01),
        Sampling(1.0, top_p=0.95),
        Sampling(1.0, top_k=1),
    ],
)
def test_block_wise_search_equals_full_search(size, kind, sampling):
    random = np.random.default_rng(size)
    logits = random.normal(0, 3, size).astype(np.float32)
    if kind == "ties":
        logits = np.round(logits)
    if kind == "infinities":
        logits[random.permutation(size)[: size - 2]] = -np.inf
    found, expected = distribution(logits, sampling), by_sorting(logits, sampling)
    assert np.array_equal(np.flatnonzero(found), np.flatnonzero(expected))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    cdf = np.cumsum(found, dtype=np.float64)
    for uniform in random.random(50):
        assert Distribution(found).pick(uniform) == np.searchsorted(
            cdf, uniform * cdf[-1], side="right"
        )


def test_a_filtered_row_samples_kept_tokens_only():
    filtered = probabilities(logits_of(0.1, 0.4, 0.2, 0.3), Sampling(1.0, top_k=2), NOTHING)
    assert len(filtered.probs) == 2
    assert [filtered.of(token) for token in range(4)] == filtered.row(4).tolist()
    assert filtered.of(1) == pytest.approx(4 / 7)
    assert [filtered.pick(u) for u in (0.0, 0.57, 0.58, 0.99)] == [1, 1, 3, 3]


@pytest.mark.parametrize("place", [0, 63, 64, 200])
def test_pick_finds_the_only_token_in_any_block(place):
    weights = np.zeros(201)
    weights[place] = 0.3
    assert {Distribution(weights).pick(u) for u in (0.0, 0.5, float(np.nextafter(1, 0)))} == {place}


def test_pick_never_draws_a_token_without_weight():
    weights = np.array([0, 0.25, 0, 0.75, 0])
    drawn = {Distribution(weights).pick(u) for u in (0.0, 0.2499, 0.25, 0.5, np.nextafter(1, 0))}
    assert drawn == {1, 3}


def test_pick_survives_a_product_that_rounds_up_to_the_total():
    weights = np.array([1e-320, 1e-320, 0])  # subnormal: times the largest uniform is the total
    assert Distribution(weights).pick(float(np.nextafter(1, 0))) == 1
