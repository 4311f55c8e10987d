"""Costs of many kinds of passes together: what holds of the fit to noisy measurements."""

import numpy as np
import pytest

from specedge.runtime.bench.fitting import fitted

FACTORS = np.array([1.0, 1.1, 1.15, 1.3, 1.6, 2.3])


def costs(modes=2, lengths=3, slope=0.03):
    """[M, L, R] seconds that rise with length, and by rows a little more with length."""
    levels = np.array([[1.0, 1.3, 1.9], [1.05, 1.4, 2.0]])[:modes, :lengths, None]
    return levels * FACTORS ** (1 + slope * np.arange(lengths)[:, None])


@pytest.mark.parametrize(("modes", "lengths"), [(2, 3), (2, 1), (1, 2)])
def test_costs_without_noise_stay_as_they_are(modes, lengths):
    exact = costs(modes, lengths)
    assert np.allclose(fitted(exact), exact)


def test_noise_is_less_than_in_any_one_measurement():
    exact, rng = costs(), np.random.default_rng(0)
    before, after = [], []
    for _ in range(200):
        noisy = exact * np.exp(0.05 * rng.standard_normal(exact.shape))
        ratios = [
            x[..., 1:] / x[..., :1] / (exact[..., 1:] / exact[..., :1])
            for x in (noisy, fitted(noisy))
        ]
        before.append(np.log(ratios[0]).std())
        after.append(np.log(ratios[1]).std())
    assert np.mean(after) < 0.6 * np.mean(before)


def test_more_rows_never_cost_less_and_neither_neighbour_is_believed_alone():
    noisy = costs(slope=0.0)
    noisy[:, :, 1:3] = noisy[:, :, :1] * [1.2, 1.1]
    found = fitted(noisy)
    assert (np.diff(found, axis=2) >= 0).all()
    assert np.allclose(found[:, :, 1] / found[:, :, 0], np.sqrt(1.2 * 1.1))


@pytest.mark.parametrize("lengths", [1, 2, 3])
def test_rows_that_were_timed_at_the_middle_alone_follow_their_neighbours(lengths):
    exact = costs(lengths=lengths, slope=0.0)
    partly = exact.copy()
    for row in (1, 2, 4):
        partly[:, [at for at in range(lengths) if at != lengths // 2], row] = np.nan
        partly[1, :, row] = np.nan
    assert np.allclose(fitted(partly), exact)
