"""Every drafter preserves the target distribution exactly."""

from collections import Counter
from functools import cache
from itertools import product

import numpy as np
import pytest

from exact import distribution_of_strings, joint_distribution
from fakes import Sure, TableModel, decoder, generate, hashed_distribution, quarters
from specedge.runtime.drafters.chain import Chain
from specedge.runtime.drafters.draft_model import DraftModel
from specedge.runtime.drafters.ngrams import NGramDrafter, count
from specedge.runtime.drafters.registry import CustomDrafter, RandomDrafter
from specedge.runtime.drafters.suffix import EarlierOutputs, Suffix, SuffixBeforeModel
from specedge.runtime.sampling.history import History
from specedge.runtime.sampling.probabilities import probabilities
from specedge.sampling_options import Sampling

# A table over the pairs, whose distributions are in quarters.
PAIRS = [(0, 0), (0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 0), (2, 0), (2, 1), (2, 2)]

TABLES = count(PAIRS, 3, order=2)


def halves(seed):
    """A distribution over 3 tokens in halves: without any one of them, what is left is in halves
    too.
    """
    rows = [(0, 2, 2), (2, 0, 2), (2, 2, 0), (0, 0, 4), (0, 4, 0)]

    @cache
    def distribution(text):
        index = np.random.default_rng([seed, len(text), *text]).integers(len(rows))
        return np.array(rows[index]) / 4

    return distribution


DRAFT_DISTRIBUTION = quarters(4, False)


def model():
    return DraftModel(TableModel(DRAFT_DISTRIBUTION))


def remembered():
    outputs = EarlierOutputs()
    outputs.add([0, 1, 2, 1, 0, 2, 2, 0])
    return outputs


DRAFTERS = {
    "suffix": Suffix,
    "suffix, remembering": lambda: Suffix(remembered()),
    "ngram": lambda: NGramDrafter(TABLES),
    "random": lambda: RandomDrafter(2),
    "chain": lambda: Chain(Suffix(min_match=1, max_match=3), model()),
    "suffix, then model": lambda: Chain(SuffixBeforeModel(Suffix()), model()),
    "sure, then model": lambda: Chain(Sure(), model()),
    "sure, ngram, then model": lambda: Chain(Sure(), Sometimes(DRAFTERS["ngram"]()), model()),
    "model, then suffix": lambda: Chain(Sometimes(model()), Suffix()),
    "checked": lambda: CustomDrafter(Chain(Sure(), model()), 3),
}


class Sometimes:
    """Asks another drafter for one token, at odd places alone."""

    def __init__(self, other):
        self.other, self.name, self.truncate = other, other.name, other.truncate
        self.is_sampled, self.observer = False, other.observer

    def propose(self, history, max_tokens, sampling, uniforms):
        return self.other.propose(
            history, min(len(history.tokens) % 2, max_tokens), sampling, uniforms
        )


EVERY_DRAFTER = pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)


@pytest.mark.slow(after_first=True)
@EVERY_DRAFTER
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_every_string_has_exactly_the_targets_joint_probability(make, k, monkeypatch):
    distribution, prompt = halves(2), (0, 1, 0)
    found = joint_distribution(lambda: decoder(distribution, make(), k), monkeypatch, prompt)
    assert found == distribution_of_strings(distribution, prompt)


@pytest.mark.parametrize("name", ["chain", "sure, then model", "model, then suffix"])
def test_enumeration_covers_copied_and_sampled_tokens(name):
    drafter = DRAFTERS[name]()
    draft = drafter.propose(History((0, 1, 0)), 4, Sampling(1.0), np.full(4, 0.3))
    certain = [draft.distribution(i) is None for i in range(len(draft.tokens))]
    assert len(certain) >= 3
    assert True in certain
    assert False in certain


@EVERY_DRAFTER
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_greedy_output_equals_the_target_alone(make, k):
    distribution = hashed_distribution(1, 3)
    text = (0, 1, 0)
    for _ in range(40):
        text += (int(np.argmax(distribution(text))),)
    assert generate(distribution, make(), k, Sampling(), 0, 40)[0] == list(text[3:])


@EVERY_DRAFTER
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_shorter_request_is_a_prefix_of_a_longer_one(make, temperature):
    def run(count):
        return generate(hashed_distribution(1, 3), make(), 4, Sampling(temperature), 9, count)[0]

    longest = run(20)
    assert all(run(count) == longest[:count] for count in range(1, 20))


@EVERY_DRAFTER
def test_a_second_request_repeats_the_first(make):
    one = decoder(hashed_distribution(1, 3), make(), 3)

    def run(prompt):
        return [r.tokens for r in one.rounds(prompt, Sampling(1.0), 3, 30)]

    first = run((0, 1, 0, 1))
    run((2, 2, 1, 0, 2, 2, 1))
    assert run((0, 1, 0, 1)) == first


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize(
    "name", ["chain", "suffix, remembering", "ngram of order 3", "sure, then model"]
)
@pytest.mark.parametrize("sampling", [Sampling(0.7, top_k=3), Sampling(1.3, top_p=0.8)])
def test_sampled_strings_of_many_rounds_follow_the_targets_distribution(name, sampling):
    """Chi-square over the joint distribution of tokens 2, 3 and 4: what drafters remember must not
    show.
    """
    distribution, runs, prompt = hashed_distribution(5, 3), 1000, (0, 1, 2, 0, 1)
    corpus = np.random.default_rng(0).integers(0, 3, 60)
    makers = DRAFTERS | {"ngram of order 3": lambda: NGramDrafter(count([corpus], 3))}
    counts = Counter(
        tuple(generate(distribution, makers[name](), 2, sampling, seed, 4, prompt)[0][1:])
        for seed in range(runs)
    )

    def row(text):
        return probabilities(np.log(distribution(text)), sampling, History(text)).row(3)

    expected = Counter()
    for string in product(range(3), repeat=4):
        rows = [row((*prompt, *string[:i]))[string[i]] for i in range(4)]
        expected[string[1:]] += runs * float(np.prod(rows))
    assert not [string for string in counts if not expected[string]]
    cells = [s for s in expected if expected[s] > 1]
    statistic = sum((counts[s] - expected[s]) ** 2 / expected[s] for s in cells)
    stats = pytest.importorskip("scipy.stats")
    assert stats.chi2.sf(statistic, len(cells) - 1) > 1e-4


def test_a_draft_model_catches_up_after_other_drafters():
    draft = TableModel(hashed_distribution(4, 3))
    one = DraftModel(draft)
    one.propose(History((0, 1)), 1, Sampling(), np.zeros(1))
    one.truncate(20)  # rounds went by without it
    text = [i % 3 for i in range(30)]
    one.propose(History([0, 1, *text]), 2, Sampling(), np.zeros(2))
    assert draft.rows[:32] == [0, 1, *text]
    assert draft.passes == [2, 1, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draft_is_empty_if_all_drafter_tokens_are_banned(temperature):
    sampling = Sampling(temperature, bad_words=((0,), (1,)))
    drafter = NGramDrafter(count([[0, 1, 0]], 3))
    tokens, rounds = generate(hashed_distribution(1, 3), drafter, 4, sampling, 0, 5)
    assert tokens == [2] * 5
    assert sum(one.num_drafted for one in rounds) == 0
