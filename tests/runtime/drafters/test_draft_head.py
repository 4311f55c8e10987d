"""Draft heads: rows of hidden states and tokens, rollback, windows, and exactness."""

from collections import Counter
from itertools import product

import numpy as np
import pytest

from exact import ContinuedText, distribution_of_strings, joint_distribution
from fakes import (
    FILTERED,
    DraftingHeadTable,
    HeadTable,
    StatesTable,
    Sure,
    filtered,
    fused_state,
    hashed_distribution,
    head_state,
    of_rows,
    quarters,
    target_state,
)
from grammars import END, constraint
from specedge.runtime.decoding import verification
from specedge.runtime.decoding.decoding import SpeculativeDecoder
from specedge.runtime.decoding.near_ties import NearTieResolver
from specedge.runtime.decoding.protocols import RoundPlan
from specedge.runtime.decoding.random_numbers import GumbelNoise
from specedge.runtime.decoding.timing import Stopwatch, TimedModel
from specedge.runtime.decoding.verification import DraftRequest, draw, draw_draft
from specedge.runtime.drafters.chain import Chain
from specedge.runtime.drafters.draft_head import DraftHead
from specedge.runtime.drafters.suffix import Suffix, SuffixBeforeModel
from specedge.runtime.planning.plans import FixedPlan
from specedge.runtime.sampling.history import History
from specedge.runtime.sampling.probabilities import probabilities, row_distribution
from specedge.sampling_options import Sampling

PROMPT = (0, 1, 0, 2)
TARGET = hashed_distribution(1, 3)
HEAD = of_rows(hashed_distribution(2, 3))
SAMPLED = Sampling(1.0)


def head(distribution=HEAD, window=64, chunk_length=1000, **limits):
    return DraftHead(HeadTable(distribution, window, chunk_length), **limits)


def decoder(drafter, k, distribution=TARGET, target=None, **options):
    target = target or StatesTable(distribution)
    return SpeculativeDecoder(target, FixedPlan(drafter, k), Stopwatch(), **options)


def tokens_of(one, prompt=PROMPT, sampling=SAMPLED, seed=0, count=24):
    rounds = list(one.rounds(prompt, sampling, seed, count))
    return [token for round_ in rounds for token in round_.tokens][:count], rounds


def rows_of(text, start=0):
    """The rows of a head that has read a text: the state of each token and the token after it."""
    states = fused_state(np.array([target_state((*text[:i],)) for i in range(1, len(text))]))
    return [(int(states[i, 0]), text[i + 1]) for i in range(start, len(text) - 1)]


def recompute(draft, text, num_committed, uniforms, sampling=SAMPLED, start=0, head=HEAD):
    """A draft by the definition: all states of the target, and the head's own after them."""
    rows, further = rows_of(text[:num_committed], start), list(text[num_committed:])

    def next_row(drafted):
        for token in [*further, *drafted][len(rows) + start + 1 - num_committed :]:
            rows.append((head_state(rows), token))
        states = np.array([[state] for state, _ in rows], float)
        return HeadTable(head).forward([token for _, token in rows], 1, states)[-1]

    history = History(PROMPT, text[len(PROMPT) :])
    return draw_draft(next_row, DraftRequest(history, len(draft.tokens), sampling, uniforms))


class Recording(DraftHead):
    """A head that records its drafts, with the text before them and the number of uniforms."""

    def __init__(self, *args, **limits):
        super().__init__(*args, **limits)
        self.drafts = []

    def draft(self, request):
        before = [*request.history.tokens], request.history.num_committed
        draft = yield from super().draft(request)
        self.drafts.append((draft, *before, request.uniforms))
        return draft


