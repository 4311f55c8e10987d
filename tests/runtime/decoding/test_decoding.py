"""The loop over models that are tables: distributions, rollback, catch-up, counts."""

from collections import Counter
from itertools import product

import numpy as np
import pytest

from exact import distribution_of_strings, joint_distribution
from fakes import TableModel, hashed_distribution, quarters
from specedge.runtime.decoding import decoding
from specedge.runtime.decoding.decoding import SpeculativeDecoder
from specedge.runtime.decoding.timing import Stopwatch
from specedge.runtime.drafters.draft_model import DraftModel
from specedge.runtime.planning.plans import FixedPlan, ReplayPlan
from specedge.runtime.requests.stats import compute_stats
from specedge.runtime.sampling.history import History
from specedge.sampling_options import Sampling


def decoder(target, draft, k):
    return SpeculativeDecoder(target, FixedPlan(DraftModel(draft), k), Stopwatch())


def generate(target_distribution, draft_distribution, k, sampling, seed, count, prompt=(0, 1)):
    """The first `count` tokens and the rounds, and both models."""
    target, draft = TableModel(target_distribution), TableModel(draft_distribution)
    rounds = list(decoder(target, draft, k).rounds(prompt, sampling, seed, count))
    return [t for one in rounds for t in one.tokens][:count], rounds, target, draft


@pytest.mark.parametrize("k", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("draft_seed", [1, 2])
def test_greedy_output_equals_the_target_alone(k, draft_seed):
    distribution = hashed_distribution(1, 6)
    text = (0, 1)
    for _ in range(40):
        text += (int(np.argmax(distribution(text))),)
    assert generate(distribution, hashed_distribution(draft_seed, 6), k, Sampling(), 0, 40)[
        0
    ] == list(text[2:])


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("k", [2, 1, 3, 4])
@pytest.mark.parametrize(("target_seed", "draft_seed"), [(9, 10), (1, 2), (5, 6), (11, 12)])
def test_every_string_has_exactly_the_targets_joint_probability(
    k, target_seed, draft_seed, monkeypatch
):
    target_distribution, draft_distribution = (
        quarters(target_seed, True),
        quarters(draft_seed, False),
    )

    def make():
        one = decoder(TableModel(target_distribution), TableModel(draft_distribution), k)
        # Replays accept tokens one by one; test_block_verification.py has the other rule.
        one.plan = ReplayPlan([("model", k, 3)], {"model": one.plan.drafter})
        return one

    assert joint_distribution(make, monkeypatch) == distribution_of_strings(target_distribution)


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(0.7, top_k=3),
        Sampling(1.3, top_p=0.8),
        Sampling(1.0, min_p=0.2),
        Sampling(1.0, typical_p=0.8),
        Sampling(1.0, repetition_penalty=1.5),
        Sampling(1.0, presence_penalty=1.0),
        Sampling(1.0, frequency_penalty=1.0),
    ],
)
def test_sampled_pairs_of_tokens_follow_the_targets_distribution(sampling):
    """Chi-square over the joint distribution of tokens 2 and 3, which a wrong rollback would
    change.
    """
    from specedge.runtime.sampling.probabilities import probabilities

    distribution = hashed_distribution(5, 4)
    runs, k = 1000, 2
    counts = Counter(
        tuple(generate(distribution, hashed_distribution(6, 4), k, sampling, seed, 3)[0])
        for seed in range(runs)
    )

    def row(text):
        return probabilities(np.log(distribution(text)), sampling, History(text[:2], text[2:])).row(
            4
        )

    statistic, cells = 0.0, 0
    for string in product(range(4), repeat=3):
        expected = runs * float(np.prod([row((0, 1, *string[:i]))[string[i]] for i in range(3)]))
        if expected == 0:
            assert counts[string] == 0
        else:
            statistic += (counts[string] - expected) ** 2 / expected
            cells += 1
    stats = pytest.importorskip("scipy.stats")
    assert stats.chi2.sf(statistic, cells - 1) > 1e-4


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_identical_draft_yields_k_plus_one_tokens_per_round(k, temperature):
    distribution = hashed_distribution(3, 5)
    _, rounds, target, draft = generate(
        distribution, distribution, k, Sampling(temperature), 0, 20 * (k + 1)
    )
    assert [len(one.tokens) for one in rounds] == [k + 1] * 20
    assert target.passes == [k + 1] * 20
    # K passes a round, the first of two tokens: the prompt's at first, then the catch-up.
    assert draft.passes == ([2] + [1] * (k - 1)) * 20


def test_plain_decoding_runs_no_draft_and_one_row_a_pass():
    prompt = range(4)
    distributions = hashed_distribution(1, 5), hashed_distribution(2, 5)
    _, _, target, draft = generate(*distributions, 0, Sampling(1.0), 0, 10, prompt)
    assert (target.passes, draft.passes) == ([1] * 10, [])
    assert draft.rows == []


def test_a_prompt_of_one_token_needs_no_prefill():
    tokens, _, target, _ = generate(
        hashed_distribution(1, 5), hashed_distribution(2, 5), 2, Sampling(), 0, 6, (3,)
    )
    assert len(tokens) == 6
    assert target.rows[0] == 3


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_shorter_request_is_a_prefix_of_a_longer_one(k, temperature):
    def run(count):
        distributions = hashed_distribution(1, 6), hashed_distribution(2, 6)
        return generate(*distributions, k, Sampling(temperature), 9, count)[0]

    longest = run(20)
    assert all(run(count) == longest[:count] for count in range(1, 20))


def test_no_pass_exceeds_requested_length():
    for count in range(1, 12):
        _, _, target, draft = generate(
            hashed_distribution(1, 3), hashed_distribution(1, 3), 4, Sampling(), 0, count
        )
        assert max(len(target.rows), len(draft.rows)) <= 2 + count


def test_stats_count_tested_and_accepted_by_position():
    rounds = [decoding.Round([0] * (accepted + 1), 3, accepted) for accepted in (3, 1, 0)]
    stats = compute_stats(rounds, 3, Stopwatch().seconds, num_new_tokens=7)
    assert (stats.num_new_tokens, stats.num_drafted) == (7, 9)
    assert stats.tested_by_position == [3, 2, 1]
    assert stats.accepted_by_position == [2, 1, 1]
    assert stats.accepted_over_tested == 4 / 6
    assert stats.accepted_over_drafted == 4 / 9
    assert stats.tokens_per_round == 7 / 3
    assert stats.acceptance_by_position == [2 / 3, 1 / 2, 1.0]


@pytest.mark.parametrize("k", [1, 2, 4])
def test_after_a_rejection_the_draft_feeds_one_token(k):
    _, rounds, _, draft = generate(
        lambda text: (1, 0), lambda text: (0, 1), k, Sampling(1.0), 0, 6 * k
    )
    assert not any(one.num_accepted for one in rounds)
    assert draft.passes[: 3 * k] == [2] + [1] * (3 * k - 1)


@pytest.mark.parametrize("wanted", [1, 2, 3, 5])
def test_greedy_drafts_do_not_exceed_remaining_tokens(wanted):
    distribution = hashed_distribution(1, 6)  # of both, so every draft token is accepted
    _, rounds, _, draft = generate(distribution, distribution, 4, Sampling(), 0, wanted)
    assert [len(one.tokens) for one in rounds] == [wanted]
    assert rounds[0].num_drafted == len(draft.passes) == wanted - 1
