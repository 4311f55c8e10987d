"""Measurement of pass costs with a scripted clock."""

import random
import time
from types import SimpleNamespace

import numpy as np
import pytest

from specedge.runtime.decoding.verification import Draft
from specedge.runtime.drafters.draft_model import DraftModel, ParallelDraftModel
from specedge.runtime.planning import measurement
from specedge.runtime.planning.measurement import measure, on_grid
from specedge.runtime.sampling.logits import Logits


class Clock:
    """A clock that passes of `Scripted` models alone advance."""

    now = 0.0


class Scripted:
    """Model with pass times given as a function of pass length."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds
        self.cache = SimpleNamespace(extend=self.extend)
        self.length, self.passes = 0, []

    def extend(self, tokens):
        self.length += len(tokens)

    def forward(self, tokens, num_rows=None):
        self.passes.append(len(tokens))
        self.prefill(tokens)
        return Logits(np.zeros((num_rows or len(tokens), 7), np.float32))

    def prefill(self, tokens):
        self.extend(tokens)
        self.clock.now += self.seconds(len(tokens))

    def reuse(self, tokens):
        self.length = min(self.length, len(tokens))
        return self.length

    def truncate(self, length):
        self.length = length


@pytest.fixture
def clock(monkeypatch, tmp_path):
    found = Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: found.now)
    monkeypatch.setattr(measurement, "TASKS", tmp_path)
    return found


@pytest.fixture
def timed_rounds(clock, monkeypatch):
    """K and mode of the rounds that are timed, and the host work that is added to each."""
    current = SimpleNamespace(k=0, is_greedy=True, host_seconds=lambda: 0.0)

    class Plan(measurement.FixedPlan):
        def __init__(self, drafter, k):
            current.k = k
            super().__init__(drafter, k)

    class Decoder(measurement.SpeculativeDecoder):
        def rounds(self, tokens, sampling, *limits):
            current.is_greedy = sampling.greedy
            for round_ in super().rounds(tokens, sampling, *limits):
                clock.now += current.host_seconds()
                yield round_

    monkeypatch.setattr(measurement, "FixedPlan", Plan)
    monkeypatch.setattr(measurement, "SpeculativeDecoder", Decoder)
    return current


def scripted(clock, target=lambda t: 10 + t, draft=lambda t: 2 + t / 10):
    """Target, drafter and context length."""
    return Scripted(clock, target), DraftModel(Scripted(clock, draft)), 256


def test_measured_costs_equal_pass_times_on_ten_percent_grid(clock):
    costs = measure(*scripted(clock), 16).costs
    assert (costs.origin, costs.lengths, costs.rows) == ("load", (64,), (1, 2, 3, 5, 9, 17))
    target = costs.greedy.target[0]
    assert target[0] == on_grid(11)
    assert [cost - target[0] for cost in target[1:]] == pytest.approx(
        [on_grid(t - 1) for t in costs.rows[1:]]
    )
    drafted = [on_grid(2.2) + (k - 1) * on_grid(2.1) for k in (1, 2, 4, 8, 16)]
    assert costs.greedy.draft[0] == pytest.approx(drafted)
    assert costs.sampled == costs.greedy
    assert (costs.greedy.host, costs.greedy.token) == (0.0, 0.0)


class Launched(Scripted):
    """Draft model that drafts 3 or more tokens by launches of a multi-step graph of 4 steps."""

    has_draft_graphs = True

    def draft(self, tokens, request, hidden=None):
        count = request.max_tokens
        if count < 3:
            return None
        self.extend([*tokens, *range(count - 1)])
        self.clock.now += 5 * -(-count // 4)
        return Draft([1] * count)  # the target's tokens are 0


def test_cost_of_a_draft_is_that_of_its_launches(clock):
    target, _, context = scripted(clock)
    drafter = DraftModel(Launched(clock, lambda t: 2.0))
    costs = measure(target, drafter, context, 16).costs
    drafted = [2.0, 4.0, 5.0, 10.0, 20.0]
    differences = [on_grid(seconds - drafted[0]) for seconds in drafted]
    assert costs.greedy.draft[0] == pytest.approx([on_grid(2.0) + x for x in differences])


@pytest.mark.parametrize("value", [3e-7, 0.0012, 0.9, 17.0])
def test_costs_are_rounded_to_a_grid_of_ten_percent(value):
    rounded = on_grid(value)
    assert rounded == pytest.approx(value, rel=0.05)
    assert on_grid(rounded * 1.04) == on_grid(rounded / 1.04) == rounded
    assert on_grid(0.0) == 0.0


def test_outliers_do_not_affect_costs(clock):
    calm = measure(*scripted(clock), 4).costs
    slow = iter([50.0] * 9 + [0.0] * 21 + [90.0])
    disturbed = scripted(clock, target=lambda t: 10 + t + next(slow, 0.0))
    assert measure(*disturbed, 4).costs.greedy.target == calm.greedy.target


def test_costs_are_monotonic_in_pass_length(clock):
    target = measure(*scripted(clock, target=lambda t: 20 - t), 8).costs.greedy.target[0]
    assert list(target) == sorted(target)


def test_passes_timed_by_the_self_test_are_not_repeated(clock):
    target, *others = scripted(clock)
    costs = measure(target, *others, 16, samples={1: 11.0, 2: 12.0, 5: 15.0, 18: 28.0}).costs
    assert costs.rows == (1, 2, 5, 18)
    assert costs.greedy.target[0][2] == pytest.approx(on_grid(11) + on_grid(4))
    assert set(target.passes) <= {1, 3}  # of plain and of drafted rounds
    assert len(target.passes) == 8


def test_drafts_of_slow_models_are_timed_for_two_invariant_pass_lengths(clock):
    target, *others = scripted(clock)
    costs = measure(target, *others, 16, samples={1: 11.0, 2: 12.0}).costs
    assert costs.rows == (1, 2)
    assert costs.greedy.draft == ((on_grid(2.2),),)


def test_fast_models_are_timed_in_sweeps(clock):
    target, *others = scripted(clock, target=lambda t: 1e-3, draft=lambda t: 1e-4)
    costs = measure(target, *others, 4, samples={1: 9e-3, 2: 9e-3, 5: 9e-3}).costs
    assert costs.greedy.target[0][0] == on_grid(1e-3)
    assert target.passes.count(5) >= measurement.MIN_SWEEPS


def test_a_disturbed_pass_costs_at_most_as_much_as_a_longer_one(clock):
    disturbed = scripted(clock, target=lambda t: 10 + t + 9 * (t == 3))
    costs = measure(*disturbed, 16).costs
    assert costs.rows[2:4] == (3, 5)
    assert costs.greedy.target[0][2] == costs.greedy.target[0][3] == on_grid(11) + on_grid(4)


class Disturbed(Scripted):
    """Model whose passes are delayed at random, by up to `max_delay` seconds."""

    def __init__(self, clock, seconds, max_delay, seed):
        rng = random.Random(seed)
        super().__init__(clock, lambda t: seconds(t) + rng.uniform(0, max_delay))


@pytest.fixture
def calm_draft(clock):
    """Costs of drafts without disturbances."""
    return measure(*scripted(clock), 16).costs.greedy.draft


def test_disturbed_target_passes_hardly_affect_the_cost_of_a_draft(clock):
    """A target pass takes 12 to 21 seconds; a draft pass takes 1."""
    ratios = []
    for seed in range(40):
        target = Disturbed(clock, lambda t: 12 + t / 10, 9, seed)
        drafter = DraftModel(Scripted(clock, lambda t: 1.0))
        costs = measure(target, drafter, 256, 16).costs
        ratios += [mode.draft[0][0] for mode in (costs.greedy, costs.sampled)]
    assert min(ratios) >= 0.95
    assert sum(ratio <= 1.3 for ratio in ratios) >= 0.9 * len(ratios)
    assert max(ratios) <= 2.1


def test_a_disturbed_greedy_draft_costs_at_most_as_much_as_a_sampled_one(
    clock, timed_rounds, calm_draft
):
    disturbed = scripted(clock, draft=lambda t: 2 + t / 10 + 5 * timed_rounds.is_greedy)
    costs = measure(*disturbed, 16).costs
    assert costs.greedy.draft == costs.sampled.draft == calm_draft


def test_disturbed_plain_rounds_hardly_affect_host_work(clock, timed_rounds, calm_draft):
    """Sampled plain rounds take 30 seconds of host work, others none."""
    timed_rounds.host_seconds = lambda: 30 * (timed_rounds.k == 0 and not timed_rounds.is_greedy)
    costs = measure(*scripted(clock), 16).costs
    assert costs.sampled.token <= 2.3
    assert costs.greedy.draft == calm_draft


def test_a_later_token_costs_at_most_as_much_as_the_first(clock, timed_rounds):
    """Rounds of more than one token are disturbed."""
    disturbed = scripted(clock, draft=lambda t: 2 + t / 10 + 9 * (timed_rounds.k > 1))
    costs = measure(*disturbed, 16).costs
    assert costs.greedy.draft[0] == pytest.approx([on_grid(2.2) * k for k in (1, 2, 4, 8, 16)])


def test_host_work_is_not_a_cost_of_drafts(clock, monkeypatch):
    """Reading the clock takes half a second; a draft reads it twice."""

    def read():
        clock.now += 0.5
        return clock.now

    monkeypatch.setattr(time, "perf_counter", read)
    costs = measure(*scripted(clock), 16).costs
    assert costs.greedy.host > 1
    assert costs.greedy.draft[0][0] == pytest.approx(2.2 + 2 * 0.5, rel=0.05)


@pytest.mark.parametrize(("slowdown", "attributed"), [(0.5, 0.5), (50, 2.2)])
def test_a_target_pass_that_takes_longer_after_a_draft_is_a_cost_of_it(clock, slowdown, attributed):
    follows_draft = False

    def draft(t):
        nonlocal follows_draft
        follows_draft = True
        return 2 + t / 10

    def target(t):
        nonlocal follows_draft
        seconds = 10 + t + slowdown * follows_draft
        follows_draft = False
        return seconds

    costs = measure(*scripted(clock, target, draft), 16).costs
    assert costs.greedy.draft[0][0] == pytest.approx(2.2 + attributed, rel=0.05)
    assert costs.greedy.target == measure(*scripted(clock), 16).costs.greedy.target


def waited(tmp_path, share, clock):
    """Let two threads of the process wait for a core for a share of the time."""
    for thread in ("7", "8"):
        (tmp_path / thread).mkdir()

    class Statistics:
        def glob(self, pattern):
            for path in tmp_path.glob("*"):
                (path / "schedstat").write_text(f"9 {round(share / 2 * clock.now * 1e9)} 3\n")
            (tmp_path / "7" / "ended").touch()
            return [*tmp_path.glob(pattern), tmp_path / "9" / "schedstat"]

    return Statistics()


@pytest.mark.parametrize(("share", "busy"), [(0.3, True), (0.2, False)])
@pytest.mark.parametrize("samples", [None, {1: 11.0, 2: 12.0, 5: 15.0, 18: 28.0}])
def test_threads_that_wait_for_a_core_are_reported(
    clock, tmp_path, monkeypatch, share, busy, samples
):
    monkeypatch.setattr(measurement, "TASKS", waited(tmp_path, share, clock))
    clock.now = 1000.0  # before the measurement
    target, *others = scripted(clock)
    assert measure(target, *others, 16, samples=samples).busy == busy
    num_sweeps = measurement.BUSY_SWEEPS if busy else measurement.MIN_SWEEPS
    assert target.passes.count(17) == (0 if samples else num_sweeps)


def test_a_disturbed_draft_is_reported(clock):
    turn = iter(range(10**6))
    disturbed = scripted(clock, draft=lambda t: 1 + 9 * (next(turn) % 60 > 30))
    assert measure(*disturbed, 4).busy


def test_busy_cores_are_reported(clock):
    turn = iter(range(10**6))
    assert measure(*scripted(clock, target=lambda t: 1 + 9 * (next(turn) // 5 % 3 > 0)), 4).busy
    assert not measure(*scripted(clock), 4).busy


def test_a_bundle_without_a_draft_model_has_target_costs_only(clock):
    models = scripted(clock)
    costs = measure(models[0], None, 512, 4).costs
    assert (costs.greedy.draft, costs.greedy.prefill) == ((), ())
    assert costs.greedy.target == measure(*models, 4).costs.greedy.target


@pytest.mark.parametrize("context", [10, 11, 20])
def test_short_contexts_are_measured_within_them(clock, context):
    target, draft = (Scripted(clock, lambda t: 1.0) for _ in range(2))
    longest = []
    for model in (target, draft):
        model.extend = lambda tokens, model=model, real=model.extend: (
            real(tokens), longest.append(model.length)
        )  # fmt: skip
        model.cache = SimpleNamespace(extend=model.extend)
    measure(target, DraftModel(draft), context, 16)
    assert max(longest) <= context
    assert target.length == draft.length == 0


def test_host_costs_are_measured_by_mode():
    class Fast(Scripted):
        def prefill(self, tokens):
            self.extend(tokens)

        def forward(self, tokens, num_rows=None):
            self.extend(tokens)
            return Logits(np.zeros((num_rows or len(tokens), 200_000), np.float32))

    drafter = DraftModel(Fast(None, None))
    costs = measure(Fast(None, None), drafter, 64, 8, seconds=1e-9).costs
    assert costs.sampled.host == costs.greedy.host > 0
    assert costs.sampled.token > costs.greedy.token == 0


@pytest.mark.parametrize("samples", [None, {1: 11.0, 2: 12.0, 5: 15.0, 18: 28.0}])
def test_a_draft_in_one_pass_costs_little_more_for_more_tokens(clock, samples):
    """Its pass takes 2 seconds and 0.05 per row; as all tokens are accepted, it has 2K rows."""
    target, draft, context = scripted(clock, draft=lambda t: 2 + t / 20)
    drafter = ParallelDraftModel(draft.model, mask_token=1)
    costs = measure(target, drafter, context, 16, samples=samples).costs
    (of_k,) = costs.greedy.draft
    by_k = dict(zip([t - 1 for t in costs.rows[1:]], of_k, strict=True))
    assert by_k[1] == pytest.approx(2.1, rel=0.1)
    assert by_k[4] == pytest.approx(2.4, rel=0.1)
    assert by_k[max(by_k)] == pytest.approx(3.6, rel=0.1)