def check(drafter, start=lambda length: 0, **options):
    """Compare all recorded drafts but those of first rounds with a straight recomputation.

    `start` is the position of the first row, by the number of committed tokens.
    """
    drafts = [drafted for drafted in drafter.drafts if drafted[0].tokens]
    for drafted in drafts:
        draft, num_committed = drafted[0], drafted[2]
        expected = recompute(*drafted, start=start(num_committed), **options)
        assert draft.tokens == expected.tokens
        for i in range(len(draft.tokens)):
            ours, theirs = draft.distribution(i), expected.distribution(i)
            assert (ours is None) is (theirs is None)
            if ours is not None:
                np.testing.assert_array_equal(ours.weights, theirs.weights)
    return len(drafts)


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("options", [{}, {"max_first_length": 64}, {"chunk_length": 2}])
def test_drafts_equal_a_straight_recomputation(k, options):
    """The state of token i is read with token i + 1, and no rejected token leaves a trace."""
    drafter = Recording(HeadTable(HEAD))
    _, rounds = tokens_of(decoder(drafter, k, **options))
    assert check(drafter) == len(rounds) - 1
    assert any(round_.num_accepted for round_ in rounds)
    assert any(round_.num_accepted < round_.num_drafted for round_ in rounds)


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("refuses", [False, True])
def test_drafts_in_one_launch_equal_a_straight_recomputation(k, refuses):
    model = DraftingHeadTable(HEAD)
    model.refuses = refuses
    drafter = Recording(model)
    tokens, rounds = tokens_of(decoder(drafter, k))
    assert check(drafter) == len(rounds) - 1
    assert tokens == tokens_of(decoder(head(), k))[0]
    if k == 1 or refuses:
        assert not model.launches
        return
    assert len(model.launches) == len(rounds) - 1
    accepted = [round_.num_accepted for round_ in rounds]
    expected = [len(PROMPT), *(count + 1 for count in accepted[1:])]
    assert [num_fed for num_fed, _ in model.launches] == expected[: len(rounds) - 1]


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("k", [2, 1, 3])
def test_every_string_has_exactly_the_targets_joint_probability(k, monkeypatch):
    target, draft = quarters(2, True), quarters(4, False)

    def make():
        return ContinuedText(decoder(head(of_rows(draft)), k, target))

    found = joint_distribution(make, monkeypatch, PROMPT[:3])
    assert found == distribution_of_strings(target, PROMPT[:3])


def joint_distribution_of_filtered_sampling(k, monkeypatch):
    """Return the joint distribution of a decoder with a head, and the target's."""
    (target, filtered_target), (draft, _) = filtered(2), filtered(4)

    def make():
        return ContinuedText(decoder(head(of_rows(draft)), k, target))

    actual = joint_distribution(make, monkeypatch, PROMPT[:3], FILTERED)
    return actual, distribution_of_strings(filtered_target, PROMPT[:3])


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("k", [2, 1, 3])
def test_every_string_has_exactly_the_joint_probability_of_filtered_sampling(k, monkeypatch):
    actual, expected = joint_distribution_of_filtered_sampling(k, monkeypatch)
    assert actual == expected


def test_distributions_before_filters_change_the_joint_probability(monkeypatch):
    def draw_before_filters(row, sampling, history, uniform):
        token, _ = draw(row, sampling, history, uniform)
        return token, row_distribution(row, Sampling(sampling.temperature), history)

    monkeypatch.setattr(verification, "draw", draw_before_filters)
    actual, expected = joint_distribution_of_filtered_sampling(2, monkeypatch)
    assert actual != expected


def test_sampled_strings_follow_the_targets_distribution():
    """Chi-square over four tokens, of which drafts have all but the first."""
    runs, sampling = 600, Sampling(0.7, top_p=0.9)
    counts = Counter(
        tuple(tokens_of(decoder(head(), 2), PROMPT, sampling, seed, 4)[0]) for seed in range(runs)
    )

    def row(text):
        return probabilities(np.log(TARGET(text)), sampling, History(text)).row(3)

    expected = Counter()
    for string in product(range(3), repeat=4):
        rows = [row((*PROMPT, *string[:i]))[string[i]] for i in range(4)]
        expected[string] += runs * float(np.prod(rows))
    assert not [string for string in counts if not expected[string]]
    cells = [s for s in expected if expected[s] > 1]
    statistic = sum((counts[s] - expected[s]) ** 2 / expected[s] for s in cells)
    stats = pytest.importorskip("scipy.stats")
    assert stats.chi2.sf(statistic, len(cells) - 1) > 1e-4


