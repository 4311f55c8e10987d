"""Selection without sorting equals a full sort, also for adversarial rows."""

import numpy as np
import pytest

from specedge.runtime.sampling import top_k_p as selection
from specedge.runtime.sampling.top_k_p import nearest, nucleus, top

SIZE = 50_257


def flat(random):
    return random.normal(0, 0.1, SIZE)


def peaked(random):
    return random.normal(0, 3, SIZE)


def one_sure(random):
    logits = random.normal(0, 1, SIZE)
    logits[random.integers(SIZE)] = 30
    return logits


def tied(random):
    return np.round(random.normal(0, 2, SIZE) * 4) / 4


def all_alike(random):
    return np.full(SIZE, random.normal())


def masked(random):
    logits = random.normal(0, 2, SIZE)
    logits[random.random(SIZE) < 0.97] = -np.inf
    return logits


def periodic(random):
    """A period of the sample's step: it sees the likeliest tokens alone, or the others alone."""
    logits = random.normal(0, 1, SIZE)
    logits[random.integers(2) :: SIZE // selection._SAMPLE] += 9
    return logits


def ascending(random):
    return np.sort(random.normal(0, 2, SIZE))


KINDS = [flat, peaked, one_sure, tied, all_alike, masked, periodic, ascending]


def weights_of(kind, seed, dtype):
    logits = kind(np.random.default_rng(seed))
    return np.exp(logits - logits.max()).astype(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_top_p_equals_a_full_sort(kind, dtype):
    weights = weights_of(kind, 0, dtype)
    order = np.argsort(-weights, kind="stable")
    sums = weights[order].cumsum(dtype=np.float64)
    for share in (1e-6, 0.5, 0.95, 1 - 1e-9):
        before = weights.copy()
        kept = nucleus(weights, share)
        assert np.array_equal(weights, before)
        count = np.count_nonzero(kept)
        assert set(np.unique(kept[kept > 0])) <= set(np.unique(weights))
        assert np.array_equal(np.sort(order[:count]), np.flatnonzero(kept))
        # Sums in another order and type differ by rounding, which may move the end by a token.
        slack = (1e-6 if dtype == np.float32 else 1e-12) * sums[-1]
        assert sums[count - 1] >= share * sums[-1] - slack
        assert count == 1 or sums[count - 2] <= share * sums[-1] + slack


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.1, 0.95])
def test_typical_p_keeps_every_tie(kind, share):
    weights = weights_of(kind, 7, np.float64)
    distances = np.abs(np.log(np.maximum(weights, 1e-300)) + 3)
    kept = nearest(weights, distances, share)
    last = distances[kept > 0].max()
    assert np.array_equal(kept, weights * (distances <= last))
    goal = share * weights.sum()
    assert kept.sum() >= goal * (1 - 1e-12)
    assert weights[distances < last].sum() < goal * (1 + 1e-12)


def test_sampled_threshold_rarely_needs_full_search(monkeypatch):
    """A wrong threshold only costs time: it triggers a search of the whole row."""
    looked_at = []
    last = selection._last_weight

    def counting(values, goal):
        looked_at.append(len(values))
        return last(values, goal)

    monkeypatch.setattr(selection, "_last_weight", counting)
    for seed in range(30):
        for kind in (flat, peaked):
            nucleus(weights_of(kind, seed, np.float32), 0.95)
    assert np.mean(np.array(looked_at) > SIZE / 8) < 0.05
    assert np.mean(looked_at) < SIZE / 20


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 700, SIZE - 1])
def test_top_k_equals_a_full_sort_with_ties(kind, k):
    logits = np.log(np.maximum(weights_of(kind, 3, np.float32), 1e-30))
    kth = np.sort(logits)[-k]
    assert np.array_equal(top(logits, k), np.flatnonzero(logits >= kth))
