"""Formulas: limits, identities and invalid arguments."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specedge.theory.formulas import (
    acceptance_probability,
    alpha_from_tokens,
    expected_tokens,
    round_cost,
    speedup,
)

RATES = st.floats(0, 1)
LENGTHS = st.integers(1, 20)


@pytest.mark.parametrize(("alpha", "k", "tokens"), [(1, 7, 8), (0, 4, 1), (0.7, 0, 1)])
def test_expected_tokens_at_alpha_0_and_1(alpha, k, tokens):
    assert expected_tokens(alpha, k) == tokens


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


def test_k_zero_has_cost_and_speedup_one_for_any_costs():
    assert round_cost(0, 0.5, 1.7, 0.3) == 1
    assert speedup(0.9, 0, 0.5, 1.7, 0.3) == 1


@given(RATES, st.floats(0.001, 2))
def test_one_draft_token_gains_iff_alpha_exceeds_draft_cost(alpha, cost):
    assert speedup(alpha, 1, cost) == pytest.approx((1 + alpha) / (1 + cost))


@given(RATES, st.floats(0.001, 2))
def test_speedup_increment_matches_increment_rule(alpha, cost):
    for k in range(12):
        gain = alpha ** (k + 1) * (1 + cost * k) - cost * expected_tokens(alpha, k)
        if abs(gain) > 1e-9:
            more = speedup(alpha, k + 1, cost) > speedup(alpha, k, cost)
            assert more == (gain > 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: expected_tokens(1.1, 4), "alpha must be between 0 and 1, got 1.1"),
        (lambda: expected_tokens(math.nan, 4), "alpha must be between 0 and 1, got nan"),
        (lambda: expected_tokens(0.5, -1), "num_draft_tokens must be at least 0, got -1"),
        (lambda: expected_tokens(0.5, 1.5), "num_draft_tokens must be an integer"),
        (lambda: speedup(0.5, 4, -0.1), "draft_cost must be at least 0 and finite, got -0.1"),
        (lambda: speedup(0.5, 4, math.inf), "draft_cost"),
        (lambda: speedup(0.5, 4, 0.1, 0), "verify_cost must be above 0, got 0"),
        (lambda: speedup(0.5, 4, 0.1, 1, -1), "host_cost must be at least 0"),
    ],
)
def test_invalid_argument_error_names_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()
