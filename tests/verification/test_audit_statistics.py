"""The audit's tests of distributions: what they pass, what they catch, and that the stated power is
true.
"""

import numpy as np
import pytest

special = pytest.importorskip("scipy.special", reason="the audit needs SciPy")

from specedge.verification import statistics  # noqa: E402
from specedge.verification.statistics import (  # noqa: E402
    chi_square_test,
    frequency_test,
    pool_cells,
    uniform_place,
)

ALPHA = 1e-4
NUM_SAMPLES = 4000
DISTRIBUTIONS = {
    "even": np.full(16, 1 / 16),
    "falling": np.arange(1, 17)[::-1] / np.arange(1, 17).sum(),
    "peaked": np.array([0.7, *[0.02] * 15]),
}


def off_by(distribution, total_variation, shape):
    """A distribution at a total variation from another: by proportion, or in two cells."""
    sign = np.zeros(len(distribution))
    if shape == "everywhere":  # half of the mass up, half down: the least chi-square for it
        up = distribution.cumsum() <= 0.5
        up[0] = True
        sign[up] = distribution[up] / distribution[up].sum()
        sign[~up] = -distribution[~up] / distribution[~up].sum()
    else:
        sign[0], sign[int(distribution[1:].argmax()) + 1] = -1, 1
    return distribution + total_variation * sign


@pytest.mark.parametrize("distribution", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_proportional_counts_have_zero_chi_square(distribution):
    found = chi_square_test(NUM_SAMPLES * distribution, distribution, ALPHA)
    assert found.chi_square == pytest.approx(0)
    assert found.p_value == pytest.approx(1)
    assert found.deviation == pytest.approx(0)


@pytest.mark.parametrize("shape", ["everywhere", "two cells"])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_the_stated_deviation_is_detectable_with_the_stated_power(distribution, shape):
    """The noncentrality of any distribution so far away; so its mean statistic is above the
    critical one.
    """
    stated = chi_square_test(NUM_SAMPLES * distribution, distribution, ALPHA).would_catch
    wrong = off_by(distribution, stated, shape)
    assert 0.5 * np.abs(wrong - distribution).sum() == pytest.approx(stated)
    found = chi_square_test(NUM_SAMPLES * wrong, distribution, ALPHA)
    critical = special.chdtri(15, ALPHA)
    needed = 4 * stated**2 * NUM_SAMPLES
    assert special.chndtr(critical, 15, needed) == pytest.approx(1 - statistics.POWER)
    assert found.chi_square >= needed * (1 - 1e-9) > critical
    assert found.p_value < ALPHA


@pytest.mark.parametrize(
    "distribution", [DISTRIBUTIONS["even"], DISTRIBUTIONS["falling"]], ids=["even", "falling"]
)
def test_the_power_matches_simulation(distribution):
    random = np.random.default_rng(0)
    stated = chi_square_test(NUM_SAMPLES * distribution, distribution, ALPHA).would_catch

    def caught(deviation):
        draws = random.multinomial(NUM_SAMPLES, off_by(distribution, deviation, "everywhere"), 500)
        return np.mean(
            [chi_square_test(counts, distribution, ALPHA).p_value < ALPHA for counts in draws]
        )

    assert caught(stated) >= 0.98
    assert caught(stated / 2) <= 0.5
    assert caught(0) <= 0.003


def test_false_positive_rate_matches_alpha():
    random = np.random.default_rng(1)
    distribution = DISTRIBUTIONS["peaked"]
    draws = random.multinomial(NUM_SAMPLES, distribution, 2000)
    share = np.mean(
        [chi_square_test(counts, distribution, 0.01).p_value < 0.01 for counts in draws]
    )
    assert 0.005 < share < 0.017


def test_deviation_bound_has_stated_coverage():
    random = np.random.default_rng(2)
    distribution, wrong = (
        DISTRIBUTIONS["falling"],
        off_by(DISTRIBUTIONS["falling"], 0.05, "everywhere"),
    )
    draws = random.multinomial(1000, wrong, 1000)
    assert (
        np.mean([chi_square_test(counts, distribution, ALPHA).bound >= 0.05 for counts in draws])
        >= 0.99
    )
    assert chi_square_test(1e6 * wrong, distribution, ALPHA).bound < 0.06


def test_pooled_cells_reach_minimum_expected_count():
    expected = np.array([300.0, 1, 2, 40, 0, 19, 7, 25])
    groups = pool_cells(expected)
    assert sorted(cell for group in groups for cell in group) == list(range(8))
    assert all(expected[group].sum() >= statistics.LEAST_EXPECTED for group in groups)
    assert [0] in groups
    assert pool_cells(np.array([1.0, 2.0])) == [[0, 1]]


def test_tests_without_data_detect_nothing():
    assert chi_square_test([0, 0], [0.5, 0.5], ALPHA).would_catch == 1
    assert chi_square_test([5, 5], [0.5, 0.5], ALPHA).would_catch == 1  # both are pool_cells
    assert frequency_test([], [], ALPHA).would_catch == 1


def test_uniform_places_partition_unit_interval_in_descending_key_order():
    distribution = np.array([0.125, 0.5, 0.125, 0.25])
    for key in (distribution, np.array([3.0, 1.0, 3.0, 2.0]), np.zeros(4)):
        spans = sorted(
            (uniform_place(distribution, key, x, 0.0), uniform_place(distribution, key, x, 1.0), x)
            for x in range(4)
        )
        assert [start for start, _, _ in spans] == pytest.approx(
            [0, *[end for _, end, _ in spans[:-1]]]
        )
        assert spans[-1][1] == pytest.approx(1)
        keys = [key[x] for _, _, x in spans]
        assert keys == sorted(keys, reverse=True)


def test_uniform_place_is_below_1():
    distribution = np.array([0.9, 0.1], np.float32)
    assert uniform_place(distribution, distribution, 1, 1 - 2**-53) < 1


def test_frequency_test_uses_variance_of_individual_events():
    probs = [0.5] * 100 + [0.9] * 100  # variance 25 + 9
    found = frequency_test([True] * 140 + [False] * 60, probs, ALPHA)
    assert found.expected == pytest.approx(0.7)
    assert found.p_value == pytest.approx(1)
    far = frequency_test([True] * 170 + [False] * 30, probs, ALPHA)
    u = 30 / 34
    assert far.p_value == pytest.approx(2 * np.exp(-34 * ((1 + u) * np.log1p(u) - u)))
    off = (far.would_catch * 200 - special.ndtri(0.99) * 34**0.5) / 34
    assert 2 * np.exp(-34 * ((1 + off) * np.log1p(off) - off)) == pytest.approx(ALPHA, rel=0.1)


def test_single_failure_of_nearly_certain_event_is_tolerated():
    """Its chance is 1%; a normal distribution would call it 1e-22."""
    assert frequency_test([True] * 999 + [False], [1 - 1e-5] * 1000, ALPHA).p_value > 0.01


def test_float32_sums_above_1_are_certain():
    assert frequency_test([True] * 10, [1.00000003] * 10, ALPHA).p_value == 1


def test_a_missed_certain_event_fails():
    assert frequency_test([True] * 9 + [False], [1.0] * 10, ALPHA).p_value == 0
    assert frequency_test([True] * 10, [1.0] * 10, ALPHA).p_value == 1
