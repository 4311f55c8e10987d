"""Gumbel coupling: the noise, the distribution that it gives, and texts that do not depend on what
drafts.
"""

import math
from collections import Counter

import numpy as np
import pytest

from fakes import Sure, TableModel, generate, hashed_distribution, logits_of
from specedge.runtime.decoding.random_numbers import GumbelNoise
from specedge.runtime.decoding.verification import draw
from specedge.runtime.drafters.chain import Chain
from specedge.runtime.drafters.draft_model import DraftModel, ParallelDraftModel
from specedge.runtime.drafters.registry import RandomDrafter
from specedge.runtime.drafters.suffix import Suffix
from specedge.runtime.sampling.distribution import Distribution
from specedge.runtime.sampling.history import History
from specedge.runtime.sampling.logits import Logits, Row
from specedge.runtime.sampling.probabilities import probabilities
from specedge.sampling_options import Sampling
from specedge.theory.formulas import acceptance_probability

MASK = 2**64 - 1
FILTERS = {
    "open": {},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.2},
    "typical-p": {"typical_p": 0.8},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "bias and bans": {"logit_bias": {2: 1.0}, "bad_words": [[1, 0], [3]]},
}


def reference_word(stream, index):
    """splitmix64 as docs/exactness.md has it."""
    z = (stream + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def reference_noise(seed, choice, position, token):
    z = reference_word(reference_word(reference_word(seed & MASK, choice), position), token)
    return -math.log(1 - (z >> 11 | 1) * 2**-53)


def reference_choice(weights, ids, seed, choice, position):
    return min(
        (reference_noise(seed, choice, position, int(token)) / float(weight), int(token))
        for weight, token in zip(weights, ids, strict=True)
        if weight > 0
    )[1]


def coupled(seed, choice=0, **options):
    return Sampling(**{"temperature": 1.0} | options, noise=GumbelNoise(seed, choice))


def text_of(distribution, drafter, k, seed, count=40, **options):
    return generate(distribution, drafter, k, coupled(seed, **options), seed, count)[0]


def p_value(counts, probs):
    stats = pytest.importorskip("scipy.stats")
    counts, probs = np.array(counts), np.array(probs, float)
    return stats.chisquare(counts, probs * counts.sum() / probs.sum()).pvalue


def test_noise_matches_the_documented_vectors():
    """Golden values, by which a program in any language shows that it has the same noise."""
    golden = {
        (0, 0, 0, 0): 0.14932332876109475,
        (1, 0, 17, 42): 1.289301865964983,
        (-1, 2, 4095, 151_935): 0.7479297373037542,
    }
    for arguments, noise in golden.items():
        assert reference_noise(*arguments) == pytest.approx(noise, rel=1e-15)
    even = np.full(50_000, 1.0, np.float32)
    chosen = [GumbelNoise(seed).choose(Distribution(even), 9) for seed in range(3)]
    assert chosen == [34738, 37635, 41138]


@pytest.mark.parametrize("spread", [0, 0.1, 2, 8, 20])
@pytest.mark.parametrize("kept", [1, 0.7, 0.05])
def test_coupled_sample_minimizes_noise_over_probability(spread, kept):
    """Although logarithms are taken of few: flat and peaked rows, cut ones, ids in the open."""
    rng = np.random.default_rng([int(10 * spread), int(100 * kept)])
    for seed in range(-6, 6):
        size = int(rng.integers(1, 2000))
        scores = rng.normal(size=size) * spread
        weights = np.exp(scores - scores.max()).astype(rng.choice([np.float32, np.float64]))
        weights[(rng.random(size) > kept) & (weights < 1)] = 0
        ids = np.sort(rng.choice(150_000, size, replace=False))
        noise, position = GumbelNoise(seed, seed % 3), int(rng.integers(10_000))
        for places, name in ((np.arange(size), None), (ids, ids)):
            expected = reference_choice(weights, places, seed, seed % 3, position)
            for _ in range(2):  # the second time by what is kept
                assert noise.choose(Distribution(weights, name), position) == expected


def test_token_noise_does_not_depend_on_filtered_tokens():
    """Neither on their number nor on its place among them, as vectorized code might have it."""
    rng = np.random.default_rng(0)
    size = 40_000  # more than one block
    weights = np.exp(rng.normal(size=size)).astype(np.float32)
    for position in range(30):
        noise = GumbelNoise(5)
        best = noise.choose(Distribution(weights), position)
        for count in (1, 2, 7, 17, 255, 5000, 20_001, 39_999):
            ids = np.union1d(rng.choice(size, count, replace=False), best)
            assert noise.choose(Distribution(weights[ids], ids), position) == best
            filtered = np.zeros_like(weights)
            filtered[ids] = weights[ids]
            assert noise.choose(Distribution(filtered), position) == best
            assert GumbelNoise(5).choose(Distribution(filtered), position) == best


def test_a_token_without_probability_is_never_chosen():
    weights = np.zeros(1000, np.float32)
    weights[[3, 998]] = 1, 1e-6
    assert {GumbelNoise(seed).choose(Distribution(weights), 0) for seed in range(200)} == {3}


def choices_by_counter(distribution, count=3000):
    """Choices over consecutive seeds, choice numbers and positions."""
    yield [GumbelNoise(i).choose(distribution, 7) for i in range(count)]
    yield [GumbelNoise(7, i).choose(distribution, 7) for i in range(count)]
    yield [GumbelNoise(7).choose(distribution, i) for i in range(count)]


def test_choices_of_seeds_positions_and_numbers_follow_the_distribution():
    weights = np.exp(np.random.default_rng(50).normal(size=50)).astype(np.float32)
    for chosen in choices_by_counter(Distribution(weights)):
        assert p_value(np.bincount(chosen, minlength=50), weights) > 1e-4


def test_choices_of_neighboring_positions_seeds_and_numbers_are_independent():
    weights = np.array([0.5, 0.3, 0.2], np.float32)
    for chosen in choices_by_counter(Distribution(weights)):
        assert p_value(np.bincount(chosen), weights) > 1e-4
        pairs = np.bincount([3 * a + b for a, b in zip(chosen[::2], chosen[1::2], strict=True)])
        assert p_value(pairs, np.outer(weights, weights).ravel()) > 1e-4


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("k", [2, 0])
@pytest.mark.parametrize("filters", FILTERS)
def test_strings_of_three_tokens_follow_the_targets_distribution(filters, k):
    distribution, options = hashed_distribution(5, 4), FILTERS[filters]
    draft = hashed_distribution(6, 4)
    runs, prompt = 600, (0, 1)

    def string(seed):
        drafter, sampling = DraftModel(TableModel(draft)), coupled(seed, **options)
        return tuple(generate(distribution, drafter, k, sampling, 0, 3, prompt)[0])

    counts = Counter(string(seed) for seed in range(runs))
    expected = {(): 1.0}
    for _ in range(3):
        longer = {}
        for string, probability in expected.items():
            row = np.log(distribution((*prompt, *string)))
            rule = probabilities(row, Sampling(1.0, **options), History(prompt, string))
            for token, share in enumerate(rule.row(4)):
                if share:
                    longer[*string, token] = probability * float(share)
        expected = longer
    assert {*counts} <= {*expected}
    assert p_value([counts[string] for string in expected], [*expected.values()]) > 1e-4


DRAFTERS = {
    "model": lambda: DraftModel(TableModel(hashed_distribution(2, 6))),
    "parallel": lambda: ParallelDraftModel(TableModel(hashed_distribution(2, 6)), mask_token=6),
    "the target itself": lambda: DraftModel(TableModel(hashed_distribution(1, 6))),
    "a smaller vocabulary": lambda: DraftModel(
        TableModel(hashed_distribution(2, 4), vocab_size=4), vocab_size=4
    ),
    "a reduced head": lambda: DraftModel(Reduced(hashed_distribution(2, 6), (1, 3, 4))),
    "chain": lambda: Chain(
        Suffix(min_match=1, max_match=2), DraftModel(TableModel(hashed_distribution(2, 6)))
    ),
    "suffix": Suffix,
    "random": lambda: RandomDrafter(6),
    "certain tokens": Sure,
}


class Reduced(TableModel):
    """A table whose rows have the columns `ids` alone."""

    def __init__(self, distribution, ids):
        super().__init__(distribution)
        self.ids = np.array(ids)

    def forward(self, tokens, num_rows=None):
        return Logits(super().forward(tokens, num_rows).array()[:, self.ids], self.ids)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("filters", FILTERS)
def test_coupled_text_equals_plain_decoding_for_every_drafter(name, filters):
    distribution, options = hashed_distribution(1, 6), FILTERS[filters]
    plain = text_of(distribution, Sure(), 0, 3, 24, **options)
    for k in (1, 6):
        assert text_of(distribution, DRAFTERS[name](), k, 3, 24, **options) == plain


def test_seeds_and_choices_give_different_texts():
    distribution = hashed_distribution(1, 6)
    texts = [
        tuple(generate(distribution, Sure(), 0, coupled(seed, choice), 0, 40)[0])
        for seed in range(3)
        for choice in range(3)
    ]
    assert len({*texts}) == 9


def test_a_shorter_coupled_request_is_a_prefix_of_a_longer_one():
    distribution = hashed_distribution(1, 6)
    longer = text_of(distribution, DRAFTERS["model"](), 4, 9)
    for count in (1, 2, 3, 7):
        assert text_of(distribution, DRAFTERS["model"](), 4, 9, count) == longer[:count]
    _, rounds = generate(distribution, DRAFTERS["model"](), 4, coupled(9), 0, 1)
    assert rounds[0].num_drafted == 0  # the target's own pass suffices


@pytest.mark.parametrize("k", [1, 4])
def test_identical_draft_is_always_accepted(k):
    distribution = hashed_distribution(3, 5)
    drafter = DraftModel(TableModel(distribution))
    _, rounds = generate(distribution, drafter, k, coupled(0), 0, 20 * (k + 1))
    assert [len(one.tokens) for one in rounds[:-1]] == [k + 1] * 19


def test_temperature_0_is_greedy_without_noise():
    distribution = hashed_distribution(1, 6)
    drafter = DRAFTERS["model"]()
    greedy = generate(distribution, drafter, 4, Sampling(), 0, 40)[0]
    assert text_of(distribution, drafter, 4, 5, temperature=0.0) == greedy


def test_acceptance_exceeds_its_bound_and_90_percent_of_residual_rule():
    """P(accept) >= (1 - TV) / (1 + TV) for every pair of distributions."""
    rng = np.random.default_rng(1)
    rates, overlaps = [], []
    for pair in range(12):
        target = rng.normal(size=30) * rng.choice([0.5, 1, 2, 3])
        draft = target + rng.normal(size=30) * rng.choice([0.2, 0.5, 1])
        rows = [Row(one) for one in (target, draft)]
        runs = 300
        same = 0
        for position in range(runs):
            sampling, history = coupled(pair), History(range(position + 1))
            first, second = (draw(row, sampling, history, 0.0)[0] for row in rows)
            same += first == second
        probs = [probabilities(one, Sampling(1.0), History([0])).probs for one in (target, draft)]
        overlap = acceptance_probability(*probs)
        bound = overlap / (2 - overlap)
        assert same / runs > bound - 4 * math.sqrt(bound * (1 - bound) / runs)
        assert same / runs < overlap + 4 * math.sqrt(overlap * (1 - overlap) / runs)
        rates.append(same / runs)
        overlaps.append(overlap)
    assert 0.85 < np.mean(rates) / np.mean(overlaps) < 0.98


def test_a_choice_does_not_depend_on_its_row_in_a_pass():
    """Vectorized functions compute weights, whose last bits may depend on their position."""
    rng = np.random.default_rng(2)
    row = rng.normal(0, 3, 49_157).astype(np.float32)
    for options in ({}, {"top_p": 0.9}, {"top_k": 50}, {"temperature": 0.7, "typical_p": 0.9}):
        expected = probabilities(row, Sampling(**{"temperature": 1.0} | options), History([0]))
        for offset in range(1, 9):
            other = np.zeros(len(row) + 16, np.float32)[offset : offset + len(row)]
            other[:] = row
            found = probabilities(other, Sampling(**{"temperature": 1.0} | options), History([0]))
            assert np.array_equal(found.weights, expected.weights)


def test_lenience_is_refused_with_coupling():
    with pytest.raises(ValueError, match=r"coupling 'gumbel'.*lenience.*omit one of them"):
        coupled(0, lenience=0.5)


def test_coupled_drafts_have_no_distributions():
    assert draw(Row(logits_of(0.2, 0.8)), coupled(0), History([0]), 0.5)[1] is None
