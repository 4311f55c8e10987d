"""The planner against fixed settings, in virtual time: arithmetic, no clock."""

import dataclasses

import pytest

from specedge.runtime.planning.planner import (
    BUDGET_ROUNDS,
    BUDGET_SHARE,
    AcceptanceEstimate,
    ChoiceReason,
    DraftOption,
    Planner,
)
from virtual import VirtualRequest, constant, seconds, table, untuned

FIXED = (1, 2, 3, 4, 6, 8, 12, 16)
PLAIN = ("plain", 0)


@pytest.mark.parametrize("draft", [0.05, 0.09, 0.2, 0.5])
@pytest.mark.parametrize("prior", [None, {"model": 0.0}])
def test_a_useless_draft_costs_less_than_two_percent(draft, prior):
    costs = table(draft, prior=prior)
    auto = seconds(costs, constant(0.0), seeds=1)
    assert auto <= 1.02 * seconds(costs, constant(0.0), seeds=1, fixed=PLAIN)


@pytest.mark.parametrize("row", [0.07, 0.15, 0.3])
@pytest.mark.parametrize("origin", ["tune", "load"])
def test_small_rarely_accepted_draft_costs_less_than_two_percent(row, origin):
    """Reports of Rapid-MLX, ik_llama and vLLM: 0.91 to 0.94 of plain decoding's speed."""
    costs = dataclasses.replace(table(0.2, row), origin=origin)
    auto = seconds(costs, constant(0.3), seeds=6, tokens=600)
    assert auto <= 1.02 * seconds(costs, constant(0.3), seeds=1, tokens=600, fixed=PLAIN) * 6


@pytest.mark.parametrize("tokens", [32, 600, 2000])
@pytest.mark.parametrize("draft", [0.05, 0.5])
def test_a_wrong_estimate_costs_little_more_than_the_budget(draft, tokens):
    for costs in (table(draft, prior={"model": 0.9}), untuned(draft)):
        request = VirtualRequest(costs, constant(0.0), tokens=tokens)
        assert request.seconds <= (1 + 2.5 * BUDGET_SHARE) * tokens + BUDGET_ROUNDS + 2


@pytest.mark.parametrize("accepted", [0.0, 0.4])
@pytest.mark.parametrize("tokens", [64, 400])
@pytest.mark.parametrize(("prefill", "prior"), [(0.05, 0.7), (0.08, 0.8), (0.08, 0.7), (0.12, 0.8)])
def test_a_wrong_measured_rate_costs_the_catch_up_and_the_budget(prefill, prior, tokens, accepted):
    costs = table(0.4, 0.03, prefill=prefill, prior={"model": prior})
    request = VirtualRequest(costs, constant(accepted), tokens=tokens)
    catch_up = request.planner._longest_catch_up
    assert request.seconds <= (1 + 2.5 * BUDGET_SHARE) * tokens + BUDGET_ROUNDS + 2 + catch_up


@pytest.mark.parametrize("prefill", [0.05, 0.08])
def test_a_measured_rate_turns_to_an_accurate_draft_within_a_short_text(prefill):
    """Qwen2.5-Coder 0.5B for 1.5B: a draft pass takes 0.4 of a pass, 80% are accepted."""
    request = {"tokens": 64, "prompt": 50}
    plain = seconds(untuned(), constant(0.8), fixed=PLAIN, **request)
    for prior, ratio in ((None, 1.0), ({"model": 0.8}, 0.9)):
        costs = table(0.4, 0.03, prefill=prefill, prior=prior)
        assert seconds(costs, constant(0.8), **request) <= ratio * plain


def costs_at_load(draft):
    """Costs of a draft whose prefill takes as long relative to the target's as its passes."""
    return dataclasses.replace(table(draft, 0.05, prefill=0.075 * draft), origin="load")


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("tokens", [48, 128])
@pytest.mark.parametrize("draft", [0.4, 0.2, 0.3, 0.5])
def test_an_unmeasured_draft_is_used_early_enough(draft, tokens):
    costs, request = costs_at_load(draft), {"tokens": tokens, "seeds": 24}
    for alpha in (0.6, 0.75, 0.85):
        fixed = [seconds(costs, constant(alpha), fixed=("model", k), **request) for k in FIXED[:4]]
        best = min(24 * tokens, *fixed)
        assert seconds(costs, constant(alpha), **request) <= 1.1 * best


