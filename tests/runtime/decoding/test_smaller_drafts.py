"""Drafts that know fewer tokens or fewer positions than their target: still the target's text."""

from functools import cache

import numpy as np
import pytest

from exact import distribution_of_strings, joint_distribution
from fakes import TableModel, hashed_distribution, quarters
from specedge.runtime.decoding.decoding import SpeculativeDecoder
from specedge.runtime.decoding.timing import Stopwatch, TimedModel
from specedge.runtime.decoding.verification import Draft
from specedge.runtime.drafters.chain import Chain
from specedge.runtime.drafters.draft_model import DraftModel
from specedge.runtime.drafters.suffix import Suffix
from specedge.runtime.planning.plans import FixedPlan
from specedge.runtime.sampling.history import History
from specedge.sampling_options import Sampling

EVERY_K = pytest.mark.parametrize("k", [1, 2, 3, 4])
EVERY_TEMPERATURE = pytest.mark.parametrize("temperature", [0.0, 1.0])


def drafter(draft):
    """Create a drafter with the vocabulary and context limits of its model."""
    return DraftModel(draft, context_length=draft.context_length, vocab_size=draft.vocab_size)


def decoder(target, draft, k):
    return SpeculativeDecoder(target, FixedPlan(drafter(draft), k), Stopwatch())


def generate(target_distribution, draft, k, temperature, count, prompt=(0, 1)):
    rounds = decoder(TableModel(target_distribution), draft, k).rounds(
        prompt, Sampling(temperature), 7, count
    )
    rounds = list(rounds)
    return [t for one in rounds for t in one.tokens][:count], rounds


def plain(target_distribution, temperature, count, prompt=(0, 1)):
    return generate(
        target_distribution, TableModel(target_distribution), 0, temperature, count, prompt
    )[0]


def bigrams(seed, vocab_size):
    """A distribution that looks at the last token alone, so that losing the beginning changes
    nothing.
    """
    whole = hashed_distribution(seed, vocab_size)
    return lambda text: whole(text[-1:])


@pytest.mark.slow(after_first=True)
@EVERY_K
def test_a_smaller_vocabulary_keeps_the_joint_distribution(k, monkeypatch):
    target_distribution = quarters(1, True)

    def make():
        draft = TableModel(lambda text: (0.5, 0.5), vocab_size=2)
        return decoder(TableModel(target_distribution), draft, k)

    assert joint_distribution(make, monkeypatch) == distribution_of_strings(target_distribution)


@EVERY_K
def test_a_smaller_vocabulary_keeps_the_greedy_text(k):
    target_distribution = hashed_distribution(1, 6)
    draft = TableModel(hashed_distribution(2, 4), vocab_size=4)
    tokens, rounds = generate(target_distribution, draft, k, 0.0, 60, (5, 0, 4, 5))
    assert tokens == plain(target_distribution, 0.0, 60, (5, 0, 4, 5))
    assert {4, 5} & set(tokens)
    assert any(one.num_accepted for one in rounds)


def test_out_of_vocabulary_token_is_fed_to_draft_as_token_0():
    draft = TableModel(hashed_distribution(2, 4), vocab_size=4)
    prompt = (5, 1, 4, 2)
    tokens, _ = generate(hashed_distribution(1, 6), draft, 2, 1.0, 40, prompt)
    seen = [t if t < 4 else 0 for t in (*prompt, *tokens)]
    assert {4, 5} & set(tokens)
    assert draft.rows[: draft.length] == seen[: draft.length]
    assert draft.length > 40


@pytest.mark.slow(after_first=True)
@EVERY_K
@pytest.mark.parametrize("context", [1, 2, 3])
def test_a_sliding_window_keeps_the_joint_distribution(k, context, monkeypatch):
    target_distribution, draft_distribution = quarters(3, True), quarters(4, False)

    def make():
        draft = TableModel(draft_distribution, context_length=context)
        return decoder(TableModel(target_distribution), draft, k)

    assert joint_distribution(make, monkeypatch) == distribution_of_strings(target_distribution)


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("context", [1, 5, 16])
@pytest.mark.parametrize("prompt", [2, 16, 40])
def test_a_sliding_window_keeps_the_greedy_text(k, context, prompt):
    target_distribution = hashed_distribution(1, 5)
    prompt = [i % 5 for i in range(prompt)]
    draft = TableModel(hashed_distribution(1, 5, peak=0.9), context_length=context)
    tokens, _ = generate(target_distribution, draft, k, 0.0, 60, prompt)
    assert tokens == plain(target_distribution, 0.0, 60, prompt)


