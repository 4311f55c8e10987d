"""Planned rounds: records, replay and dependence on the cost table."""

import dataclasses
from functools import cache

import pytest

from fakes import HeadTable, StatesTable, TableModel, hashed_distribution, of_rows
from specedge.errors import ReplayError
from specedge.runtime.decoding.decoding import SpeculativeDecoder
from specedge.runtime.decoding.protocols import Drafter
from specedge.runtime.decoding.timing import Stopwatch
from specedge.runtime.decoding.verification import Draft
from specedge.runtime.drafters.chain import Chain
from specedge.runtime.drafters.draft_head import DraftHead
from specedge.runtime.drafters.draft_model import DraftModel, ParallelDraftModel
from specedge.runtime.drafters.suffix import Prediction, Suffix, SuffixBeforeModel
from specedge.runtime.planning.explanation import explain
from specedge.runtime.planning.planner import (
    BUDGET_ROUNDS,
    BUDGET_SHARE,
    DraftOption,
    Planner,
)
from specedge.runtime.planning.plans import AutoPlan, ReplayPlan, summarize_rounds
from specedge.sampling_options import Sampling
from virtual import table

GREEDY = Sampling()


class Copies(Drafter):
    """Drafter that proposes a fixed continuation, right or wrong."""

    name = "suffix"

    def __init__(self, token, length=5):
        self.token, self.length = token, length

    def predict(self, history, max_tokens):
        count = min(max_tokens, self.length)
        return Prediction([self.token] * count, [], count, count)

    def propose(self, history, max_tokens, sampling, uniforms):
        return Draft(self.predict(history, max_tokens).tokens)


def run(plan, target, sampling=GREEDY, tokens=60, seed=1):
    decoder = SpeculativeDecoder(target, plan, Stopwatch())
    return list(decoder.rounds([1, 2], sampling, seed, tokens))


def auto(costs, **drafters):
    return AutoPlan(Planner(costs, temperature=0.0), drafters)


def test_rounds_record_drafter_and_k():
    distribution = hashed_distribution(1, 8)
    plan = auto(table(prior={"model": 0.98}), model=DraftModel(TableModel(distribution)))
    rounds = run(plan, TableModel(distribution))
    assert {one.drafter for one in rounds[:-1]} == {"model"}
    assert max(one.num_draft_tokens for one in rounds) == 16
    assert all(one.num_drafted == one.num_draft_tokens for one in rounds[:-1])
    assert sum(len(one.tokens) for one in rounds) >= 60


def test_a_rejected_draft_model_is_abandoned_and_text_is_unchanged():
    plan = auto(table(), model=DraftModel(TableModel(hashed_distribution(2, 50))))
    rounds = run(plan, TableModel(hashed_distribution(1, 50)), tokens=100)
    plain = run(
        ReplayPlan([("plain", 0, 100)], {"model": Copies(0)}),
        TableModel(hashed_distribution(1, 50)),
        tokens=100,
    )
    assert [t for one in rounds for t in one.tokens][:100] == [
        t for one in plain for t in one.tokens
    ]
    assert {one.drafter for one in rounds[-30:]} == {"plain"}
    assert plan.planner.saved_seconds > -3


def test_a_plain_round_runs_no_draft_pass():
    model = TableModel(hashed_distribution(1, 8))
    run(auto(table(draft=1.0), model=DraftModel(model)), TableModel(hashed_distribution(1, 8)))
    assert model.passes == []


@pytest.mark.parametrize(("length", "first"), [(12, "model"), (13, "plain")])
def test_the_first_token_does_not_wait_for_a_long_catch_up(length, first):
    """Draft model with a cost of 0.1 target passes, and 0.08 per further prompt token."""
    distribution = hashed_distribution(1, 8)
    costs = table(draft=0.1, prefill=0.08, prior={"model": 0.98})
    plan = auto(costs, model=DraftModel(TableModel(distribution)))
    decoder = SpeculativeDecoder(TableModel(distribution), plan, Stopwatch())
    rounds = list(decoder.rounds([1] * length, GREEDY, 1, 40))
    assert [one.drafter for one in rounds[:2]] == [first, "model"]