@pytest.mark.parametrize("tokens", [48, 128, 600])
@pytest.mark.parametrize("draft", [0.2, 0.4, 0.5])
def test_an_unmeasured_useless_draft_costs_its_catch_up_and_the_budget(draft, tokens):
    request = VirtualRequest(costs_at_load(draft), constant(0.0), tokens=tokens)
    catch_up = request.planner._longest_catch_up
    assert request.seconds <= (1 + BUDGET_SHARE) * tokens + BUDGET_ROUNDS + catch_up
    assert catch_up <= max(BUDGET_ROUNDS + BUDGET_SHARE * tokens, request.costs.catch_up(50))
    assert request.planner.reason_counts[ChoiceReason.INVESTMENT] <= 1


def test_an_expensive_unmeasured_draft_is_not_read_for_a_short_text():
    request = VirtualRequest(costs_at_load(0.6), constant(1.0), tokens=128)
    assert set(request.choices) == {PLAIN}
    request = VirtualRequest(costs_at_load(0.4), constant(1.0), tokens=48, prompt=400)
    assert set(request.choices) == {PLAIN}


@pytest.mark.parametrize("costs", [table(1.0, prior={"model": 1.0}), table(1.0), untuned(1.0)])
def test_a_draft_as_large_as_the_target_is_never_tried(costs):
    request = VirtualRequest(costs, constant(1.0), tokens=600)
    assert set(request.choices) == {("plain", 0)}


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("draft", [0.05, 0.09, 0.2])
@pytest.mark.parametrize("alpha", [0.7, 0.8, 0.9, 0.97])
def test_a_tuned_pair_is_near_the_best_fixed_setting(draft, alpha):
    costs = table(draft, prior={"model": alpha})
    auto = seconds(costs, constant(alpha), tokens=400)
    best = min(seconds(costs, constant(alpha), tokens=400, fixed=("model", k)) for k in FIXED)
    assert auto <= 1.03 * best


def test_a_rejected_first_draft_does_not_end_the_use_of_an_accurate_drafter():
    """A round may lose a part of the exploration budget only."""
    planner = Planner(table(0.2, prior={"model": 0.9}), temperature=0.0)
    option = DraftOption("model", max_model_tokens=99)
    first = planner.choose([option], 50)
    assert first.num_draft_tokens > 1
    planner.record(first, ["model"] * first.num_draft_tokens, 0)
    assert planner.choose([option], 51).reason == ChoiceReason.GAIN


def test_a_draft_is_longer_if_later_tokens_are_accepted():
    def early_end(is_accepted, number):
        planner = Planner(table(0.2, prior={"model": 0.6}), temperature=0.0)
        choice = planner.choose([DraftOption("model", max_model_tokens=9)], 50)
        for _ in range(number):
            planner.estimate("model").record(choice.num_draft_tokens, is_accepted)
        return choice.num_draft_tokens, *planner.early_end(choice, 9)

    assert early_end(False, 2)[2] > early_end(True, 20)[2] > 0
    chosen, *never = early_end(False, 20)
    assert never == [chosen, 0.0]


@pytest.mark.parametrize("alpha", [0.6, 0.9])
def test_an_untuned_pair_adapts_quickly(alpha):
    costs = untuned()
    auto = seconds(costs, constant(alpha), tokens=400)
    best = min(seconds(costs, constant(alpha), tokens=400, fixed=("model", k)) for k in FIXED)
    assert auto <= 1.05 * best


@pytest.mark.slow
def test_planner_beats_every_fixed_setting_on_changing_text():
    def accepts(drafter, place, rng):
        repeats = place // 100 % 2 == 0
        chance = {"suffix": 0.97 if repeats else 0.05, "model": 0.7 if repeats else 0.1}
        return rng.random() < chance[drafter]

    costs = table(prior={"model": 0.5, "suffix": 0.3})
    rounds = {"copies": lambda place: 16, "tokens": 800}
    auto = seconds(costs, accepts, seeds=6, **rounds)
    for drafter in ("model", "suffix"):
        for k in (0, *FIXED):
            assert auto < seconds(costs, accepts, seeds=6, fixed=(drafter, k), **rounds), (
                drafter,
                k,
            )


