"""Formulas: limits, identities and invalid arguments."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specedge.theory.formulas import (
    acceptance_probability,
    acceptance_rates,
    alpha_from_tokens,
    best_k,
    break_even_alpha,
    expected_tokens,
    expected_tokens_limit,
    operations_factor,
    round_cost,
    speedup,
)

RATES = st.floats(0, 1)
LENGTHS = st.integers(1, 20)
COSTS = st.floats(0, 2)


@pytest.mark.parametrize(("alpha", "k", "tokens"), [(1, 7, 8), (0, 4, 1), (0.7, 0, 1)])
def test_expected_tokens_at_alpha_0_and_1(alpha, k, tokens):
    assert expected_tokens(alpha, k) == tokens


def test_expected_tokens_have_finite_limit_below_alpha_1():
    assert expected_tokens(0.8, 400) == pytest.approx(expected_tokens_limit(0.8), rel=1e-12)
    assert expected_tokens_limit(1) == math.inf


def test_a_draft_token_is_accepted_with_the_overlap_of_the_distributions():
    assert acceptance_probability((0.1, 0.6, 0.3), (0.5, 0.3, 0.2)) == pytest.approx(0.6)
    assert acceptance_probability((0.7, 0.2, 0.1, 0), np.full(4, 0.25)) == pytest.approx(0.55)


@given(RATES, LENGTHS)
def test_alpha_is_recovered_from_the_tokens_of_a_round(alpha, k):
    tokens = expected_tokens(alpha, k)
    assert alpha_from_tokens(tokens, k) == pytest.approx(alpha, abs=1e-9)


@pytest.mark.parametrize("tokens", [0.99, 5.01, math.nan])
def test_tokens_per_round_out_of_range_are_rejected(tokens):
    with pytest.raises(ValueError, match="tokens_per_round must be between 1 and 5"):
        alpha_from_tokens(tokens, 4)


def test_four_definitions_of_acceptance_rate():
    rates = acceptance_rates(0.8, 4)
    assert rates.alpha == 0.8
    assert rates.accepted_over_tested == pytest.approx(0.8, abs=1e-12)
    assert rates.accepted_over_drafted == pytest.approx(0.5904)
    assert rates.tokens_over_rows == pytest.approx(0.67232)


def test_k_zero_has_cost_and_speedup_one_for_any_costs():
    assert round_cost(0, 0.5, 1.7, 0.3) == 1
    assert speedup(0.9, 0, 0.5, 1.7, 0.3) == 1


def test_verifying_may_have_a_cost_for_each_k():
    costs = [1, 1.1, 1.2, 1.6]
    assert speedup(0.8, 2, 0.1, costs, 0.05) == speedup(0.8, 2, 0.1, 1.2, 0.05)
    assert best_k(0.8, 0.1, np.array(costs)) == best_k(0.8, 0.1, costs)
    assert break_even_alpha(2, 0.1, costs) == break_even_alpha(2, 0.1, 1.2)
    with pytest.raises(ValueError, match="verify_cost ends at K = 3, got K = 4"):
        round_cost(4, 0.1, costs)
    with pytest.raises(ValueError, match=r"begin with the cost at K = 0, which is 1, got 1\.1"):
        round_cost(1, 0.1, costs[1:])


@given(RATES, st.floats(0.001, 2))
def test_speedup_exists_iff_alpha_exceeds_draft_cost(alpha, cost):
    assert speedup(alpha, 1, cost) == pytest.approx((1 + alpha) / (1 + cost))
    k = best_k(alpha, cost)
    assert (k > 0) == (1 + alpha > 1 + cost)
    assert speedup(alpha, k, cost) >= 1


@given(RATES, st.floats(0.001, 2))
def test_speedup_increment_matches_increment_rule(alpha, cost):
    for k in range(12):
        gain = alpha ** (k + 1) * (1 + cost * k) - cost * expected_tokens(alpha, k)
        if abs(gain) > 1e-9:
            more = speedup(alpha, k + 1, cost) > speedup(alpha, k, cost)
            assert more == (gain > 0)


def test_the_best_k_has_a_limit():
    assert best_k(1, 0.01) == 64
    assert best_k(1, 0.01, max_draft_tokens=7) == 7
    assert best_k(0.9, 0.01, max_draft_tokens=0) == 0


def test_best_k_decreases_with_growing_verify_cost():
    assert best_k(0.8, 0.05) == 8
    assert best_k(0.8, 0.05, [1 + 0.1 * k for k in range(17)]) == best_k(0.8, 0.15) == 5
    assert best_k(0.8, 0.05, [1, 2.2, 3.4, 4.6]) == 0
    assert best_k(0.8, 0.05, host_cost=4) == 0
    assert best_k(1, 0.05, [1, 1, 1, 1, 1]) == 4  # no further than the costs are known


def test_best_k_can_skip_a_cost_step():
    assert best_k(0.9, 0.05, [1, 1.9, 1.9, 1.9, 1.9]) == 4


@given(st.integers(1, 8), COSTS, st.floats(0.5, 3), COSTS)
def test_speedup_is_one_at_break_even_alpha(k, draft, verify, host):
    alpha = break_even_alpha(k, draft, verify, host)
    if alpha is None:
        assert speedup(1, k, draft, verify, host) < 1
    elif alpha == 0:
        assert speedup(0, k, draft, verify, host) >= 1 - 1e-12
    else:
        assert speedup(alpha, k, draft, verify, host) == pytest.approx(1)


@pytest.mark.parametrize("k", [1, 4, 9])
def test_operations_factor_at_alpha_0_is_k_plus_one(k):
    # A form in which the exponent of alpha^(K + 1) is lost gives half of it.
    assert operations_factor(0, k) == k + 1
    assert operations_factor(1, k) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: expected_tokens(1.1, 4), "alpha must be between 0 and 1, got 1.1"),
        (lambda: expected_tokens(math.nan, 4), "alpha must be between 0 and 1, got nan"),
        (lambda: expected_tokens(0.5, -1), "num_draft_tokens must be at least 0, got -1"),
        (lambda: expected_tokens(0.5, 1.5), "num_draft_tokens must be an integer"),
        (lambda: expected_tokens_limit(-0.1), "alpha"),
        (lambda: acceptance_rates(0.5, 0), "num_draft_tokens must be at least 1"),
        (lambda: break_even_alpha(0, 0.1), "num_draft_tokens must be at least 1"),
        (lambda: speedup(0.5, 4, -0.1), "draft_cost must be at least 0 and finite, got -0.1"),
        (lambda: speedup(0.5, 4, math.inf), "draft_cost"),
        (lambda: speedup(0.5, 4, 0.1, 0), "verify_cost must be above 0 and finite, got 0"),
        (lambda: speedup(0.5, 1, 0.1, [1, math.nan]), "verify_cost must be above 0"),
        (lambda: speedup(0.5, 1, 0.1, []), "verify_cost is empty"),
        (lambda: speedup(0.5, 4, 0.1, 1, -1), "host_cost must be at least 0"),
        (lambda: operations_factor(0.5, 4, -1), "draft_operations must be at least 0"),
        (lambda: best_k(0.5, 0.1, max_draft_tokens=-1), "max_draft_tokens must be at least 0"),
    ],
)
def test_invalid_argument_error_names_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()
