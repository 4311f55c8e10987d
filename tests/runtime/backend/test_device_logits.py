"""On-device logits: top logits and distributions equal those of full rows."""

import numpy as np
import pytest

from specedge.bundle.gpu_signatures import num_best
from specedge.errors import SpecEdgeError
from specedge.runtime.backend.cuda.device_logits import DeviceLogits
from specedge.runtime.sampling.history import History
from specedge.runtime.sampling.logits import Logits
from specedge.runtime.sampling.probabilities import greedy_token, row_distribution
from specedge.sampling_options import Sampling

NOTHING = History([0])


class Device:
    """Rows as a scored graph has them; `fetches` is what was fetched of it."""

    def __init__(self, logits, ids=None):
        self.logits, self.fetches = np.asarray(logits, np.float32), []
        self.scores = DeviceLogits(self.all, self.best, self.logits.shape[1], ids)
        self.whole = Logits(self.logits, ids)

    def all(self):
        self.fetches.append("all")
        return self.logits

    def best(self):
        self.fetches.append("best")
        num = num_best(self.logits.shape[1])
        order = np.argsort(-self.logits, axis=1, kind="stable")[:, :num]
        with np.errstate(invalid="ignore"):
            wrong = (self.logits * 0).sum(1, keepdims=True)
        values = np.take_along_axis(self.logits, order, 1)
        return np.concatenate([values, order, wrong], 1, dtype=np.float32)


def rows(kind, width):
    random = np.random.default_rng(width)
    logits = random.standard_normal((3, width)).astype(np.float32)
    return np.round(4 * logits) / 4 if kind == "tied" else logits


@pytest.mark.parametrize("width", [5, 64, 65, 3000])
@pytest.mark.parametrize("kind", ["apart", "tied"])
def test_top_logits_equal_top_of_full_row(kind, width):
    logits = rows(kind, width)
    for count in (1, 2, 7, 63, 64, 65):
        device = Device(logits)
        for i in range(len(logits)):
            found, wanted = device.scores[i].largest(count), device.whole[i].largest(count)
            assert found[0].tolist() == wanted[0].tolist()
            assert found[1].tobytes() == wanted[1].tobytes()


@pytest.mark.parametrize(("width", "ids"), [(5, True), (64, False), (65, True), (3000, False)])
@pytest.mark.parametrize("kind", ["apart", "tied"])
def test_a_distribution_equals_that_of_the_full_row_bitwise(kind, width, ids):
    logits = rows(kind, width)
    tokens = np.arange(width) * 3 if ids else None
    for top_k in (1, 4, 20, 63, 64, 70, 0):
        for sampling in (Sampling(0.7, top_k=top_k), Sampling(1.0, top_k=top_k, top_p=0.8)):
            device = Device(logits, tokens)
            for i in range(len(logits)):
                found, wanted = (
                    row_distribution(scores[i], sampling, NOTHING).row(3 * width)
                    for scores in (device.scores, device.whole)
                )
                assert found.tobytes() == wanted.tobytes()


def test_no_row_is_fetched_for_a_greedy_choice_nor_for_top_k():
    device = Device(rows("apart", 3000))
    assert greedy_token(device.scores[2], Sampling(), NOTHING) == device.logits[2].argmax()
    row_distribution(device.scores[1], Sampling(1.0, top_k=20), NOTHING)
    assert device.fetches == ["best"]
    row_distribution(device.scores[1], Sampling(1.0, top_k=64), NOTHING)
    assert device.fetches == ["best", "all"]


def test_full_row_is_fetched_if_last_score_may_be_tied():
    logits = rows("apart", 3000)
    logits[0, 100:200] = logits.max() + 1
    device = Device(logits)
    assert device.scores[0].largest(1)[0] == [100]
    assert device.fetches == ["best", "all"]
    assert len(row_distribution(device.scores[0], Sampling(1.0, top_k=20), NOTHING).weights) == 100


def test_options_for_single_tokens_fetch_the_full_row():
    device = Device(rows("apart", 3000))
    least = int(device.logits[0].argmin())
    sampling = Sampling(1.0, top_k=2, logit_bias={least: 100.0})
    assert row_distribution(device.scores[0], sampling, NOTHING).of(least) > 0.99


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_logits_are_an_error(value):
    logits = rows("apart", 3000)
    logits[:, 7] = value
    for sampling in (Sampling(), Sampling(1.0, top_k=20)):
        device = Device(logits)
        drawn = greedy_token if sampling.greedy else row_distribution
        with pytest.raises(SpecEdgeError, match="logits are not numbers"):
            drawn(device.scores[0], sampling, NOTHING)