@pytest.mark.parametrize(("length", "first"), [(32, "model"), (33, "plain")])
def test_tokens_of_a_parallel_drafts_pass_are_no_catch_up(length, first):
    distribution = hashed_distribution(1, 8)
    costs = table(draft=0.1, prefill=0.08, prior={"model": 0.98})
    drafter = ParallelDraftModel(TableModel(distribution), mask_token=8)
    decoder = SpeculativeDecoder(TableModel(distribution), auto(costs, model=drafter), Stopwatch())
    assert next(decoder.rounds([1] * length, GREEDY, 1, 40)).drafter == first


def test_suffix_decoding_drafts_before_the_first_token():
    costs = table(draft=0.1, prefill=0.08, prior={"model": 0.98, "suffix": 0.98})
    model = DraftModel(TableModel(hashed_distribution(1, 8)))
    plan = auto(costs, suffix=Copies(3), chain=Chain(Copies(3), model))
    decoder = SpeculativeDecoder(TableModel(lambda text: [0, 0, 0, 1]), plan, Stopwatch())
    first = next(decoder.rounds([1] * 40, GREEDY, 1, 40))
    assert first.sources == ("suffix",) * 5
    assert first.num_draft_tokens == 5
    assert model.model.length == 0


class Counted(Copies):
    """Counts how often it was asked."""

    asked = 0

    def predict(self, history, max_tokens):
        self.asked += 1
        return super().predict(history, max_tokens)


def test_planner_backs_off_without_speedup():
    copies = Counted(7)
    plan = auto(table(prior={"suffix": 0.0}, unit=5e-4), suffix=copies)
    rounds = run(plan, TableModel(lambda text: [1, 0, 0, 0, 0, 0, 0, 0]), tokens=200)
    assert {one.drafter for one in rounds} == {"plain"}
    assert 10 <= copies.asked <= 40
    assert plan.planner.reason_counts == {"plain": 200}


def test_unplanned_rounds_are_counted_whenever_the_planner_is_read():
    plan = auto(table(prior={"suffix": 0.0}, unit=5e-4), suffix=Copies(7))
    next_ = plan.next

    def read_before_the_round(history, left):
        step = next_(history, left)
        assert plan.planner.num_tokens == history.num_new_tokens
        return step

    plan.next = read_before_the_round
    decoder = SpeculativeDecoder(TableModel(lambda text: [1] + 7 * [0]), plan, Stopwatch())
    for num_done, _ in enumerate(decoder.rounds([1, 2], GREEDY, 1, 40), 1):
        assert plan.planner.reason_counts.total() == num_done
    assert plan.planner.seconds == pytest.approx(40 * plan.planner.last_costs.plain)


@pytest.mark.parametrize("draft", [0.05, 0.09, 0.2])
def test_a_round_stays_within_the_remaining_budget(draft):
    distribution, wrong = hashed_distribution(1, 50), hashed_distribution(2, 50)
    plan = auto(table(draft, prior={"model": 0.9}), model=DraftModel(TableModel(wrong)))
    planner, next_, over = plan.planner, plan.next, []

    def checked(history, left):
        spare = (
            BUDGET_ROUNDS
            + BUDGET_SHARE * planner.seconds
            + planner.saved_seconds
            + planner._longest_catch_up
        )
        step = next_(history, left)
        k, costs = step.num_draft_tokens, planner.last_costs
        most = costs.verify[k] + costs.draft[k]
        over.append(k > 1 and most - costs.plain > spare + 1e-9)
        return step

    plan.next = checked
    run(plan, TableModel(distribution), tokens=60)
    assert over.count(True) == 0


def test_long_rounds_are_always_planned():
    copies = Counted(7)
    plan = auto(table(prior={"suffix": 0.0}), suffix=copies)
    run(plan, TableModel(lambda text: [1, 0, 0, 0, 0, 0, 0, 0]), tokens=50)
    assert copies.asked == 50