def test_planner_beats_every_fixed_setting_on_changing_prompts():
    costs = table(prior={"model": 0.6})
    kinds = [constant(0.95), constant(0.02)]
    auto = sum(seconds(costs, kind, tokens=200) for kind in kinds)
    for k in (0, *FIXED):
        assert auto < sum(seconds(costs, kind, tokens=200, fixed=("model", k)) for kind in kinds)


def test_probes_detect_a_draft_that_improves():
    def accepts(drafter, place, rng):
        return place < 300 or place >= 600

    request = VirtualRequest(table(prefill=0.002), accepts, tokens=1500, prompt=0)
    assert request.planner.reason_counts[ChoiceReason.PROBE] > 0
    assert ("model", 16) in request.choices[-20:]


@pytest.mark.parametrize(("prefill", "tokens", "least"), [(0.001, 3000, 4), (0.01, 12000, 2)])
def test_probes_stay_within_their_budget(prefill, tokens, least):
    request = VirtualRequest(table(prefill=prefill), constant(0.0), tokens=tokens)
    planner = request.planner
    assert planner.reason_counts[ChoiceReason.PROBE] >= least
    assert planner.probe_loss <= BUDGET_ROUNDS + BUDGET_SHARE * planner.seconds


def test_a_short_answer_to_a_long_prompt_never_waits_for_the_draft():
    costs = table(prefill=0.02, prior={"model": 0.9})
    request = VirtualRequest(costs, constant(0.9), tokens=10, prompt=2000)
    assert set(request.choices) == {("plain", 0)}


def test_a_long_answer_amortizes_the_catch_up():
    costs = table(prefill=0.02, prior={"model": 0.9})
    request = VirtualRequest(costs, constant(0.9), tokens=800, prompt=2000)
    plain = VirtualRequest(costs, constant(0.9), tokens=800, prompt=2000, fixed=PLAIN)
    assert request.seconds < 0.6 * plain.seconds


def test_the_same_table_and_rounds_give_the_same_choices():
    first, second = (VirtualRequest(table(), constant(0.6), seed=3) for _ in range(2))
    assert first.choices == second.choices


def test_a_draft_with_a_full_context_is_not_used():
    planner = Planner(table(prior={"model": 1.0}), temperature=0.0)
    assert planner.choose([DraftOption("model", max_model_tokens=3)], 50).num_draft_tokens == 3
    assert planner.choose([DraftOption("model", max_model_tokens=0)], 50).num_draft_tokens == 0


@pytest.mark.parametrize(("temperature", "drafts"), [(0.8, True), (1.0, True), (1.5, False)])
def test_acceptance_rates_of_tune_are_not_assumed_above_its_temperature(temperature, drafts):
    planner = Planner(table(draft=0.45, row=0.1, prior={"model": 0.7}), temperature)
    choice = planner.choose([DraftOption("model", max_model_tokens=9)], 50)
    assert (choice.reason == ChoiceReason.GAIN) == drafts


def test_chain_drafts_more_tokens_than_the_copy():
    planner = Planner(table(prior={"model": 0.9, "suffix": 0.95}), temperature=0.0)
    options = [
        DraftOption("model", max_model_tokens=99),
        DraftOption("suffix", "suffix", num_free=3),
        DraftOption("chain", "suffix", num_free=3, max_model_tokens=99),
    ]
    choice = planner.choose(options, 50)
    assert choice.drafter == "chain"
    assert choice.num_draft_tokens > 3


def test_only_non_copying_model_free_drafters_are_probed():
    tables = DraftOption("ngram", "ngram", num_free=16)
    copies = DraftOption("suffix", "suffix", num_free=16)  # of which every round tells
    for option, probes in ((tables, True), (copies, False)):
        planner = Planner(table(prior={"ngram": 0.0, "suffix": 0.0}), temperature=0.0)
        kinds = set()
        for _ in range(200):
            choice = planner.choose([option], 50)
            planner.record(choice, [option.source] * choice.num_draft_tokens, 0)
            kinds.add(choice.reason)
        assert kinds == ({"plain", "probe"} if probes else {"plain"})


def test_never_accepted_drafter_is_abandoned():
    tables = DraftOption("ngram", "ngram", num_free=16)
    planner = Planner(table(row=0.02), temperature=0.0)
    drafted = []
    for _ in range(300):
        choice = planner.choose([tables], 50)
        planner.record(choice, ["ngram"] * choice.num_draft_tokens, 0)
        drafted.append(choice.num_draft_tokens)
    assert 0.02 * sum(drafted[-200:]) <= 200 * BUDGET_SHARE + 0.02


