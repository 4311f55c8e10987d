"""Drafts with a reduced vocabulary preserve the output distribution."""

import numpy as np
import pytest

from exact import distribution_of_strings, joint_distribution
from fakes import Sure, TableModel, generate, hashed_distribution, logits_of, quarters
from specedge.runtime.decoding.decoding import SpeculativeDecoder
from specedge.runtime.decoding.timing import Stopwatch
from specedge.runtime.decoding.verification import draw
from specedge.runtime.drafters.chain import Chain
from specedge.runtime.drafters.draft_model import DraftModel
from specedge.runtime.drafters.suffix import Suffix
from specedge.runtime.planning.plans import FixedPlan
from specedge.runtime.sampling.history import History
from specedge.runtime.sampling.logits import Logits, Row
from specedge.runtime.sampling.probabilities import greedy_token, probabilities
from specedge.sampling_options import Sampling

EVERY_K = pytest.mark.parametrize("k", [1, 2, 3, 4])
VOCAB = 40
TEXT = (3, 7, 7, 31, 0, 12, 39, 12)
EDITS = {
    "none": {},
    "repetition": {"repetition_penalty": 1.4},
    "a repetition wanted": {"repetition_penalty": 0.6},
    "presence and frequency": {"presence_penalty": 0.7, "frequency_penalty": -0.4},
    "bias": {"logit_bias": {0: 2.0, 7: -1.0, 12: 3.0, 38: 9.0, 39: 1.5}},
    "bad words": {"bad_words": [[12], [11], [12, 5], [12, 6], [12, 7]]},
    "held back ends": {"min_new_tokens": 9, "end_tokens": [5, 6, 39]},
}
FILTERS = {
    "none": {},
    "top-k 1": {"top_k": 1},
    "top-k 4": {"top_k": 4},
    "top-k of more than the head has": {"top_k": 25},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.2},
    "typical-p": {"typical_p": 0.6},
    "several": {"top_k": 9, "top_p": 0.8, "min_p": 0.05},
}


def rows(seed):
    """A row of some tokens, and the row of all of them in which the others are impossible."""
    random = np.random.default_rng(seed)
    ids = np.sort(random.choice(VOCAB, 15, replace=False))
    logits = np.round(2 * random.normal(size=len(ids)), 1).astype(np.float32)  # with ties
    whole = np.full(VOCAB, -np.inf, np.float32)
    whole[ids] = logits
    return Row(logits, ids), Row(whole)


@pytest.mark.parametrize("edits", EDITS)
@pytest.mark.parametrize("filters", FILTERS)
def test_a_reduced_row_equals_the_full_row_restricted(edits, filters):
    history = History(TEXT[:3], TEXT[3:])
    greedy = Sampling(0.0, **EDITS[edits])
    drawn = Sampling(0.8, **EDITS[edits], **FILTERS[filters])
    for seed in range(6):
        cut, whole = rows(seed)
        assert greedy_token(cut, greedy, history) == greedy_token(whole, greedy, history)
        found = probabilities(cut.array(), drawn, history, cut.ids)
        wanted = probabilities(whole.array(), drawn, history)
        np.testing.assert_allclose(found.row(VOCAB), wanted.row(VOCAB), rtol=1e-6)
        assert all(found.of(token) == pytest.approx(wanted.of(token)) for token in range(VOCAB))
        for uniform in (0.0, 0.31, 0.62, 0.93):
            token, distribution = draw(cut, drawn, history, uniform)
            assert token == wanted.pick(uniform)
            assert distribution.of(token) > 0


@pytest.mark.parametrize("count", [1, 3, 15, 99])
def test_top_tokens_are_ordered_by_id_on_ties(count):
    for seed in range(20):
        cut, whole = rows(seed)
        ids, values = cut.largest(count)
        wanted, wanted_values = whole.largest(min(count, 15))
        assert ids.tolist() == wanted.tolist()
        assert values.tolist() == wanted_values.tolist()


def test_edits_of_tokens_outside_vocabulary_are_ignored():
    """Cover ids beyond the row and ids between those of the row."""
    row = Row(logits_of(0.5, 0.25, 0.25), np.array([2, 5, 9]))
    for token in (0, 1, 3, 4, 6, 10, 11, 10**6):
        sampling = Sampling(1.0, logit_bias={token: 50.0}, bad_words=[[token]])
        found = probabilities(row.array(), sampling, History([token, token]), row.ids)
        np.testing.assert_allclose(found.probs, [0.5, 0.25, 0.25])
        assert found.of(token) == 0


class CutModel(TableModel):
    """A table whose rows have the columns `ids` alone."""

    def __init__(self, distribution, ids):
        super().__init__(distribution)
        self.ids = np.array(ids)

    def forward(self, tokens, num_rows=None):
        return Logits(super().forward(tokens, num_rows).array()[:, self.ids], self.ids)


DRAFTERS = {
    "model": DraftModel,
    "chain": lambda model: Chain(Suffix(min_match=1, max_match=2), DraftModel(model)),
}


@pytest.mark.slow(after_first=True)
@EVERY_K
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_reduced_vocabulary_keeps_the_joint_distribution(name, k, monkeypatch):
    target_distribution = quarters(1, True)

    def make():
        drafter = DRAFTERS[name](CutModel(lambda text: (0.5, 0, 0.5), (0, 2)))
        return SpeculativeDecoder(
            TableModel(target_distribution), FixedPlan(drafter, k), Stopwatch()
        )

    assert joint_distribution(make, monkeypatch) == distribution_of_strings(target_distribution)


@EVERY_K
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_reduced_vocabulary_keeps_the_greedy_text(name, k):
    target_distribution = hashed_distribution(1, 6)
    sampling = Sampling()
    plain, _ = generate(target_distribution, Sure(), 0, sampling, 7, 60)
    drafter = DRAFTERS[name](CutModel(hashed_distribution(1, 6, peak=0.9), (1, 3, 4)))
    tokens, rounds = generate(target_distribution, drafter, k, sampling, 7, 60)
    assert tokens == plain
    assert {0, 2, 5} & {*tokens}
    assert any(one.num_accepted for one in rounds)
    assert {*tokens} <= {*range(6)}


def test_only_tokens_of_the_reduced_vocabulary_are_drafted():
    draft = DraftModel(CutModel(hashed_distribution(2, 6), (1, 4)))
    for seed in range(20):
        uniforms = np.random.default_rng(seed).random(8)
        for temperature in (0.0, 1.0):
            draft.truncate(0)
            found = draft.propose(History([seed % 6, 5]), 8, Sampling(temperature), uniforms)
            assert len(found.tokens) == 8
            assert {*found.tokens} <= {1, 4}