def test_wrong_copies_stay_within_the_exploration_budget():
    target = TableModel(lambda text: [0, 0, 0, 1])
    plan = auto(table(prior={"suffix": 0.5}), suffix=Copies(2))
    rounds = run(plan, target, tokens=100)
    assert plan.planner.saved_seconds > -1.5 * BUDGET_ROUNDS
    assert [one.drafter for one in rounds[40:]].count("plain") >= 50


@pytest.mark.parametrize(("rate", "name"), [(0.95, "chain"), (0.3, "model")])
def test_chain_copies_after_model_tokens_create_a_match(rate, name):
    distribution = hashed_distribution(1, 8)
    suffix, model = Copies(0, length=0), DraftModel(TableModel(distribution))
    drafters = {"model": model, "suffix": suffix, "chain": Chain(suffix, model)}
    plan = auto(table(prior={"model": 0.9, "suffix": rate}), **drafters)
    assert run(plan, TableModel(distribution))[0].drafter == name


def test_a_shorter_planned_request_is_a_prefix_of_a_longer_one():
    distributions = [cache(hashed_distribution(seed, 3)) for seed in (1, 2)]
    costs = table(draft=0.12, row=0.04, prefill=0.05, prior={"model": 0.8, "suffix": 0.9})

    def run_for(count, seed):
        suffix = Suffix(min_match=2, max_match=3)
        model = DraftModel(TableModel(distributions[1], context_length=40), context_length=40)
        drafters = {"model": model, "suffix": suffix, "chain": Chain(suffix, model)}
        plan = AutoPlan(Planner(costs, temperature=1.0), drafters)
        rounds = run(plan, TableModel(distributions[0]), Sampling(1.0), count, seed)
        return [token for one in rounds for token in one.tokens][:count]

    for seed in range(2):
        longest = run_for(50, seed)
        assert all(run_for(count, seed) == longest[:count] for count in range(1, 50, 2))


def test_an_investment_does_not_depend_on_the_length_of_the_request():
    distributions = [cache(hashed_distribution(seed, 3)) for seed in (1, 2)]

    def run_for(count):
        model = DraftModel(TableModel(distributions[1]))
        plan = auto(table(draft=0.4, row=0.05, prefill=0.03), model=model)
        decoder = SpeculativeDecoder(TableModel(distributions[0]), plan, Stopwatch())
        rounds = list(decoder.rounds([1] * 50, Sampling(1.0), 1, count))
        return plan, [token for one in rounds for token in one.tokens][:count]

    plan, longest = run_for(40)
    assert plan.planner.reason_counts["investment"] == 1
    assert all(run_for(count)[1] == longest[:count] for count in range(1, 40, 3))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_replay_repeats_rounds_and_tokens_with_any_table(temperature):
    sampling = Sampling(temperature)
    drafters = {"model": DraftModel(TableModel(hashed_distribution(2, 8)))}
    first = run(auto(table(), **drafters), TableModel(hashed_distribution(1, 8)), sampling)
    again = run(
        ReplayPlan(summarize_rounds(first), drafters),
        TableModel(hashed_distribution(1, 8)),
        sampling,
    )
    assert again == first


def test_replay_with_too_few_rounds_or_unknown_drafter_is_rejected():
    target = TableModel(hashed_distribution(1, 8))
    drafters = {"model": DraftModel(TableModel(hashed_distribution(1, 8)))}
    with pytest.raises(ReplayError, match="ends after 3 rounds"):
        run(ReplayPlan([("model", 1, 2), ("plain", 0, 1)], drafters), target)
    with pytest.raises(ReplayError, match="rounds of 'tables'"):
        ReplayPlan([("tables", 1, 2)], drafters)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_same_seed_and_table_give_the_same_text_and_rounds(pipeline, temperature):
    first, _, again = (
        pipeline.generate(prompt, 60, temperature, seed=3) for prompt in ("def f(", "x", "def f(")
    )
    assert first.num_draft_tokens == "auto"
    assert (first.tokens, first.plan) == (again.tokens, again.plan)
    assert len({k for _, k, *_ in first.plan}) > 1


