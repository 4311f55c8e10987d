"""Every drafter: the target's distribution, exactly, and what a chain and a caller's own drafter
may do.
"""

from collections import Counter
from functools import cache
from itertools import product

import numpy as np
import pytest

from exact import distribution_of_strings, joint_distribution
from fakes import TableModel, decoder, generate, hashed_distribution, quarters
from specedge import Distribution, Draft
from specedge.errors import DrafterError
from specedge.options import Sampling
from specedge.runtime.drafters.baselines import Block, Random
from specedge.runtime.drafters.chain import Chain
from specedge.runtime.drafters.checked import Checked
from specedge.runtime.drafters.draft_model import DraftModel
from specedge.runtime.drafters.ngrams import NGrams, count
from specedge.runtime.drafters.prompt_lookup import Lookup
from specedge.runtime.loop.timing import Stopwatch
from specedge.runtime.sampling.history import History
from specedge.runtime.sampling.probabilities import probabilities
from specedge.runtime.stats import Recorder

# A table over the pairs, whose distributions are in quarters.
PAIRS = [(0, 0), (0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 0), (2, 0), (2, 1), (2, 2)]

TABLES = count(PAIRS, 3, order=2)


def halves(seed):
    """A distribution over 3 tokens in halves: without any one of them, what is left is in halves
    too.
    """
    rows = [(0, 2, 2), (2, 0, 2), (2, 2, 0), (0, 0, 4), (0, 4, 0)]

    def distribution(text):
        index = np.random.default_rng([seed, len(text), *text]).integers(len(rows))
        return np.array(rows[index]) / 4

    return cache(distribution)


DRAFT_DISTRIBUTION = cache(quarters(4, False))


def model():
    return DraftModel(TableModel(DRAFT_DISTRIBUTION))


