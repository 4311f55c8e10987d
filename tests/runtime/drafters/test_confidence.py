"""Drafts that end where the draft model is not confident: exact, and reproducible."""

import numpy as np
import pytest

import virtual
from cases import exhaustive
from exact import ContinuedText, distribution_of_strings, joint_distribution
from fakes import HeadTable, StatesTable, TableModel, hashed_distribution, of_rows, quarters
from specedge.bundle.manifest import CONFIDENCE_BOUNDS, MeasuredAcceptance
from specedge.runtime.decoding.decoding import SpeculativeDecoder
from specedge.runtime.decoding.protocols import ModelDrafter, RoundPlan, run_operations
from specedge.runtime.decoding.timing import Stopwatch
from specedge.runtime.decoding.verification import Draft, DraftRequest
from specedge.runtime.drafters.draft_head import DraftHead
from specedge.runtime.drafters.draft_model import DraftModel, largest_probability
from specedge.runtime.planning.planner import Planner
from specedge.runtime.planning.plans import AutoPlan, FixedPlan, ReplayPlan, summarize_rounds
from specedge.runtime.sampling.history import History
from specedge.runtime.sampling.logits import Row
from specedge.sampling_options import Sampling
from virtual import table

PROMPT = (0, 1)
OTHER_SEEDS = ((3, 4), (7, 8))
RATES = tuple(np.linspace(0.1, 1, len(CONFIDENCE_BOUNDS) + 1))
ACCEPTANCE = MeasuredAcceptance(0.6, 0.6, RATES, RATES)


def confident(distribution):
    return DraftModel(TableModel(distribution), acceptance=ACCEPTANCE)


def confident_head(distribution):
    return DraftHead(HeadTable(of_rows(distribution)), acceptance=ACCEPTANCE)


def decoder_of(drafter, target, k, is_block):
    """A decoder of one round, whose drafter may read the target's states of all tokens but one."""
    plan = EachRule(drafter, k, is_block)
    if drafter.observer is None:
        return SpeculativeDecoder(TableModel(target), plan, Stopwatch())
    return ContinuedText(SpeculativeDecoder(StatesTable(target), plan, Stopwatch()))


class EachRule(FixedPlan):
    """A plan with or without block verification."""

    def __init__(self, drafter, k, is_block):
        super().__init__(drafter, k)
        self._round_plan = RoundPlan("model", drafter, k, is_block, 0.5)


@pytest.mark.parametrize(
    ("k", "seeds"),
    [(2, (5, 6)), exhaustive(3, (5, 6)), *(exhaustive(k, s) for s in OTHER_SEEDS for k in (2, 3))],
)
@pytest.mark.parametrize("is_block", [False, True])
@pytest.mark.parametrize("make_drafter", [confident, confident_head])
def test_drafts_that_end_early_keep_the_joint_distribution(
    k, is_block, seeds, make_drafter, monkeypatch
):
    target, draft, lengths = quarters(seeds[0], True), unequal(seeds[1]), set()

    def make():
        return decoder_of(Recording(make_drafter(draft), lengths), target, k, is_block)

    assert joint_distribution(make, monkeypatch, PROMPT) == distribution_of_strings(target, PROMPT)
    assert lengths >= {1, 2}


class Wrapped(ModelDrafter):
    """A drafter around another one."""

    name = "model"
    is_sampled = True

    def __init__(self, drafter):
        self.drafter, self.truncate = drafter, drafter.truncate

    @property
    def observer(self):
        return self.drafter.observer


class Recording(Wrapped):
    """Records the lengths of drafts."""

    def __init__(self, drafter, lengths):
        super().__init__(drafter)
        self.lengths = lengths

    def draft(self, request):
        draft = yield from self.drafter.draft(request)
        self.lengths.add(len(draft.tokens))
        return draft


def unequal(seed):
    """Distributions of a draft, some of which are confident."""
    rows = np.array([(4, 2, 2), (2, 2, 4), (1, 1, 6), (6, 1, 1), (2, 4, 2)]) / 8

    def distribution(text):
        return rows[np.random.default_rng([seed, len(text), *text]).integers(len(rows))]

    return distribution


