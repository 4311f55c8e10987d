"""Block verification: exact for all tokens of a round, and never fewer accepted tokens."""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from exact import distribution_of_strings, explore, joint_distribution
from fakes import Recalling, TableModel, generate, hashed_distribution, logits_of, quarters
from grammars import END, constraint
from specedge import Draft
from specedge.request import PLAIN
from specedge.runtime.decoding import decoding
from specedge.runtime.decoding.decoding import SpeculativeDecoder
from specedge.runtime.decoding.random_numbers import GumbelNoise, uniforms
from specedge.runtime.decoding.timing import Stopwatch
from specedge.runtime.decoding.verification import Verdict, verify
from specedge.runtime.drafters.chain import Chain
from specedge.runtime.drafters.draft_model import DraftModel
from specedge.runtime.drafters.registry import CustomDrafter, RandomDrafter
from specedge.runtime.drafters.suffix import Suffix
from specedge.runtime.planning.plans import FixedPlan, ReplayPlan, summarize_rounds
from specedge.runtime.sampling.distribution import Distribution
from specedge.runtime.sampling.history import History
from specedge.runtime.sampling.logits import Logits
from specedge.sampling_options import Sampling

GRAMMAR = constraint("regex", "(abc(a|b))+c")
PAIRS = [(9, 10), (1, 2), (5, 6), (11, 12), (3, 8), (7, 4)]


def without_a_token(distribution):
    """The distribution of a draft model whose vocabulary lacks token 2."""

    def reduced(text):
        weights = np.array(distribution(text)[:2]) + 1 / 4
        return np.round(4 * weights / weights.sum()) / 4

    return reduced


def decoder(target, draft, k, vocab_size=3):
    drafter = DraftModel(TableModel(draft, vocab_size), vocab_size=vocab_size)
    return SpeculativeDecoder(TableModel(target), FixedPlan(drafter, k), Stopwatch())


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize("seeds", PAIRS)
def test_all_tokens_of_rounds_follow_the_targets_joint_distribution(k, reduces, seeds, monkeypatch):
    target, draft = quarters(seeds[0], True), quarters(seeds[1], False)
    if reduces:
        draft = without_a_token(draft)
    found = joint_distribution(lambda: decoder(target, draft, k, 3 - reduces), monkeypatch)
    assert found == distribution_of_strings(target)


def accepted_tokens(target, draft, k, is_block, monkeypatch):
    """The expected number of accepted tokens of a round."""

    def run(numbers):
        monkeypatch.setattr(decoding, "Uniforms", lambda seed: numbers)
        one = decoder(target, draft, k)
        if not is_block:
            one.plan = ReplayPlan([("model", k, 1)], {"model": one.plan.drafter})
        return next(one.rounds((0,), Sampling(1.0), 0, k)).num_accepted

    return sum(n * share for n, share in explore(run, monkeypatch).items())


def joint_ratios(target, draft, k):
    """The sum of E[p_i], p_i = min(1, p_(i-1) t / d), which is the expected number."""
    total = Fraction(0)
    for length in range(1, k + 1):
        for string in product(range(3), repeat=length):
            text, probability, ratio = (0,), Fraction(1), Fraction(1)
            for token in string:
                t, d = (Fraction(model(text)[token]) for model in (target, draft))
                probability *= d
                ratio = min(Fraction(1), ratio * t / d) if d else ratio
                text = (*text, token)
            total += probability * ratio
    return total


@pytest.mark.parametrize("k", [1, 2, 3])
def test_no_fewer_tokens_are_accepted_than_one_by_one(k, monkeypatch):
    gains = []
    for seeds in PAIRS:
        target, draft = quarters(seeds[0], True), quarters(seeds[1], False)
        block, single = (
            accepted_tokens(target, draft, k, is_block, monkeypatch) for is_block in (True, False)
        )
        assert block == joint_ratios(target, draft, k)
        gains.append(block - single)
    assert min(gains) >= 0
    assert (max(gains) > 0) == (k > 1)


