"""Margins: logits that move by less turn no decision, and some that move by more do."""

import numpy as np
import pytest

from specedge.runtime.decoding.verification import Draft, verify
from specedge.runtime.sampling.history import History
from specedge.runtime.sampling.logits import Logits, Row
from specedge.runtime.sampling.probabilities import probabilities
from specedge.sampling_options import Sampling
from specedge.verification.margins import VerifiedDraft, filter_row, greedy_margin, sample_margin

V = 12
TEXT = History([1, 2])
FILTERS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=5),
    Sampling(temperature=1.3, top_p=0.8),
    Sampling(temperature=1.0, top_k=8, top_p=0.9, min_p=0.1, repetition_penalty=1.3),
]


def rows(seed, count):
    return np.random.default_rng(seed).normal(0, 2, (count, V)).astype(np.float32)


def moved(logits, by, seed):
    """Each logit up or down by this, which moves a probability the most."""
    return logits + by * np.random.default_rng(seed).choice([-1, 1], logits.shape).astype(
        np.float32
    )


def test_greedy_margin_is_half_the_top_two_gap():
    row = Row(np.array([0.0, 3.0, 2.0], np.float32))
    assert greedy_margin(row, Sampling(), TEXT) == 0.5
    assert greedy_margin(Row(np.zeros(1, np.float32)), Sampling(), TEXT) == np.inf


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_shares_equal_runtime_sampling_distribution(sampling):
    for logits in rows(0, 20):
        found = filter_row(Row(logits), sampling, TEXT, V)
        wanted = probabilities(logits, sampling, TEXT).row(V)
        np.testing.assert_allclose(found.probs, wanted, atol=1e-6)
        assert found.filter_margin > 0


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_perturbation_below_sampling_margin_keeps_the_sample(sampling):
    turned = 0
    for seed, logits in enumerate(rows(1, 40)):
        u = float(np.random.default_rng(seed).random())
        found = filter_row(Row(logits), sampling, TEXT, V)
        margin = min(found.filter_margin, sample_margin(found.probs, u, sampling.temperature))
        token = probabilities(logits, sampling, TEXT).pick(u)
        for other in range(10):
            near = moved(logits, 0.8 * min(margin, 0.2), other)
            assert probabilities(near, sampling, TEXT).pick(u) == token
            far = moved(logits, 4 * margin, other)
            turned += probabilities(far, sampling, TEXT).pick(u) != token
    assert turned > 10


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_perturbation_below_verification_margin_keeps_the_verdict(sampling):
    turned = 0
    for seed in range(60):
        ours, theirs = rows(seed, 3), rows(1000 + seed, 2)
        rng = np.random.default_rng(seed)
        tests, last = rng.random(2), float(rng.random())
        dists = [probabilities(row, sampling, TEXT) for row in theirs]
        draft = Draft([one.pick(float(rng.random())) for one in dists], dists)
        verdict = verify(draft, Logits(ours), sampling, TEXT, tests, last, is_block=True)
        texts = [TEXT.then(draft.tokens[:i]) for i in range(3)]
        targets = [
            filter_row(Row(row), sampling, text, V) for row, text in zip(ours, texts, strict=True)
        ]
        drafted = [filter_row(Row(row), sampling, TEXT, V) for row in theirs]
        judged = VerifiedDraft(draft.tokens, drafted, targets, tests, last, sampling.temperature)
        margin = min(judged.margin(verdict), *(one.filter_margin for one in drafted))
        for other in range(10):
            for by, is_near in ((0.8 * min(margin, 0.1), True), (6 * margin, False)):
                dists = [probabilities(moved(row, by, other), sampling, TEXT) for row in theirs]
                again = Draft(draft.tokens, dists)
                rows_ = Logits(moved(ours, by, 100 + other))
                same = verify(again, rows_, sampling, TEXT, tests, last, is_block=True) == verdict
                assert same or not is_near
                turned += not same
    assert turned > 2