class DroppedToken(Wrapped):
    """Drops a token that was drawn because of its own probability."""

    def draft(self, request):
        draft = yield from self.drafter.draft(request)
        for i in range(len(draft.tokens)):
            if draft.prob(i) < 0.3:
                return Draft(draft.tokens[:i], draft.probs[:i])
        return draft


@pytest.mark.parametrize("is_block", [False, True])
@pytest.mark.parametrize("make_drafter", [confident, confident_head])
def test_a_token_dropped_for_its_own_probability_changes_the_distribution(
    is_block, make_drafter, monkeypatch
):
    target, draft = quarters(9, True), unequal(10)

    def make():
        return decoder_of(DroppedToken(make_drafter(draft)), target, 2, is_block)

    assert joint_distribution(make, monkeypatch, PROMPT) != distribution_of_strings(target, PROMPT)


def test_confidence_is_the_product_of_the_rates_of_drawn_tokens():
    def rows(text):
        return [0.9, 0.05, 0.05] if len(text) < 4 else [0.4, 0.3, 0.3]

    def count(min_confidence, k=8):
        request = DraftRequest(History((0, 1)), k, Sampling(), np.zeros(k), min_confidence)
        return len(run_operations(confident(rows).draft(request)).tokens)

    assert largest_probability(Row(np.log([0.9, 0.05, 0.05]))) == pytest.approx(0.9)
    high, low = RATES[5], RATES[2]
    assert count(0.0) == 8
    assert count(high**2 * low + 1e-9) == 3
    assert count(high**2 * low - 1e-9) == 4
    assert count(high**2 + 1e-9) == 2
    assert count(1.0) == 1
    assert count(0.0, 2) == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("is_head", [False, True])
def test_planned_drafts_end_early_and_are_replayed(temperature, is_head):
    target, draft = hashed_distribution(1, 6, 2.0), hashed_distribution(1, 6, 1.6)

    def model():
        if is_head:
            return DraftHead(HeadTable(tokens_of_rows(draft)), acceptance=ACCEPTANCE)
        return DraftModel(TableModel(draft), acceptance=ACCEPTANCE)

    def run(plan, count=120):
        decoder = SpeculativeDecoder(StatesTable(target), plan, Stopwatch())
        return list(decoder.rounds((0, 1), Sampling(temperature), 3, count))

    def auto():
        return AutoPlan(Planner(table(0.15), temperature, 8), {"model": model()})

    first = run(auto())
    assert len({round_.num_drafted for round_ in first if round_.min_confidence}) > 2
    plan = summarize_rounds(first)
    assert run(ReplayPlan(plan, {"model": model()})) == first
    for count in (20, 41):
        tokens = [token for round_ in run(auto(), count) for token in round_.tokens]
        assert tokens[:count] == [t for round_ in first for t in round_.tokens][:count]


def tokens_of_rows(distribution):
    """A head's distribution: a target's of the text (0, 1), which the rows continue."""
    return lambda rows: distribution((0, *(token for _, token in rows)))


def test_a_shorter_request_is_a_prefix_of_a_longer_one_without_blocks():
    """The planner counts the cost of each draft, which must not depend on the request's end."""
    sampling = Sampling(0.7, lenience=0.99)
    for seed in range(0, 60, 2):
        rows = hashed_distribution(seed, 3)

        def text(count, seed=seed, rows=rows):
            costs = virtual.table(prior={"model": 0.95})
            plan = AutoPlan(Planner(costs, 0.7), {"model": DraftModel(TableModel(rows))})
            decoder = SpeculativeDecoder(TableModel(rows), plan, Stopwatch())
            rounds = decoder.rounds((1, 2), sampling, seed, count)
            return [token for round_ in rounds for token in round_.tokens][:count]

        whole = text(40)
        assert all(text(count) == whole[:count] for count in range(3, 40))


def test_without_rates_drafts_have_k_tokens():
    plain = DraftModel(TableModel(unequal(10)))
    request = DraftRequest(History((0, 1)), 5, Sampling(), np.zeros(5), 0.9)
    assert len(run_operations(plain.draft(request)).tokens) == 5
