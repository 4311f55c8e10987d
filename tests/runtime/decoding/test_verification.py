"""The accept rule: the target's distribution for any draft, in every corner."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import logits_of
from specedge.errors import SpecEdgeError
from specedge.runtime.decoding.verification import Draft, draw, verify
from specedge.runtime.sampling.distribution import Distribution
from specedge.runtime.sampling.history import History
from specedge.runtime.sampling.logits import Logits, Row
from specedge.runtime.sampling.probabilities import probabilities
from specedge.sampling_options import Sampling

NOTHING = History([0])


def drafted(*probs):
    return Distribution(np.array(probs, float))


def test_greedy_breaks_ties_by_lowest_id():
    assert draw(Row(np.array([1.0, 3.0, 3.0])), Sampling(), NOTHING, 0.9) == (1, None)


TARGET, DRAFT = (0.1, 0.6, 0.3), (0.5, 0.3, 0.2)
GRID = (np.arange(1000) + 0.5) / 1000
CLOSE = 1.2e-3  # of shares that are counted on the grid


def output_distribution(target, draft, sampling):
    """The distribution of a round's first token, integrated exactly over its uniforms on a grid.

    Accepting x has probability min(1, t/d); what remains is spread as the residual picks.
    """
    first = np.zeros(len(target))
    rows = Logits(np.stack([logits_of(*target)] * 2))
    guess = probabilities(logits_of(*draft), sampling, NOTHING)
    for x, d in enumerate(guess.row(len(draft))):
        if d == 0:
            continue
        proposal = Draft([x], [guess])
        accepted = np.array(
            [verify(proposal, rows, sampling, NOTHING, [u], 0.5).num_accepted for u in GRID]
        )
        first[x] += d * accepted.mean()
        if not accepted.all():
            u = GRID[~accepted.astype(bool)][0]
            tokens = [verify(proposal, rows, sampling, NOTHING, [u], v).next_token for v in GRID]
            share = np.bincount(tokens, minlength=len(target)) / len(GRID)
            first += d * (1 - accepted.mean()) * share
    return first


@pytest.mark.parametrize("draft", [DRAFT, TARGET, (1, 0, 0), (0, 0, 1), (0.9, 0.05, 0.05)])
def test_rejection_sampling_preserves_target_distribution(draft):
    np.testing.assert_allclose(
        output_distribution(TARGET, draft, Sampling(1.0)), TARGET, atol=CLOSE
    )


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(0.6),
        Sampling(1.0, top_k=2),
        Sampling(0.9, top_k=3),  # the draft below has no more
        Sampling(1.0, top_p=0.7),
        Sampling(1.2, top_k=4, top_p=0.9, min_p=0.3),
    ],
)
@pytest.mark.parametrize("draft", [(0.6, 0.3, 0.1), (0.05, 0.05, 0.9), (1,)])
@pytest.mark.parametrize("target", [(0.1, 0.25, 0.15, 0.2, 0.3), (0.4, 0.3, 0.1, 0.15, 0.05)])
def test_a_smaller_draft_vocabulary_keeps_the_targets_distribution(target, draft, sampling):
    expected = probabilities(logits_of(*target), sampling, NOTHING).row(len(target))
    np.testing.assert_allclose(output_distribution(target, draft, sampling), expected, atol=CLOSE)


@pytest.mark.parametrize(
    ("lenience", "expected"),
    [
        (1.0, (0.1, 0.6, 0.3)),
        (0.5, (0.2, 0.525, 0.275)),
        (0.3, (1 / 3, 0.425, 0.725 / 3)),
        (0.1, DRAFT),
    ],
)
def test_lenience_has_exactly_the_distribution_of_the_papers_appendix(lenience, expected):
    """min(d, t/b) + (1 - sum min(d, t/b)) / (1 - sum min(d, t)) max(0, t - d)."""
    found = output_distribution(TARGET, DRAFT, Sampling(1.0, lenience=lenience))
    np.testing.assert_allclose(found, expected, atol=CLOSE)


def test_lenience_has_no_effect_at_1_or_temperature_0():
    rows = Logits(np.stack([logits_of(*TARGET)] * 2))
    guess = Draft([0], [drafted(*DRAFT)])
    for u in np.random.default_rng(0).random(200):
        lenient = verify(guess, rows, Sampling(1.0, lenience=1.0), NOTHING, [u], u)
        assert lenient == verify(guess, rows, Sampling(1.0), NOTHING, [u], u)
    for token in range(3):
        lenient = verify(Draft([token]), rows, Sampling(lenience=0.01), NOTHING, [0.0], 0.0)
        assert lenient == verify(Draft([token]), rows, Sampling(), NOTHING, [0.0], 0.0)


def test_acceptance_rate_is_the_overlap_of_the_two_distributions():
    rows = Logits(np.stack([logits_of(*TARGET)] * 2))
    rate = sum(
        d
        * verify(Draft([x], [drafted(*DRAFT)]), rows, Sampling(1.0), NOTHING, [u], 0.5).num_accepted
        for x, d in enumerate(DRAFT)
        for u in GRID
    ) / len(GRID)
    assert rate == pytest.approx(sum(map(min, TARGET, DRAFT)), abs=CLOSE)


def test_token_with_zero_target_probability_is_never_accepted():
    rows = Logits(np.stack([logits_of(0, 1)] * 2))
    for guess in (drafted(1, 0), drafted(0, 1)):  # drafted with certainty, and never
        assert verify(Draft([0], [guess]), rows, Sampling(1.0), NOTHING, [0.0], 0.5) == (
            verify(Draft([0]), rows, Sampling(1.0), NOTHING, [0.0], 0.5)
        )
        verdict = verify(Draft([0], [guess]), rows, Sampling(1.0), NOTHING, [0.0], 0.5)
        assert (verdict.num_accepted, verdict.next_token) == (0, 1)


def test_a_token_without_probability_in_either_distribution_is_not_accepted():
    """0 / 0 is no number, and min(1, nan) is 1."""
    rows = Logits(np.stack([logits_of(0, 1)] * 2))
    verdict = verify(Draft([0], [drafted(0, 1)]), rows, Sampling(1.0), NOTHING, [0.5], 0.5)
    assert (verdict.num_accepted, verdict.next_token) == (0, 1)


def test_zero_residual_falls_back_to_target_distribution():
    """The draft's distribution is the target's times a number, and u as large as can be."""
    largest, found = float(np.nextafter(1, 0)), 0
    for seed in range(50):
        random = np.random.default_rng(seed)
        logits = random.normal(size=3)
        target = probabilities(logits, Sampling(1.0), NOTHING)
        guess = Distribution(target.weights * random.uniform(0.1, 9))
        for token in range(3):
            if largest * guess.of(token) >= target.of(token):
                draft, rows = Draft([token], [guess]), Logits(np.stack([logits] * 2))
                verdict = verify(draft, rows, Sampling(1.0), NOTHING, [largest], 0.9)
                assert (verdict.num_accepted, verdict.next_token) == (0, target.pick(0.9))
                found += 1
    assert found > 5


def test_tokens_after_a_rejection_are_discarded():
    rows = Logits(np.stack([logits_of(0, 1), logits_of(1, 0), logits_of(1, 0)]))
    verdict = verify(
        Draft([0, 0], [drafted(1, 0)] * 2), rows, Sampling(1.0), NOTHING, [0.0, 0.0], 0.5
    )
    assert (verdict.num_accepted, verdict.next_token) == (0, 1)


def test_the_bonus_token_follows_the_last_row_unadjusted():
    rows = Logits(np.stack([logits_of(1, 0), logits_of(0, 1)]))
    verdict = verify(Draft([0], [drafted(1, 0)]), rows, Sampling(1.0), NOTHING, [0.9], 0.0)
    assert (verdict.num_accepted, verdict.next_token) == (1, 1)


@given(st.lists(st.integers(0, 3), min_size=0, max_size=4), st.integers(0, 1000))
def test_greedy_verification_is_the_accept_rule_at_temperature_zero(tokens, seed):
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 3, (len(tokens) + 1, 4)).astype(float)  # ties on purpose
    choices = [int(np.argmax(row)) for row in rows]
    agreed = next((i for i, t in enumerate(tokens) if t != choices[i]), len(tokens))
    verdict = verify(Draft(tokens), Logits(rows), Sampling(), NOTHING, rng.random(4), 0.5)
    assert (verdict.num_accepted, verdict.next_token) == (agreed, choices[agreed])


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(1.0, top_p=0.9)])
def test_nan_logits_are_an_error(sampling):
    with pytest.raises(SpecEdgeError, match="not numbers"):
        draw(Row(np.array([0.0, np.nan, 1.0])), sampling, NOTHING, 0.5)
