"""Drafters for study: random ones, and blocks that are drawn all at once."""

import numpy as np
import pytest

from fakes import TableModel, generate, hashed_distribution
from specedge.runtime.drafters.baselines import Block, Random
from specedge.runtime.drafters.draft_model import DraftModel
from specedge.runtime.sampling.history import History
from specedge.sampling_options import Sampling


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_a_block_takes_one_pass_a_round_whatever_its_size(k):
    draft = TableModel(hashed_distribution(4, 3))
    _, rounds = generate(
        hashed_distribution(1, 3), Block(DraftModel(draft)), k, Sampling(1.0), 0, 40
    )
    assert len(draft.passes) == len(rounds)
    assert max(draft.passes) <= k + 1


def test_a_block_keeps_nothing_of_what_it_guessed():
    draft = TableModel(hashed_distribution(4, 3))
    tokens, _ = generate(
        hashed_distribution(1, 3), Block(DraftModel(draft)), 4, Sampling(1.0), 0, 40
    )
    assert draft.length > 30
    assert draft.rows[: draft.length] == [0, 1, 0, *tokens][: draft.length]


def test_each_distribution_of_a_block_follows_the_guess_not_the_other_drawn_tokens():
    known = hashed_distribution(4, 3)
    text = (0, 1, 2, 0, 1)
    made = Block(DraftModel(TableModel(known))).propose(
        History(text), 4, Sampling(1.0), np.array([0.99, 0.01, 0.99, 0.5])
    )
    for i, guess in enumerate(((), (2,), (2, 0), (2, 0, 1))):
        assert np.allclose(made.distribution(i).row(3), known(text + guess))
    assert len(set(made.tokens)) > 1


def test_a_block_keeps_to_its_models_window_and_vocabulary():
    draft = TableModel(hashed_distribution(4, 2), vocab_size=2, context_length=6)
    block = Block(DraftModel(draft, context_length=6, vocab_size=2))
    target = hashed_distribution(1, 3)
    tokens, rounds = generate(target, block, 4, Sampling(), 0, 60)
    assert tokens == generate(target, Random(3), 0, Sampling(), 0, 60)[0]
    assert any(one.num_accepted for one in rounds)


def test_random_accepts_as_often_as_its_distribution_and_the_targets_overlap():
    distribution = hashed_distribution(1, 4)
    overlap = tested = accepted = 0
    for seed in range(400):
        tokens, rounds = generate(distribution, Random(4), 1, Sampling(1.0), seed, 4)
        tested += len(rounds)
        accepted += sum(one.num_accepted for one in rounds)
        at = 0
        for one in rounds:
            overlap += np.minimum(distribution((0, 1, 0, *tokens[:at])), 1 / 4).sum()
            at += len(one.tokens)
    assert abs(accepted - overlap) < 4 * (tested / 4) ** 0.5
