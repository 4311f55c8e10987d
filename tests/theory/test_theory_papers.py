"""Every figure of the papers and posts that follows from a formula, and those that do not."""

import pytest

import papers
from specedge.theory.formulas import (
    alpha_from_tokens,
    expected_tokens,
    run_speedup,
    speedup,
)


@pytest.mark.parametrize("alpha", papers.ALPHAS)
def test_expected_tokens_are_leviathans_equation_1(alpha):
    found = [expected_tokens(alpha, k) for k in papers.EXPECTED_TOKENS_K]
    assert found == pytest.approx(papers.EXPECTED_TOKENS[alpha], abs=5.1e-7)


@pytest.mark.parametrize("alpha", papers.ALPHAS)
def test_speedups_at_the_best_k_are_theorem_3_8(alpha):
    pairs = zip(papers.BEST_K[alpha], papers.COSTS, strict=True)
    factors = [speedup(alpha, k, cost) for k, cost in pairs]
    assert factors[:4] == pytest.approx(papers.BEST_SPEEDUP[alpha][:4], abs=5.1e-7)
    assert factors[4:] == pytest.approx(papers.BEST_SPEEDUP[alpha][4:], abs=5.1e-5)


@pytest.mark.parametrize("alpha", papers.ALPHAS)
def test_speedups_at_four_draft_tokens_are_theorem_3_8(alpha):
    found = [speedup(alpha, 4, cost) for cost in papers.COSTS[:4]]
    assert found == pytest.approx(papers.SPEEDUP_AT_4[alpha], abs=5.1e-7)


@pytest.mark.parametrize("row", papers.FREE_DRAFTS)
def test_speedups_of_free_drafts_are_leviathans_table_1(row):
    found = speedup(row.alpha, row.k, 0)
    assert found == pytest.approx(row.speedup, abs=5.1e-7)
    assert round(found, 2) == row.printed


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
    assert all(speedup(0.99, k, 124 / 774, 1 + k) < 1 for k in range(1, 9))
    assert speedup(0.9, 4, 124 / 774) > 2  # as free verification would predict
