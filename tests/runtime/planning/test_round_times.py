"""Round times that contradict a cost table: only the ratio between drafters does."""

import dataclasses

import pytest

from specedge.bundle import store
from specedge.runtime.decoding.protocols import Round
from specedge.runtime.planning import plans
from specedge.runtime.planning.cost_table import Measurement
from specedge.runtime.planning.planner import ChoiceReason, RoundChoice
from specedge.runtime.planning.plans import RoundTimes, create_round_times
from specedge.runtime.requests import loader
from specedge.sampling_options import Sampling
from virtual import untuned

LENGTH = 64
COSTS = dataclasses.replace(untuned(), lengths=(LENGTH,))
PLAIN = RoundChoice("plain", 0, ChoiceReason.PLAIN, 1.0, 1.0, 1.0)
DRAFTED = RoundChoice("model", 4, ChoiceReason.GAIN, 3.0, 1.6, 1.0)


def times(plain, drafted, count=plans.MIN_TIMED_ROUNDS, length=LENGTH, num_drafted=4):
    """Rounds that take a factor of their predicted time, with one outlier of each drafter."""
    recorded = RoundTimes(COSTS, greedy=True)
    for i in range(count):
        outlier = 9 if i == 3 else 1
        recorded.record(PLAIN, Round([1], 0, 0), length, plain * 1.0 * outlier)
        draft = Round([1, 2], num_drafted, 1)
        recorded.record(DRAFTED, draft, length, drafted * 1.6 * outlier)
    return recorded


@pytest.mark.parametrize(
    ("plain", "drafted", "contradicts"),
    [
        *((1.0, 1.3, True), (1.3, 1.0, True), (2.0, 3.0, True)),
        *((1.0, 1.0, False), (1.0, 1.2, False), (3.0, 3.0, False), (0.4, 0.4, False)),
    ],
)
def test_the_ratio_between_drafters_contradicts_a_table(plain, drafted, contradicts):
    assert times(plain, drafted).contradicts_table == contradicts


@pytest.mark.parametrize(
    "rounds",
    [
        {"count": plans.MIN_TIMED_ROUNDS - 1},
        {"length": plans.MAX_LENGTH_RATIO * LENGTH + 1},
        {"num_drafted": 3},
    ],
)
def test_few_long_and_shortened_rounds_contradict_nothing(rounds):
    assert not times(1.0, 9.0, **rounds).contradicts_table


def test_catch_ups_contradict_nothing():
    recorded = times(1.0, 1.0)
    late = dataclasses.replace(DRAFTED, drafter="chain", catch_up_seconds=1.0)
    for _ in range(plans.MIN_TIMED_ROUNDS):
        recorded.record(late, Round([1, 2], 4, 1), LENGTH, 99.0)
    assert not recorded.contradicts_table


def test_host_work_per_token_is_predicted():
    mode = dataclasses.replace(COSTS.sampled, token=1.0)
    recorded = RoundTimes(dataclasses.replace(COSTS, sampled=mode), greedy=False)
    for _ in range(plans.MIN_TIMED_ROUNDS):
        recorded.record(PLAIN, Round([1], 0, 0), LENGTH, 2.0)
        recorded.record(DRAFTED, Round([1, 2, 3], 4, 2), LENGTH, 4.6)
    assert not recorded.contradicts_table


@pytest.fixture
def constant_rounds(monkeypatch):
    """Let every round take the same time, and few of them suffice."""
    record = RoundTimes.record
    monkeypatch.setattr(RoundTimes, "record", lambda self, *round_: record(self, *round_[:-1], 1.0))
    monkeypatch.setattr(plans, "MIN_TIMED_ROUNDS", 2)


PROMPT = "class A:\n    def f(self):\n"


def loaded(monkeypatch, costs, **options):
    """A load that measures a table, unless a reliable one is stored."""
    pytest.importorskip("onnxruntime", reason="needs the cpu or gpu extra")
    import specedge

    monkeypatch.setattr(loader, "measure", lambda *_, **__: Measurement(costs, busy=False))
    return specedge.load(store.embedded_folder(), **options)


def drafters_of(generation):
    return {round_.drafter for round_ in generation.rounds}


# Rounds that all take equally long contradict costs that grow with the length of a pass.
GROWING = dataclasses.replace(
    untuned(9.0),
    lengths=(LENGTH,),
    **dict.fromkeys(
        ("greedy", "sampled"),
        dataclasses.replace(
            untuned(9.0).greedy, target=((1.0, *(1.6 + 0.01 * i for i in range(16))),)
        ),
    ),
)
OTHER = dataclasses.replace(untuned(0.5), lengths=(LENGTH,))


def test_a_request_whose_rounds_contradict_the_costs_has_the_next_load_measure(
    replaced_costs, constant_rounds, monkeypatch
):
    with loaded(monkeypatch, GROWING) as pipeline:
        assert {"plain", "suffix"} <= drafters_of(pipeline.generate(PROMPT, 100))
        assert pipeline.costs.table.greedy.target == GROWING.greedy.target  # unchanged by requests
    with loaded(monkeypatch, OTHER) as pipeline:
        assert pipeline.costs.table.greedy.target == OTHER.greedy.target
        assert "were measured again" in pipeline.notes[-1]


@pytest.mark.parametrize(
    "options", [{"logprobs": 1}, {"regex": "[0-9, ]+"}, {"logit_bias": {9: 1}}]
)
def test_requests_with_other_host_work_contradict_nothing(
    replaced_costs, constant_rounds, monkeypatch, options
):
    with loaded(monkeypatch, GROWING) as pipeline:
        assert {"plain", "suffix"} <= drafters_of(pipeline.generate(PROMPT, 100, **options))
    with loaded(monkeypatch, OTHER) as pipeline:
        assert pipeline.costs.table.greedy.target == GROWING.greedy.target


def test_requests_beside_others_contradict_nothing(replaced_costs, constant_rounds, monkeypatch):
    with loaded(monkeypatch, GROWING, slots=2) as pipeline, pipeline.stream("def f(", 4):
        assert {"plain", "suffix"} <= drafters_of(pipeline.generate(PROMPT, 100))
    with loaded(monkeypatch, OTHER) as pipeline:
        assert pipeline.costs.table.greedy.target == GROWING.greedy.target


@pytest.mark.parametrize("sampling", [Sampling(top_p=0.9), Sampling(1.0, top_k=4)])
def test_times_of_filtered_distributions_are_not_compared(pipeline, sampling):
    with pipeline.stream("def f(", 4) as request:
        assert create_round_times(request.plan, Sampling(), False) is not None
        assert create_round_times(request.plan, sampling, False) is None
    with pipeline.stream("def f(", 4, num_draft_tokens=0) as request:
        assert create_round_times(request.plan, Sampling(), False) is None