class Sure:
    """Drafts one token, which is certain, at every third place."""

    name = "sure"

    def propose(self, history, max_tokens, sampling, uniforms):
        at = len(history.tokens)
        return Draft([] if at % 3 else [at // 3 % 3][:max_tokens])

    def truncate(self, length):
        pass


DRAFTERS = {
    "lookup": lambda: Lookup(1, 3),
    "ngram": lambda: NGrams(TABLES),
    "random": lambda: Random(2),
    "block": lambda: Block(model()),
    "chain": lambda: Chain(Lookup(1, 3), model()),
    "sure, then model": lambda: Chain(Sure(), model()),
    "sure, ngram, then model": lambda: Chain(Sure(), Sometimes(DRAFTERS["ngram"]()), model()),
    "model, then lookup": lambda: Chain(Sometimes(model()), Lookup(1, 3)),
    "checked": lambda: Checked(Chain(Sure(), model()), 3),
}


class Sometimes:
    """Asks another drafter for one token, at odd places alone."""

    def __init__(self, other):
        self.other, self.name, self.truncate = other, other.name, other.truncate

    def propose(self, history, max_tokens, sampling, uniforms):
        return self.other.propose(
            history, min(len(history.tokens) % 2, max_tokens), sampling, uniforms
        )


EVERY_DRAFTER = pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)


@pytest.mark.many
@EVERY_DRAFTER
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_every_string_has_exactly_the_targets_joint_probability(make, k, monkeypatch):
    distribution, prompt = halves(2), (0, 1, 0)
    found = joint_distribution(lambda: decoder(distribution, make(), k), monkeypatch, prompt)
    assert found == distribution_of_strings(distribution, prompt)


@pytest.mark.parametrize("name", ["chain", "sure, then model", "model, then lookup"])
def test_those_distributions_come_from_rounds_with_certain_and_drawn_tokens(name):
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
def test_a_shorter_request_gives_the_beginning_of_a_longer_one(make, temperature):
    def run(count):
        return generate(hashed_distribution(1, 3), make(), 4, Sampling(temperature), 9, count)[0]

    longest = run(20)
    assert all(run(count) == longest[:count] for count in range(1, 20))


@EVERY_DRAFTER
def test_a_second_request_is_as_the_first(make):
    one = decoder(hashed_distribution(1, 3), make(), 3)

    def run(prompt):
        return [r.tokens for r in one.rounds(prompt, Sampling(1.0), 3, 30)]

    first = run((0, 1, 0, 1))
    run((2, 2, 1, 0, 2, 2, 1))
    assert run((0, 1, 0, 1)) == first


@pytest.mark.many
@pytest.mark.parametrize("name", ["chain", "ngram of order 3", "block", "sure, then model"])
@pytest.mark.parametrize("sampling", [Sampling(0.7, top_k=3), Sampling(1.3, top_p=0.8)])
def test_sampled_strings_of_many_rounds_follow_the_targets_distribution(name, sampling):
    """Chi-square over the joint distribution of tokens 2, 3 and 4: what drafters remember must not
    show.
    """
    distribution, runs, prompt = cache(hashed_distribution(5, 3)), 1500, (0, 1, 2, 0, 1)
    corpus = np.random.default_rng(0).integers(0, 3, 60)
    makers = DRAFTERS | {"ngram of order 3": lambda: NGrams(count([corpus], 3))}
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


def test_a_chain_asks_its_model_only_for_what_the_lookup_left():
    draft = TableModel(hashed_distribution(4, 3))
    chain = Chain(Lookup(2, 3), DraftModel(draft))
    history = History((0, 1, 2, 0, 1))
    made = chain.propose(history, 5, Sampling(), np.zeros(5))
    assert made.tokens[:3] == [2, 0, 1]
    assert list(made.sources[:4]) == ["lookup"] * 3 + ["model"]
    assert draft.rows[:8] == [*history.tokens, 2, 0, 1]
    assert draft.passes == [1] * list(made.sources).count("model")
    chain.truncate(4)
    draft.passes.clear()
    assert chain.propose(history, 3, Sampling(), np.zeros(3)).tokens == [2, 0, 1]
    assert not draft.passes  # the lookup filled it
    last = chain.propose(History((0, 1, 2, 0, 1, 1)), 1, Sampling(), np.zeros(1))
    assert list(last.sources) == ["model"]


def test_a_chain_copies_again_as_soon_as_there_is_a_match():
    def distribution(text):
        return np.eye(8)[(text[-1] + 1) % 8]

    draft = TableModel(distribution)
    chain = Chain(Lookup(2, 3), DraftModel(draft))
    history = History((0, 1, 2, 7, 6, 5, 1))
    made = chain.propose(history, 7, Sampling(), np.zeros(7))
    assert made.tokens == [2, 7, 6, 5, 1, 2, 3]
    assert list(made.sources) == ["model"] + ["lookup"] * 5 + ["model"]
    assert len(draft.passes) == 2
    chain.truncate(6)
    again = chain.propose(history, 7, Sampling(), np.zeros(7))
    assert again.tokens == made.tokens


def test_a_chain_ends_where_its_last_drafter_has_nothing():
    class Silent(Sure):
        def propose(self, history, max_tokens, sampling, uniforms):
            return Draft([])

    made = Chain(Sure(), Silent()).propose(History((0, 1, 2)), 4, Sampling(), np.zeros(4))
    assert made.tokens == [1]


def test_a_model_that_others_left_behind_reads_what_it_missed():
    draft = TableModel(hashed_distribution(4, 3))
    one = DraftModel(draft)
    one.propose(History((0, 1)), 1, Sampling(), np.zeros(1))
    one.truncate(20)  # rounds went by without it
    text = [i % 3 for i in range(30)]
    one.propose(History([0, 1, *text]), 2, Sampling(), np.zeros(2))
    assert draft.rows[:32] == [0, 1, *text]
    assert draft.passes == [2, 1, 1]


def test_rounds_and_counts_tell_the_drafter_of_each_token():
    recorder = Recorder(3, 3, Stopwatch())
    _, rounds = generate(hashed_distribution(1, 3), Chain(Sure(), model()), 3, Sampling(1.0), 1, 40)
    for one in rounds:
        recorder.record(one, len(one.tokens))
    start = 3
    for one in rounds:
        places = range(start, start + one.num_drafted)
        assert one.sources == tuple("model" if at % 3 else "sure" for at in places)
        start += len(one.tokens)
    stats = recorder.stats(num_draft_passes=0, num_target_passes=0)
    for name in ("drafted", "tested", "accepted"):
        whole = getattr(stats, f"num_{name}")
        assert sum(getattr(stats, f"{name}_by_source").values()) == whole
    sure = [
        i < one.num_accepted
        for one in rounds
        for i, name in enumerate(one.sources)
        if name == "sure" and i <= one.num_accepted
    ]
    assert 0 < sum(sure) < len(sure) == stats.tested_by_source["sure"]
    assert sum(sure) == stats.accepted_by_source["sure"]


def distribution(*probs, ids=None):
    return Distribution(np.array(probs), None if ids is None else np.array(ids))


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (Draft([0, 1, 2]), "proposed 3 tokens, 2 were asked for"),
        (Draft([3]), "token 3, which is not between 0 and 2"),
        (Draft([-1]), "token -1"),
        (Draft(["a"]), "'a', which is no token"),
        (Draft([1.0]), "1.0, which is no token"),
        (Draft([0], [distribution(1.0), distribution(1.0)]), "1 tokens and 2 distributions"),
        (Draft([0], None, ["a", "b"]), "1 tokens and 2 sources"),
        (Draft([0], [distribution(1.5, -0.5)]), "below 0"),
        (Draft([0], [distribution(np.nan, 1.0)]), "add up to nan"),
        (Draft([0], [distribution(np.inf, 1.0)]), "add up to inf"),
        (Draft([0], [distribution(0.0, 1.0)]), "to which its distribution gives nothing"),
        (Draft([0], [distribution(0.1, 0.2, 0.3, 0.4)]), "over 4 tokens, not over 3"),
        (Draft([0], [distribution(0.5, 0.5, ids=[0])]), "over 2 tokens"),
        (Draft([0], [distribution(0.5, 0.5, ids=[1, 0])]), "do not ascend"),
        (Draft([0], [distribution(0.5, 0.5, ids=[0, 3])]), "do not ascend within"),
        (Draft([0], [distribution(ids=[])]), "add up to 0"),
    ],
)
def test_a_drafter_that_breaks_a_rule_is_told_which(draft, message):
    class Wrong(Sure):
        def propose(self, history, max_tokens, sampling, uniforms):
            return draft

    with pytest.raises(DrafterError, match=f"the drafter 'sure' .*({message})"):
        Checked(Wrong(), 3).propose(History((0,)), 2, Sampling(1.0), np.zeros(2))


def test_numpys_integers_are_tokens():
    class Numbers(Sure):
        def propose(self, history, max_tokens, sampling, uniforms):
            return Draft(list(np.array([1, 2])))

    made = Checked(Numbers(), 3).propose(History((0,)), 2, Sampling(1.0), np.zeros(2))
    assert [type(token) for token in made.tokens] == [int, int]


@pytest.mark.parametrize("name", ["ngram", "block"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_the_options_leave_a_draft_nothing_it_drafts_less(name, temperature):
    """The target may well go on with tokens that the draft has never seen."""
    sampling = Sampling(temperature, bad_words=((0,), (1,)))
    known = DraftModel(TableModel(hashed_distribution(4, 2), vocab_size=2), vocab_size=2)
    drafter = Block(known) if name == "block" else NGrams(count([[0, 1, 0]], 3))
    tokens, rounds = generate(hashed_distribution(1, 3), drafter, 4, sampling, 0, 5)
    assert tokens == [2] * 5
    assert sum(one.num_drafted for one in rounds) == 0