def test_auto_equals_plain_decoding(pipeline):
    one = pipeline.generate("class Parser:", 150, ignore_eos=True)
    assert (
        one.tokens
        == pipeline.generate("class Parser:", 150, num_draft_tokens=0, ignore_eos=True).tokens
    )
    assert one.expected_speedup > 1


def test_a_generations_plan_replays_it(pipeline):
    first = pipeline.generate("import ", 60, 0.9, seed=5)
    costs = pipeline.costs.table
    try:
        pipeline.costs.table = table(draft=1.0)
        assert pipeline.generate("import ", 60, 0.9, seed=5).tokens != first.tokens
        again = pipeline.generate("import ", 60, 0.9, seed=5, replay=first.plan)
    finally:
        pipeline.costs.table = costs
    assert (again.tokens, again.rounds) == (first.tokens, first.rounds)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "coupling": "gumbel"}])
def test_rounds_of_prompt_lookup_replay_where_drafts_do_not_change_the_text(pipeline, options):
    prompt = "x = [1, 2, 3]\ny = [1, 2, 3]\nx = [1,"
    request = {"drafter": "lookup", "seed": 1, "ignore_eos": True, **options}
    plain = pipeline.generate(prompt, 40, num_draft_tokens=0, **request)
    for rounds in ([["lookup", 4, 1]], [["plain", 0, 3], ["lookup", 8, 37]]):
        assert pipeline.generate(prompt, 40, replay=rounds, **request).tokens == plain.tokens


def test_sampled_rounds_of_prompt_lookup_are_not_replayed_with_other_drafts(pipeline):
    with pytest.raises(ReplayError, match="rounds of 'lookup'"):
        pipeline.generate("import ", 9, 0.9, drafter="lookup", replay=[["lookup", 4, 9]])


def test_an_explanation_names_costs_acceptance_choices_and_gain():
    distribution = hashed_distribution(1, 8)
    plan = auto(table(prior={"model": 0.9}), model=DraftModel(TableModel(distribution)))
    rounds = run(plan, TableModel(distribution))
    text = "\n".join(explain(plan, rounds))
    for part in (
        "specedge tune", "draft pass", "acceptance rate of model: 0.9", "round 1: model, K = 4:",
        "tokens expected", "times the speed of plain decoding", "speed-up", "0 probes",
    ):  # fmt: skip
        assert part in text
    assert explain(ReplayPlan([("model", 1, 9)], {"model": Copies(0)}), []) == [
        "fixed or replayed rounds: "
    ]


def test_requests_share_the_costs_of_a_table():
    costs = table()
    assert Planner(costs, 0.0).costs(50) is Planner(costs, 0.0).costs(60)
    assert Planner(costs, 0.0).costs(50) is not Planner(costs, 0.0).costs(70)
    assert dataclasses.replace(costs, threads=3).at(50, True) == costs.at(50, True)


def test_a_sampled_text_is_planned_with_sampled_costs():
    costs = dataclasses.replace(table(), sampled=table(host=9.0).sampled)
    assert Planner(costs, 1.0).costs(50).verify[1] > 9
    assert Planner(costs, 0.0).costs(50).verify[1] < 2


def test_a_custom_drafter_at_a_fixed_k_can_be_replayed(pipeline):
    class Own:
        name = "foo"

        def propose(self, history, max_tokens, sampling, uniforms):
            return Draft([7] * max_tokens)

        def truncate(self, length):
            pass

    run = pipeline.generate("import", 12, drafter=Own(), num_draft_tokens=2, ignore_eos=True)
    again = pipeline.generate("import", 12, drafter=Own(), replay=run.plan, ignore_eos=True)
    assert again.tokens == run.tokens
    assert again.plan == run.plan


def test_planner_learns_from_correct_undrafted_tokens():
    plan = auto(table(row=0.2, prior={"suffix": 0.0}), suffix=Copies(3))
    rounds = run(plan, TableModel(lambda text: [0, 0, 0, 1]))
    assert [rounds[0].drafter, rounds[-2].drafter] == ["plain", "suffix"]
    assert list(plan.planner.acceptance) == ["suffix"]