A, B, C = (0.5, 0.25, 0.25), (0.25, 0.5, 0.25), (0.125, 0.125, 0.75)
# Draft tokens, distributions of the draft, rows of the target, uniforms; accepted and next token.
# p = .5, 1 and Z_1 = .125, so that h_1 = .125 / .625 = .2.
VECTORS = [
    ((0, 1), (A, A), (B, B, C), (0.19, 0.999), 0.9, (2, 2)),
    ((0, 0), (A, A), (B, C, C), (0.19, 0.13), 0.9, (1, 2)),
    ((0, 0), (A, A), (B, C, C), (0.99, 0.12), 0.1, (2, 0)),
    ((0, 0), (A, A), (B, B, C), (0.01, 0.26), 0.9, (0, 1)),
    ((2, 0), (A, B), (A, A, C), (0.999, 0.999), 0.5, (2, 2)),
    ((2, 1), (A, B), (A, A, C), (0.999, 0.51), 0.5, (1, 0)),
    ((0,), (A,), (B, C), (0.49,), 0.2, (1, 1)),
    ((0,), (A,), (B, C), (0.51,), 0.2, (0, 1)),
]


@pytest.mark.parametrize(("tokens", "draft", "target", "tests", "last", "expected"), VECTORS)
def test_golden_vectors(tokens, draft, target, tests, last, expected):
    proposal = Draft(list(tokens), [Distribution(np.array(row)) for row in draft])
    rows = Logits(np.stack([logits_of(*row) for row in target]))
    verdict = verify(proposal, rows, Sampling(1.0), History([0]), tests, last, is_block=True)
    assert (verdict.num_accepted, verdict.next_token) == expected


def test_zero_probabilities_divide_nothing():
    """Tokens with a target probability of 0 are never accepted, and no 0 / 0 occurs.

    Both probabilities may be 0, in the last and in other positions, and after p = 1 the residual
    may be empty.
    """
    sure, other = Distribution(np.array([1.0, 0.0])), Distribution(np.array([0.0, 1.0]))
    first, second = logits_of(1, 0), logits_of(0, 1)
    for drawn in (sure, other):
        for rows in ([second, first, first], [second, second, second]):
            draft = Draft([0, 0], [drawn, sure])
            verdict = verify(
                draft, Logits(np.stack(rows)), Sampling(1.0), History([0]), [0.0, 0.0], 0.5, True
            )
            assert verdict == Verdict(0, 1)
    draft, rows = Draft([0, 1], [sure, other]), Logits(np.stack([first, second, first]))
    largest = float(np.nextafter(1, 0))
    for tests in ([0.0, 0.0], [largest, largest]):
        verdict = verify(draft, rows, Sampling(1.0), History([0]), tests, largest, True)
        assert verdict == Verdict(2, 0)


def test_a_text_that_nothing_may_follow_ends_with_its_last_draft_token():
    half = Distribution(np.array([0.5, 0.5]))
    rows = Logits(np.stack([logits_of(0.5, 0.5), logits_of(0.5, 0.5), logits_of(0.5, 0.5)]))

    sampling = Sampling(1.0, bad_words=((0, 0), (0, 1)))
    verdict = verify(Draft([0, 1], [half, half]), rows, sampling, History([1]), [0.9] * 2, 0, True)
    assert verdict == Verdict(0, 0)