@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("chained", [False, True])
def test_greedy_text_equals_plain_decoding(k, chained):
    text = PROMPT
    for _ in range(30):
        text += (int(np.argmax(TARGET(text))),)
    drafter = Chain(SuffixBeforeModel(Suffix()), head()) if chained else head()
    found, _ = tokens_of(decoder(drafter, k), sampling=Sampling(), count=30)
    assert found == list(text[len(PROMPT) :])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_shorter_request_is_a_prefix_of_a_longer_one(temperature):
    def run(count):
        return tokens_of(decoder(head(), 4), sampling=Sampling(temperature), count=count)[0]

    longest = run(20)
    assert all(run(count) == longest[:count] for count in range(1, 20))


def test_coupled_text_depends_on_the_seed_alone():
    def run(k):
        return tokens_of(decoder(head(), k), sampling=Sampling(1.0, noise=GumbelNoise(5, 0)))[0]

    assert run(1) == run(2) == run(5) == run(0)


@pytest.mark.parametrize("max_first_length", [1, 64])
@pytest.mark.parametrize("between", [(0, 1, 1, 1), (2, 2), (*PROMPT, 1, 1), PROMPT[:3], (1,)])
def test_a_seed_repeats_its_text_after_other_requests(between, max_first_length):
    """Shared tokens are not read again by the head, but for one state at most by the target."""
    drafter = Recording(HeadTable(HEAD))
    one = decoder(drafter, 3, max_first_length=max_first_length)
    first, _ = tokens_of(one)
    for prompt in (between, PROMPT, (*PROMPT, *first), between, PROMPT[:2]):
        drafter.drafts.clear()
        tokens, _ = tokens_of(one, prompt)
        shared = one.num_reused_tokens
        assert tokens == tokens_of(decoder(head(), 3, max_first_length=max_first_length), prompt)[0]
        assert check(drafter)
        if prompt == (*PROMPT, *first):
            assert shared >= len(PROMPT)


def test_a_repeated_prompt_is_not_read_again():
    prompt = tuple(np.random.default_rng(0).integers(0, 3, 40).tolist())
    drafter = head()
    one = decoder(drafter, 2)
    tokens_of(one, prompt, count=12)
    drafter.model.num_fused.clear()
    tokens_of(one, prompt, count=12)
    assert one.num_reused_tokens == len(prompt) - 1
    assert sum(drafter.model.num_fused) < 14


def test_states_that_another_request_did_not_observe_are_left_out():
    """The target is not run again: the head begins with the first state that it observes."""
    target, drafter = StatesTable(TARGET), Recording(HeadTable(HEAD))
    prompt = (0, 1, 2, 2, 1, 0, 0, 1, 2, 0)
    one = decoder(drafter, 3, target=target)
    tokens_of(one, prompt[:3])
    plain = decoder(drafter, 0, target=target)
    tokens_of(plain, prompt[:8])
    drafter.drafts.clear()
    target.passes.clear()
    tokens_of(one, prompt)
    assert one.num_reused_tokens == 8
    assert check(drafter, lambda length: 8)


@pytest.mark.parametrize(("window", "start"), [(64, 0), (8, 7)])
def test_plain_rounds_are_read_in_one_pass_later(window, start):
    """Up to the window; after more of them the head begins with the last states."""
    drafter = Recording(HeadTable(HEAD, window))
    one = decoder(drafter, 0)
    one.plan = Alternating(drafter, 12, 3)
    tokens_of(one, count=40)
    assert check(drafter, lambda length: start) > 5
    assert drafter.model.num_fused[0] == len(PROMPT) + 12 - 1 - start


class Alternating(FixedPlan):
    """Plain rounds, then drafts."""

    def __init__(self, drafter, num_plain, k):
        super().__init__(drafter, k)
        self.num_plain = num_plain

    def next(self, history, num_left):
        k = self.max_draft_tokens if history.num_new_tokens >= self.num_plain else 0
        return RoundPlan("model" if k else "plain", self.drafter, k)


class Starts(Recording):
    """A head that records the position of its first row, by number of committed tokens."""

    def draft(self, request):
        draft = yield from super().draft(request)
        self.starts[request.history.num_committed] = self.model.observed.start
        return draft