HEAD = of_rows(hashed_distribution(2, 3, 0.1))


def with_head(costs, temperature=1.0, head=HEAD):
    """A plan of a head, suffix decoding and their chain."""
    drafter, suffix = DraftHead(HeadTable(head, 128)), Suffix()
    chain = Chain(SuffixBeforeModel(suffix), drafter)
    drafters = {"model": drafter, "suffix": suffix, "chain": chain}
    return AutoPlan(Planner(costs, temperature), drafters), drafters


@pytest.mark.parametrize("prior", [0.9, 0.7])
def test_a_head_is_planned_with_the_rows_that_it_has_to_read(prior):
    """After a round, one for each token of it, beside a pass for each draft token."""
    plan, drafters = with_head(table(0.05, 0.01, prefill=0.02, prior={"model": prior}))
    costs, num_drafted, before = plan.planner.costs(1), 0, None
    decoder = SpeculativeDecoder(StatesTable(hashed_distribution(1, 3, 0.1)), plan, Stopwatch())
    for round_ in decoder.rounds([1, 2], Sampling(1.0), 1, 120):
        choice = plan.choice
        if round_.drafter == "model" and before is not None and before.drafter == "model":
            k, num_rows = choice.num_draft_tokens, len(before.tokens)
            expected = costs.verify[k] + costs.draft[k] + (num_rows - 1) * costs.prefill
            assert choice.seconds == pytest.approx(expected)
            num_drafted += 1
        before = round_
    assert num_drafted > 3
    assert drafters["model"].model.num_fused


def test_a_head_reads_a_prompt_that_is_expected_to_pay_and_is_off_otherwise():
    distribution = hashed_distribution(1, 3, 0.1)
    prompt = [i % 3 for i in range(60)]
    for prefill, reads in ((0.001, True), (0.5, False)):
        plan, drafters = with_head(table(0.02, 0.01, prefill=prefill, prior={"model": 0.6}))
        target = StatesTable(distribution)
        decoder = SpeculativeDecoder(target, plan, Stopwatch(), chunk_length=8)
        rounds = list(decoder.rounds(prompt, Sampling(1.0), 1, 60))
        assert bool(drafters["model"].model.num_fused) is reads
        assert any(one.drafter in ("model", "chain") for one in rounds) is reads
        replay = ReplayPlan(summarize_rounds(rounds), with_head(table())[1])
        again = SpeculativeDecoder(StatesTable(distribution), replay, Stopwatch())
        repeated = list(again.rounds(prompt, Sampling(1.0), 1, 60))
        assert [one.tokens for one in repeated] == [one.tokens for one in rounds]


def test_the_head_s_catch_up_with_a_prompt_counts_once():
    costs = table(0.02, 0.01, prefill=0.01, prior={"model": 0.8})
    planner = with_head(costs)[0].planner
    option = DraftOption("model", "model", 0, 512, 60, reads_states=True)
    assert planner.invest(option, 60)
    assert planner.seconds == pytest.approx((60 - 17) * 0.01)
    dear = dataclasses.replace(option, num_unread=4000)
    before = planner.seconds
    assert not planner.invest(dear, 4000)
    assert planner.seconds == before


def test_a_useless_head_costs_its_reading_and_the_exploration_budget():
    target = certain_of(1)
    for prior in ({}, {"model": 0.7}):
        plan, _ = with_head(table(0.05, 0.05, prior=prior), 0.0, of_rows(certain_of(2)))
        list(SpeculativeDecoder(StatesTable(target), plan, Stopwatch()).rounds([0], GREEDY, 1, 400))
        planner = plan.planner
        budget = BUDGET_ROUNDS + BUDGET_SHARE * planner.seconds + 2.0
        assert planner.seconds - planner.plain_seconds <= budget


def certain_of(token):
    """A distribution that is certain of a token."""
    return lambda text: [float(i == token) for i in range(3)]
