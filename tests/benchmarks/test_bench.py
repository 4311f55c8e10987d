"""Schedule, caches and statistics of `specedge bench`."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from benchmark_runs import LOSING, PROMPTS, figures, measured, runs
from fakes import Counting, TableModel, hashed_distribution
from specedge.benchmarks import acceptance as bench_acceptance
from specedge.benchmarks import measure as bench
from specedge.benchmarks.measure import (
    BenchmarkPrompt,
    Setting,
    TimedRun,
    length_before_loop,
)
from specedge.benchmarks.prompts import SETS
from specedge.benchmarks.summary import (
    acceptance_chances,
    losing,
    model_rounds,
    overall_speedup,
    summarize,
    text_rounds,
)
from specedge.runtime.planning.cost_table import RoundCosts
from specedge.runtime.requests.stats import Stats
from specedge.runtime.sampling.history import History
from specedge.runtime.sampling.probabilities import probabilities
from specedge.sampling_options import Sampling
from specedge.theory.formulas import speedup

RUN = list(range(8))


@pytest.mark.parametrize(
    ("tokens", "length"),
    [
        ([], 0),
        (RUN * 2, 16),
        ([*RUN, 9, *RUN, 10, *RUN, 11, 11], 18),
        ([*RUN, 9, *RUN, 10, *RUN[:7], 12], 26),
        ([5] * 9, 9),
        ([5] * 10, 2),
        ([1, 2, *[5] * 40], 4),
    ],
)
def test_loop_starts_at_third_repeat_of_eight_tokens(tokens, length):
    assert length_before_loop(tokens) == length


def test_settings_are_every_drafter_with_every_k_once_and_auto_alone():
    found = bench.settings(["model", "auto", "model"], [1, 4, 1])
    assert found == [Setting("model", 1), Setting("model", 4), Setting("auto", "auto")]


def test_built_in_prompts_fit_a_context_of_512_with_room(pipeline):
    assert list(SETS) == ["code", "prose", "extraction"]
    for texts in SETS.values():
        assert len(texts) >= 6
        assert len({*texts}) == len(texts)
        assert max(len(pipeline.tokenizer.encode(text).ids) for text in texts) <= 256


class FakePipeline:
    """Fake pipeline that returns fixed tokens and records its requests."""

    def __init__(self, tokens):
        self.tokens = tokens
        self.asked = []

    def forget(self):
        """There is no cache."""

    def generate(self, prompt, **request):
        self.asked.append(request | {"prompt": prompt})
        kept = self.tokens[: request["max_new_tokens"]]
        stats = SimpleNamespace(
            decode_seconds=float(len(kept)), prefill_seconds=1.0, num_new_tokens=len(kept)
        )
        return SimpleNamespace(tokens=kept, stats=stats)


def run_fake(tokens, num_settings=5, repeats=2, num_prompts=2):
    pipeline = FakePipeline(tokens)
    prompts = [BenchmarkPrompt("code", "x", [i]) for i in range(num_prompts)]
    some = [Setting("model", k) for k in range(1, num_settings + 1)]
    return pipeline, bench.measure(pipeline, prompts, some, repeats, max_new_tokens=40, seed=7)


def test_every_setting_runs_once_to_warm_up_and_then_in_each_repeat():
    pipeline, found = run_fake(list(range(40)))
    # Five settings lie between three plain runs.
    assert len(pipeline.asked) == 2 * 6 + 2 * 2 * (5 + 3)
    assert len(found.runs) == 2 * 2 * (5 + 3)
    assert {asked["seed"] for asked in pipeline.asked if asked["prompt"] == [1]} == {8}


def test_the_order_changes_from_repeat_to_repeat_and_from_prompt_to_prompt():
    pipeline, _ = run_fake(list(range(40)), num_settings=3)
    order = [asked["num_draft_tokens"] for asked in pipeline.asked[8:]]
    assert order == [0, 1, 2, 3, 0, 0, 2, 3, 1, 0, 0, 3, 2, 1, 0, 0, 1, 3, 2, 0]


def test_repeats_stop_before_the_loop():
    pipeline, found = run_fake([1, 2, *[5] * 38])
    assert {asked["max_new_tokens"] for asked in pipeline.asked[-8:]} == {4}
    assert all(text.kept == 4 and len(text.tokens) == 40 for text in found.texts.values())


class SinceEmptied(Counting):
    """Counts from the moment that its cache was emptied."""

    def truncate(self, length):
        if length == 0:
            self.num_read = 0
        self.model.truncate(length)


@pytest.mark.parametrize("drafter", ["model", "chain", "auto"])
def test_runs_start_with_an_empty_cache(pipeline, drafter, monkeypatch):
    from specedge.runtime.requests.pipeline import Pipeline

    target, draft = SinceEmptied(pipeline.target), SinceEmptied(pipeline.draft)
    counted = Pipeline(pipeline.bundle, pipeline.tokenizer, target, draft)
    generate = counted.generate
    lengths, reads = [], []

    def watched(prompt, **request):
        lengths.append((target.length, draft.length))
        made = generate(prompt, **request)
        reads.append((target.num_read, made.stats.num_draft_passes, draft.num_read))
        return made

    monkeypatch.setattr(counted, "generate", watched)
    prompt = BenchmarkPrompt("code", "", pipeline.tokenizer.encode(SETS["code"][0]).ids)
    some = bench.settings([drafter], [2])
    bench.measure(counted, [prompt], some, 2, max_new_tokens=12)
    assert lengths == [(0, 0)] * len(lengths)
    assert len(reads) == 2 + 2 * 3
    assert sum(passes > 0 for _, passes, _ in reads) == 3
    for by_target, passes, by_draft in reads:
        assert by_target >= len(prompt.tokens) + 11
        assert by_draft >= (len(prompt.tokens) if passes else 0)


def test_identical_draft_has_full_acceptance(self_draft):
    prompt = self_draft.tokenizer.encode("def read(path):").ids
    text = self_draft.generate(prompt, 40, num_draft_tokens=0, ignore_eos=True).tokens
    for sampling in (Sampling(), Sampling(temperature=0.8, top_k=20)):
        found = bench_acceptance.acceptances(self_draft, prompt, text, sampling)
        assert found == pytest.approx([1.0] * 40, abs=1e-6)


def test_alpha_is_distribution_overlap_at_each_position(pipeline):
    prompt = pipeline.tokenizer.encode("class Parser:").ids
    sampling = Sampling(temperature=0.9, top_p=0.95)
    text = pipeline.generate(prompt, 20, 0.9, seed=1, num_draft_tokens=0, ignore_eos=True).tokens
    found = bench_acceptance.acceptances(pipeline, prompt, text, sampling)
    greedy = bench_acceptance.acceptances(pipeline, prompt, text, Sampling())
    for place in (0, 7, 17, 19):
        read = [*prompt, *text[:place]]
        distributions, choices = [], []
        for model in (pipeline.target, pipeline.draft):
            model.truncate(0)
            logits = model.forward(read)[-1].array()
            choices.append(logits.argmax())
            distributions.append(probabilities(logits, sampling, History(read)).row(len(logits)))
        assert found[place] == pytest.approx(float(np.minimum(*distributions).sum()), abs=1e-5)
        assert greedy[place] == (choices[0] == choices[1])
    assert len(found) == 20


@pytest.mark.parametrize(("context_length", "places"), [(99, 20), (15, 6), (10, 1), (9, 0), (4, 0)])
def test_alpha_is_measured_within_draft_context(context_length, places):
    distribution = hashed_distribution(1, 5)
    draft = TableModel(distribution, 5, context_length)
    entry = SimpleNamespace(
        context_length=context_length, vocab_size=5, encoder=None, mask_token=None, acceptance=None,
        reads_hidden=False,
    )  # fmt: skip
    pair = SimpleNamespace(
        bundle=SimpleNamespace(draft=entry, readings=lambda: None),
        target=TableModel(distribution, 5),
        draft=draft,
    )
    text = [i % 5 for i in range(20)]
    for sampling in (Sampling(), Sampling(temperature=1.0)):
        found = bench_acceptance.acceptances(pair, [1] * 10, text, sampling)
        assert found == pytest.approx([1.0] * places)


def test_expected_rounds_of_a_text_follow_acceptance():
    assert text_rounds([0.5, 0.5], [1.0, 1.5, 2.0], 1, greedy=False) == 2.0
    assert text_rounds([0.5, 0.5], [1.0, 1.5, 2.0], 1, greedy=True) == 1.0
    assert text_rounds([0.25], [1.0, 1.5], 2, greedy=False) == pytest.approx(1.5 + 0.75 * 1.5)
    assert text_rounds([0.25], [1.0, 1.5], 2, greedy=True) == pytest.approx(1.5 + 0.75 * 1.0)
    assert text_rounds([], [2.0], 7, greedy=True) == 14
    rounds, n = [1.0, 1.2, 1.4, 1.6], 4000
    expected = n / speedup(0.7, 3, 0.0, rounds[3])
    found = text_rounds([0.7] * 3, [1.0, 1.6, 1.6, 1.6], n, greedy=False)
    assert found == pytest.approx(expected, rel=1e-3)


def test_round_cost_includes_host_cost_per_token():
    costs = RoundCosts([1.0, 1.1, 1.3], [0.0, 0.1, 0.2], prefill=0.0, token=0.1)
    found = model_rounds(costs, [0.5, 0.5])
    assert found == pytest.approx([1.1, 1.2 + 0.15, 1.5 + 0.175])
    assert acceptance_chances([0.9, None], 0.6, 3) == [0.9, 0.6, 0.6]


def test_predictions_match_under_model_assumptions():
    plain, model = figures(measured(runs(draft=0.1, verify=1.2, accepted=80)))
    assert (plain.speedup, plain.loses, plain.with_costs) == (1, False, None)
    assert model.speedup == pytest.approx(180 / 130)
    # A text of 180 tokens ends with a round of which one token may be too many.
    assert model.with_costs_error == pytest.approx(0, abs=5e-3)
    assert model.by_position_error == pytest.approx(0)
    assert model.theorem_3_8 == pytest.approx(1.8 / 1.1)
    assert model.theorem_3_8_error == pytest.approx(1.3 / 1.1 - 1)
    assert model.run_level == pytest.approx(1.8 / 1.1)
    assert model.run_level_error == pytest.approx(1.3 / 1.1 - 1)
    assert model.held_out_speedup == model.speedup
    assert model.held_out_error == pytest.approx(0, abs=5e-3)
    assert (model.draft_cost, model.verify_cost, model.host_cost) == pytest.approx((0.1, 1.2, 0))


def test_a_prediction_with_costs_counts_the_host_of_plain_rounds():
    _, model = figures(measured(runs(0.1, 1.2, 80, sampling=0.2, plain_host=0.25)))
    assert model.with_costs == pytest.approx(1.8 * 1.25 / 1.5, abs=5e-3)
    assert model.with_costs_error == pytest.approx(0, abs=5e-3)


def test_a_prediction_with_costs_is_of_texts_of_the_measured_lengths():
    found = measured(runs(draft=0.1, verify=1.2, accepted=80))
    short = {key: bench.BenchmarkText(text.tokens, 1) for key, text in found.texts.items()}
    _, greedy = figures(bench.BenchmarkRuns(found.runs, short))
    assert greedy.with_costs == pytest.approx(1)  # a round for one token drafts none
    (_, sampled) = summarize(
        bench.BenchmarkRuns(found.runs, short), PROMPTS, {0: [0.8], 1: [0.8]}, None, False
    )
    assert sampled.with_costs == pytest.approx(1 / 1.3)


def test_components_sum_to_time_per_token():
    _, model = figures(measured(runs(draft=0.1, verify=1.2, accepted=80, sampling=0.2, rest=0.1)))
    parts = (model.draft_seconds, model.verify_seconds, model.sampling_seconds, model.rest_seconds)
    assert sum(parts) == pytest.approx(model.seconds_per_token)
    assert model.sampling_seconds == pytest.approx(0.2 * 100 / 180)


def test_losses_are_reported():
    found = figures(LOSING)
    assert [one.loses for one in found] == [False, True]
    assert losing(found) == [
        "code: speculative decoding is SLOWER with every setting; use plain decoding"
    ]
    assert losing(figures(measured(runs(draft=0.1, verify=1.2, accepted=80)))) == []


def test_excluded_share_is_reported():
    found = measured(runs(draft=0.1, verify=1.2, accepted=80))
    short = {key: bench.BenchmarkText(text.tokens, 45) for key, text in found.texts.items()}
    plain, _ = figures(bench.BenchmarkRuns(found.runs, short))
    assert plain.loop_share == pytest.approx(0.75)


def test_overall_speedup_is_weighted_by_time():
    some = [
        TimedRun(Setting("model", 1), prompt, repeat, Stats(other_seconds=seconds), ratio)
        for repeat in (1, 2, 3)
        for prompt, seconds, ratio in ((0, 9.0 * repeat, 1.0), (1, 1.0 * repeat, 3.0))
    ]
    assert overall_speedup(some) == pytest.approx((9 + 3) / 10)


def test_statistics_are_reported_per_prompt_set():
    found = measured(runs(draft=0.1, verify=1.2, accepted=80))
    sets = [BenchmarkPrompt("a", "", [1]), BenchmarkPrompt("b", "", [1])]
    names = [one.set_name for one in summarize(found, sets, {0: [1.0], 1: [0.0]}, None, True)]
    assert names == ["a", "a", "b", "b"]
    assert len(PROMPTS) == 2