class Spy(SpeculativeDecoder):
    """Records whether drafts are verified as blocks."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.blocks = []
        self.accept_rule = self.verify

    def verify(self, *arguments):
        self.blocks.append(arguments[-1])
        return verify(*arguments)


def model():
    return DraftModel(TableModel(hashed_distribution(2, 4)))


@pytest.mark.parametrize(
    ("drafter", "k", "sampling", "is_block"),
    [
        (model, 3, Sampling(0.7), True),
        (model, 2, Sampling(1.0, top_p=0.9), True),
        (lambda: RandomDrafter(4), 3, Sampling(1.0), True),
        (model, 1, Sampling(1.0), False),
        (model, 0, Sampling(1.0), False),
        (model, 3, Sampling(), False),
        (model, 3, Sampling(1.0, lenience=0.5), False),
        (model, 3, Sampling(1.0, noise=GumbelNoise(0)), False),
        (model, 3, Sampling(1.0, end_tokens=(END,), constraint=GRAMMAR), False),
        (lambda: Chain(Suffix(), model()), 3, Sampling(1.0), False),
        (Suffix, 3, Sampling(1.0), False),
        (lambda: CustomDrafter(model(), 4), 3, Sampling(1.0), False),
    ],
)
def test_blocks_are_verified_where_every_draft_token_is_sampled(drafter, k, sampling, is_block):
    one = Spy(TableModel(hashed_distribution(1, 4)), FixedPlan(drafter(), k), Stopwatch())
    rounds = list(one.rounds((0, 1), sampling, 0, 30))
    assert set(one.blocks) == {is_block}
    assert {round_.is_block for round_ in rounds} == {is_block}


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(0.7, lenience=0.5)])
def test_other_drafts_are_verified_as_before(sampling):
    """The texts of a deterministic drafter, which earlier versions wrote from the same seeds."""
    distribution = hashed_distribution(1, 4)
    tokens, rounds = generate(distribution, Recalling([1, 2, 3, 0] * 9), 4, sampling, 5, 30)
    history, start = [0, 1, 0], 0
    for round_ in rounds:
        numbers = uniforms(5, start, 9)
        start += 9
        drafted = Recalling([1, 2, 3, 0] * 9).propose(
            History([0, 1, 0], history[3:]), 4, sampling, numbers
        )
        drafted = Draft(drafted.tokens[: round_.num_drafted])
        rows = [
            np.log(distribution((*history, *drafted.tokens[:i])))
            for i in range(round_.num_drafted + 1)
        ]
        past = History([0, 1, 0], history[3:])
        arguments = drafted, Logits(np.stack(rows)), sampling, past, numbers[4:8], numbers[8]
        verdict = verify(*arguments)
        assert round_.tokens == [*drafted.tokens[: verdict.num_accepted], verdict.next_token]
        history += round_.tokens
    assert tokens == history[3:33]


@pytest.mark.parametrize("k", [2, 4, 7])
@pytest.mark.parametrize("seed", range(5))
def test_a_shorter_request_is_a_prefix_of_a_longer_one(k, seed):
    distribution, sampling = hashed_distribution(1, 6), Sampling(1.0)

    def run(count):
        drafter = DraftModel(TableModel(hashed_distribution(2, 6)))
        return generate(distribution, drafter, k, sampling, seed, count)[0]

    longest = run(30)
    assert all(run(count) == longest[:count] for count in range(1, 30))


def test_drafts_end_with_the_targets_context():
    target = TableModel(hashed_distribution(1, 6), context_length=12)
    drafter = DraftModel(TableModel(hashed_distribution(2, 6)))
    one = SpeculativeDecoder(target, FixedPlan(drafter, 4), Stopwatch(), max_length=12)
    for seed in range(20):
        rounds = list(one.rounds((0, 1), Sampling(1.0), seed, 10))
        assert sum(len(round_.tokens) for round_ in rounds) in (10, 11)


def test_a_replay_repeats_the_accept_rule_of_each_round():
    distributions = hashed_distribution(1, 5), hashed_distribution(2, 5)

    def run(plan):
        one = SpeculativeDecoder(TableModel(distributions[0]), plan, Stopwatch())
        return list(one.rounds((0, 1), Sampling(1.0), 3, 40))

    def drafters():
        return {"model": DraftModel(TableModel(distributions[1]))}

    first = run(FixedPlan(drafters()["model"], 4))
    summary = summarize_rounds(first)
    assert summary == [("model", 4, len(first), "block")]
    assert run(ReplayPlan(summary, drafters())) == first
    earlier = run(ReplayPlan([("model", 4, 40)], drafters()))
    assert not any(round_.is_block for round_ in earlier)
    assert summarize_rounds(earlier) == [("model", 4, len(earlier))]
    assert [r.tokens for r in earlier] != [r.tokens for r in first]
    assert run(ReplayPlan(summarize_rounds(earlier), drafters())) == earlier
    assert PLAIN not in {round_.drafter for round_ in first}