@pytest.mark.parametrize("context_length", [6, 12, 25])
def test_a_full_context_is_refilled_with_the_last_states(context_length):
    drafter = Starts(HeadTable(HEAD), context_length=context_length)
    drafter.starts, drafter.model.context_length = {}, context_length
    tokens_of(decoder(drafter, 3), count=60)
    assert check(drafter, drafter.starts.__getitem__) > 10
    assert len({*drafter.starts.values()}) > 2
    assert all(length - 1 - start <= context_length for length, start in drafter.starts.items())


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("table", [HeadTable, DraftingHeadTable])
def test_drafts_are_right_after_any_requests(seed, table):
    """Plain requests, shared prompts, chunks, windows and full contexts in random order."""
    random = np.random.default_rng(seed)
    context_length = int(random.integers(4, 40))
    model = table(HEAD, int(random.integers(4, 12)), int(random.integers(1, 6)))
    model.context_length = context_length
    target, prompt, num_drafts = StatesTable(TARGET), [0], 0
    for _ in range(8):
        drafter = Starts(model, context_length=context_length)
        drafter.starts = {}
        k = int(random.integers(0, 4))
        one = decoder(drafter, k, target=target, chunk_length=int(random.integers(1, 5)),
                      max_first_length=int(random.choice([1, 4])))  # fmt: skip
        tokens, rounds = tokens_of(one, prompt, count=int(random.integers(1, 20)), seed=seed)
        assert all(round_.num_drafted for round_ in rounds[1:]) or not k
        num_drafts += check(drafter, drafter.starts.__getitem__)
        kept = int(random.integers(1, len(prompt) + len(tokens) + 1))
        prompt = [*prompt, *tokens][:kept] + random.integers(0, 3, random.integers(0, 4)).tolist()
    assert num_drafts > 5


def test_long_prompts_are_read_chunk_by_chunk():
    prompt = tuple(np.random.default_rng(1).integers(0, 3, 50).tolist())
    drafter = Recording(HeadTable(HEAD, window=8, chunk_length=3))
    one = decoder(drafter, 2, chunk_length=8, max_first_length=16)
    tokens_of(one, prompt, count=8)
    assert check(drafter)
    assert max(drafter.model.num_fused) <= 3


def test_a_chain_reads_unverified_tokens_with_the_head_s_own_states():
    drafter = Recording(HeadTable(HEAD))
    tokens_of(decoder(Chain(Sure(), drafter), 4), count=30)
    assert check(drafter) > 10
    assert any(draft.tokens and len(text) > count for draft, text, count, _ in drafter.drafts)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forced_tokens_are_read_with_the_head_s_own_states(temperature):
    grammar = constraint("regex", "(abc(a|b|c)cba(ab|cc))+c")
    sampling = Sampling(temperature, end_tokens=(END,), constraint=grammar)
    target, draft = hashed_distribution(1, END + 1), of_rows(hashed_distribution(2, END + 1))
    drafter = Recording(HeadTable(draft))
    texts = [
        tokens_of(decoder(drafter, k, target), PROMPT, sampling, 3)[0] for k in (0, 5)
    ]  # fmt: skip
    assert check(drafter, sampling=sampling, head=draft) > 2
    assert any(draft.tokens and len(text) > count for draft, text, count, _ in drafter.drafts)
    assert temperature or texts[0] == texts[1]


def test_observed_states_precede_the_resolver_s_passes():
    target = StatesTable(TARGET)
    drafter = Recording(HeadTable(HEAD))
    resolver = NearTieResolver(target, 10.0, exact=True)
    one = decoder(drafter, 3, target=target, resolver=resolver)
    _, rounds = tokens_of(one, sampling=Sampling())
    assert any(round_.near_ties for round_ in rounds)
    assert check(drafter, sampling=Sampling()) > 3


def test_timed_models_pass_states_on():
    stopwatch = Stopwatch()
    drafter = DraftHead(TimedModel(HeadTable(HEAD), stopwatch, "draft"))
    target = TimedModel(StatesTable(TARGET), stopwatch, "verify")
    one = SpeculativeDecoder(target, FixedPlan(drafter, 3), stopwatch)
    assert tokens_of(one)[0] == tokens_of(decoder(head(), 3))[0]
    assert stopwatch.seconds["draft"] > 0
