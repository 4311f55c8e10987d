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
    round_cost,
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
def test_the_best_k_and_its_speedup_are_those_of_a_search_over_whole_numbers(alpha):
    found = [best_k(alpha, cost) for cost in papers.COSTS]
    assert tuple(found) == papers.BEST_K[alpha]
    factors = [speedup(alpha, k, cost) for k, cost in zip(found, papers.COSTS, strict=True)]
    assert factors[:4] == pytest.approx(papers.BEST_SPEEDUP[alpha][:4], abs=5.1e-7)
    assert factors[4:] == pytest.approx(papers.BEST_SPEEDUP[alpha][4:], abs=5.1e-5)


def test_near_the_best_k_the_speedup_hardly_changes():
    # So what is predicted is tested above by its speed-up too; K alone would say little.
    assert speedup(0.7, 6, 0.05) == pytest.approx(2.352938, abs=5.1e-7)
    assert speedup(0.7, 5, 0.05) == pytest.approx(2.352936, abs=5.1e-7)


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
    assert papers.ACCEPTANCE[row.task, row.draft][row.temperature] == row.alpha


def test_even_a_free_bigram_table_gains_a_quarter():
    alpha, _ = papers.ACCEPTANCE["EnDe", "bigram"]
    assert speedup(alpha, 3, 0) == pytest.approx(1.248)


def test_lenience_at_its_best_k_follows_from_table_5_and_not_from_its_text():
    rates = papers.LENIENT_ACCEPTANCE["small"]
    for alpha, (k, factor), text in zip(
        rates, papers.LENIENT_BEST, papers.LENIENT_BEST_PRINTED, strict=True
    ):
        assert best_k(alpha, papers.LENIENT_COST) == k
        found = speedup(alpha, k, papers.LENIENT_COST)
        assert found == pytest.approx(factor, abs=5.1e-5)
        assert 0.1 < text - found < 0.25
    for rates in papers.LENIENT_ACCEPTANCE.values():
        assert list(rates) == sorted(rates)


@pytest.mark.parametrize(("alpha", "factor"), papers.GREEDY_LENIENT)
def test_greedy_lenience_at_eight_draft_tokens(alpha, factor):
    assert speedup(alpha, 8, papers.LENIENT_COST) == pytest.approx(factor, abs=5.1e-5)


@pytest.mark.parametrize("run", papers.RUNS)
def test_the_posts_formula_of_a_run_gives_their_figures(run):
    found = run_speedup(5 * run.tokens_over_rows, 4, run.draft_ms / run.target_ms)
    assert found == pytest.approx(run.speedup, abs=5.1e-7)


@pytest.mark.parametrize("run", papers.RUNS)
def test_alpha_follows_from_the_tokens_of_a_run(run):
    alpha = alpha_from_tokens(run.tokens_over_rows * 5, 4)
    assert alpha == pytest.approx(run.alpha, abs=5.1e-7)
    assert speedup(alpha, 4, run.draft_ms / run.target_ms) == pytest.approx(run.speedup, abs=1e-6)


def test_as_drafting_gets_free_a_run_gains_its_tokens_a_round():
    assert run_speedup(0.8125 * 5, 4, 0) == 0.8125 * 5


def test_chinchillas_rounds_took_a_little_longer_than_free_verification():
    cost = papers.CHINCHILLA_DRAFT_MS / 14.1
    assert round_cost(4, cost) * 14.1 == pytest.approx(21.3)
    assert round_cost(0, cost) * 14.1 == papers.CHINCHILLA_ROUND_MS[0]
    assert round_cost(7, cost) * 14.1 == pytest.approx(26.7)
    assert papers.CHINCHILLA_ROUND_MS[7] > 26.7


@pytest.mark.parametrize(("task", "run"), [("HumanEval", 0), ("XSum", 1)])
def test_one_alpha_and_free_verification_overrate_long_drafts(task, run):
    predicted = best_k(papers.RUNS[run].alpha, papers.CHINCHILLA_DRAFT_MS / 14.1)
    assert predicted > max(papers.CHINCHILLA_BEST_K[task])


def test_a_cpu_that_pays_for_each_row_is_predicted_to_lose():
    # As measured with gpt2-large and gpt2, of 774 and 124 million parameters, on a CPU.
    assert all(plain < speculative for speculative, plain in papers.CANDLE)
    costs = [1 + k for k in range(9)]
    assert speedup(0.9, 4, 124 / 774, costs) < 1
    assert break_even_alpha(4, 124 / 774, costs) is None
    assert best_k(0.99, 124 / 774, costs) == 0
    assert speedup(0.9, 4, 124 / 774) > 2  # as free verification would predict