@pytest.mark.parametrize("k", [1, 4, 8])
@EVERY_TEMPERATURE
def test_acceptance_stays_high_when_the_window_slides(k, temperature):
    distribution = bigrams(1, 5)
    draft = TableModel(distribution, context_length=16)
    tokens, rounds = generate(distribution, draft, k, temperature, 200)
    assert len(tokens) == 200
    assert all(one.num_accepted == one.num_drafted > 0 for one in rounds)
    assert sum(draft.passes) < 2 * sum(one.num_drafted for one in rounds) + len(rounds)
    assert len(rounds) < 200 / (k + 1) * (1 + k / 8)  # few are short: half of 16 rows, then again


@pytest.mark.parametrize(("length", "read"), [(16, 16), (17, 9), (24, 16), (25, 9), (40, 16)])
def test_a_full_context_keeps_at_least_its_last_half(length, read):
    text = [i % 5 for i in range(length)]
    draft = TableModel(hashed_distribution(2, 5), context_length=16)
    drafter(draft).propose(History(text), 1, Sampling(), np.zeros(1))
    assert draft.rows == text[-read:]


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("k", [1, 4, 7])
@pytest.mark.parametrize("chained", [False, True])
@EVERY_TEMPERATURE
def test_a_shorter_request_is_a_prefix_across_a_slide(k, chained, temperature):
    distributions = [cache(hashed_distribution(seed, 6)) for seed in (1, 2)]

    def run(count, seed):
        one = drafter(TableModel(distributions[1], vocab_size=6, context_length=9))
        one = Chain(Suffix(min_match=2, max_match=3), one) if chained else one
        decoder = SpeculativeDecoder(TableModel(distributions[0]), FixedPlan(one, k), Stopwatch())
        rounds = decoder.rounds((0, 1), Sampling(temperature), seed, count)
        return [t for round_ in rounds for t in round_.tokens][:count]

    for seed in range(2):
        longest = run(50, seed)
        assert all(run(count, seed) == longest[:count] for count in range(1, 50, 2))


def test_a_request_after_a_slide_starts_at_position_0():
    target, draft = (
        TableModel(hashed_distribution(1, 5)),
        TableModel(hashed_distribution(2, 5), context_length=8),
    )
    one = decoder(target, draft, 3)

    def run():
        return [r.tokens for r in one.rounds((0, 1, 2), Sampling(1.0), 3, 40)]

    assert run() == run()


def test_only_prompt_passes_count_as_prefill_time():
    parts = []

    class Watch(Stopwatch):
        def switch(self, name):
            parts.append(name)
            return super().switch(name)

    draft = TimedModel(TableModel(hashed_distribution(2, 5), context_length=8), Watch(), "draft")
    guesses = DraftModel(draft, context_length=8)
    text = [i % 5 for i in range(5)]
    for length in range(5, 30):
        guesses.propose(History(text[:5] + [1] * (length - 5)), 1, Sampling(), np.zeros(1))
    assert parts.count("prefill") == 1
    assert parts[0] == "prefill"
    assert parts.count("draft") > 25  # a pass each round, and a prefill each slide


class AtOnce(TableModel):
    has_draft_graphs = True

    def draft(self, tokens, request, hidden=None):
        count = request.max_tokens
        return Draft([1] * count) if count > 1 else None


def test_one_call_draft_counts_each_pass():
    watch = Stopwatch()
    draft = TimedModel(AtOnce(hashed_distribution(2, 5), context_length=64), watch, "draft")
    guesses = DraftModel(draft, context_length=64)
    made = guesses.propose(History([0, 1, 2]), 4, Sampling(1.0), np.full(4, 0.5))
    assert made.tokens == [1] * 4
    assert draft.num_passes == 4
    draft.truncate(2)
    made = guesses.propose(History([0, 1, 2]), 1, Sampling(1.0), np.full(1, 0.5))
    assert (len(made.probs), draft.num_passes) == (1, 5)  # by a pass
