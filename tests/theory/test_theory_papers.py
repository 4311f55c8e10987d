"""Every figure of the papers and posts that follows from a formula, and those that do not."""

import pytest

import papers
from specedge.theory.formulas import (
    alpha_from_tokens,
    best_k,
    break_even_alpha,
    expected_tokens,
    expected_tokens_limit,
    operations_factor,
    run_speedup,
    speedup,
)


@pytest.mark.parametrize("alpha", papers.ALPHAS)
def test_expected_tokens_are_leviathans_equation_1(alpha):
    found = [expected_tokens(alpha, k) for k in papers.EXPECTED_TOKENS_K]
    assert [*found, expected_tokens_limit(alpha)] == pytest.approx(
        papers.EXPECTED_TOKENS[alpha], abs=5.1e-7
    )


@pytest.mark.parametrize("alpha", papers.ALPHAS)
def test_best_k_equals_integer_search(alpha):
    found = [best_k(alpha, cost) for cost in papers.COSTS]
    assert tuple(found) == papers.BEST_K[alpha]
    factors = [speedup(alpha, k, cost) for k, cost in zip(found, papers.COSTS, strict=True)]
    assert factors[:4] == pytest.approx(papers.BEST_SPEEDUP[alpha][:4], abs=5.1e-7)
    assert factors[4:] == pytest.approx(papers.BEST_SPEEDUP[alpha][4:], abs=5.1e-5)


@pytest.mark.parametrize("alpha", papers.ALPHAS)
def test_speedups_at_four_draft_tokens_are_theorem_3_8(alpha):
    found = [speedup(alpha, 4, cost) for cost in papers.COSTS[:4]]
    assert found == pytest.approx(papers.SPEEDUP_AT_4[alpha], abs=5.1e-7)


@pytest.mark.parametrize("row", papers.OPERATIONS)
def test_speed_and_operations_are_leviathans_table_1(row):
    found = operations_factor(row.alpha, row.k), speedup(row.alpha, row.k, 0)
    assert found == pytest.approx((row.operations, row.speedup), abs=5.1e-7)
    assert tuple(round(value, 2) for value in found) == row.printed


@pytest.mark.parametrize("row", [row for row in papers.OPERATIONS if row.at_1_5_and_10_percent])
def test_operations_of_a_draft_count_too(row):
    found = [operations_factor(row.alpha, row.k, cost) for cost in (0.01, 0.05, 0.1)]
    assert found == pytest.approx(row.at_1_5_and_10_percent, abs=5.1e-7)


@pytest.mark.parametrize("row", papers.T5)
def test_predictions_for_t5_are_those_of_leviathans_table_4(row):
    found = speedup(row.alpha, row.k, row.draft_cost)
    assert found == pytest.approx(row.computed, abs=5.1e-5)
    assert found == pytest.approx(row.printed, abs=0.07)


@pytest.mark.parametrize("run", papers.RUNS)
def test_blog_post_formula_reproduces_its_figures(run):
    found = run_speedup(5 * run.tokens_over_rows, 4, run.draft_ms / run.target_ms)
    assert found == pytest.approx(run.speedup, abs=5.1e-7)


@pytest.mark.parametrize("run", papers.RUNS)
def test_alpha_follows_from_the_tokens_of_a_run(run):
    alpha = alpha_from_tokens(run.tokens_over_rows * 5, 4)
    assert alpha == pytest.approx(run.alpha, abs=5.1e-7)
    assert speedup(alpha, 4, run.draft_ms / run.target_ms) == pytest.approx(run.speedup, abs=1e-6)


def test_linear_verify_cost_predicts_slowdown():
    # As measured with gpt2-large and gpt2, of 774 and 124 million parameters, on a CPU.
    assert all(plain < speculative for speculative, plain in papers.CANDLE)
    costs = [1 + k for k in range(9)]
    assert speedup(0.9, 4, 124 / 774, costs) < 1
    assert break_even_alpha(4, 124 / 774, costs) is None
    assert best_k(0.99, 124 / 774, costs) == 0
    assert speedup(0.9, 4, 124 / 774) > 2  # as free verification would predict
