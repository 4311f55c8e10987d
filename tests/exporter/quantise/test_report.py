"""What a report says of two models' logits on a text."""

import numpy as np
import pytest

from specedge.exporter.quantise.report import Distance

TOKENS = np.array([3, 1, 4, 1, 0])


@pytest.fixture
def logits():
    """The rounded model's and the original's, of five tokens. 2 * [5, 5]"""
    random = np.random.default_rng(0)
    wanted = random.normal(size=(5, 5)).astype(np.float32)
    return wanted + 0.1 * random.normal(size=(5, 5)).astype(np.float32), wanted


def log_softmax(rows):
    return np.log(np.exp(rows) / np.exp(rows).sum(1, keepdims=True))


def test_the_loss_is_of_the_tokens_that_follow(logits):
    found, wanted = logits
    total = Distance()
    total.add(found, wanted, TOKENS, None)
    places = np.arange(4), TOKENS[1:]
    assert total.loss == pytest.approx(-log_softmax(found)[places].sum())
    assert total.original_loss == pytest.approx(-log_softmax(wanted)[places].sum())
    assert (total.num_tokens, total.num_scored) == (4, 4)


def test_a_cache_that_is_no_number_is_seen(logits):
    total = Distance()
    total.compare(*logits)
    total.compare(np.array([1, np.nan]), np.array([1, 2]))
    total.compare(*logits)
    assert np.isnan(total.error)


def test_the_loss_of_a_cut_head_is_of_the_tokens_that_it_has(logits):
    found, wanted = logits
    head = np.array([0, 1, 7])
    total = Distance()
    total.add(found[:, :3], wanted[:, :3], TOKENS, head)
    rows, columns = [0, 2, 3], [1, 1, 0]  # of the tokens 1, 1 and 0; it has no 4
    assert total.loss == pytest.approx(-log_softmax(found[:, :3])[rows, columns].sum())
    assert (total.num_tokens, total.num_scored) == (4, 3)
    assert total.divergence > 0