def test_expensive_verify_passes_stop_speculation():
    planner = Planner(table(row=1.0, prior={"model": 1.0}), temperature=0.0)
    assert planner.choose([DraftOption("model", max_model_tokens=99)], 50).drafter == "plain"


def test_empty_probes_stop_when_budget_is_spent():
    planner = Planner(table(prior={"model": 0.0}, prefill=1e-6), temperature=0.0)
    options = [DraftOption("model", max_model_tokens=99)]
    kinds = []
    for _ in range(100):
        choice = planner.choose(options, 50)
        planner.record(choice, [], 0)
        kinds.append(choice.reason)
    assert kinds.count("probe") <= (BUDGET_ROUNDS + 100 * BUDGET_SHARE) / 0.16 + 1
    assert kinds[-1] == "plain"


def test_forced_tokens_do_not_count_for_acceptance():
    planner = Planner(table(0.05, prior={"model": 0.0}), temperature=0.0)
    for _ in range(3):
        choice = planner.choose([DraftOption("model", max_model_tokens=16)], 50)
        assert choice.reason == "probe"
        planner.record(choice, ["grammar"], 1)
    assert planner.estimate("model").rate == 0.0


def test_a_rate_starts_at_its_prior_and_decays():
    known = AcceptanceEstimate(0.75)
    assert known.rate == 0.75
    for _ in range(100):
        known.record(0, True)
    assert known.rate > 0.99
    for _ in range(11):
        known.record(0, False)
    assert 0.45 < known.rate < 0.55


def test_each_position_has_its_acceptance_rate():
    known = AcceptanceEstimate(0.5)
    assert known.rates(4) == [0.5] * 4
    for _ in range(40):
        known.record(0, True)
        known.record(1, False)
    first, second, third = known.rates(3)
    assert first > 0.9 > 0.2 > second == third


def test_predicted_rates_are_scaled_by_their_accuracy():
    known = AcceptanceEstimate()
    assert known.calibrate([1.0, 0.8]) == [0.5, 0.4]
    for _ in range(60):
        known.record_predictions([0.9, 0.9], 2)
    assert known.calibrate([0.9]) == [0.9]
    for _ in range(60):
        known.record_predictions([0.5], 0)
    assert known.calibrate([0.9])[0] < 0.1


def test_k_extends_while_predicted_rates_pay():
    planner = Planner(table(row=0.1), temperature=0.0)
    for _ in range(60):
        planner.estimate("suffix").record_predictions([0.9], 1)
    option = DraftOption(
        "suffix", "suffix", num_free=6, predicted_rates=[0.9, 0.9, 0.9, 0.05, 0.9, 0.9]
    )
    assert planner.choose([option], 50).num_draft_tokens == 3


def test_host_cost_per_token_reduces_gains():
    costs = table(row=0.3, prior={"model": 0.62})
    busy = dataclasses.replace(costs, greedy=dataclasses.replace(costs.greedy, token=20.0))
    options = [DraftOption("model", max_model_tokens=9)]
    assert Planner(costs, temperature=0.0).choose(options, 50).reason == "gain"
    assert Planner(busy, temperature=0.0).choose(options, 50).reason != "gain"


def test_costs_of_shared_verify_passes_are_each_requests_share():
    costs = table(draft=0.2, row=0.1)
    alone, shared = (costs.at(50, True, count) for count in (1, 4))
    assert [alone.verify[k] for k in (0, 4)] == pytest.approx([1.0, 1.4])
    assert [shared.verify[k] for k in (0, 4)] == pytest.approx([1.3 / 4, 2.9 / 4])
    assert shared.draft == alone.draft  # the other requests wait for a draft pass


def test_fewer_tokens_are_drafted_as_more_requests_share_passes():
    planner = Planner(table(draft=0.05, row=0.1, prior={"model": 0.5}), temperature=0.0)
    options = [DraftOption("model", max_model_tokens=16)]
    chosen = []
    for planner.num_requests in (1, 2, 4, 8, 64):
        choice = planner.choose(options, 50)
        chosen.append(choice.num_draft_tokens if choice.reason == ChoiceReason.GAIN else 0)
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] >= 2
    assert chosen[-1] == 0
