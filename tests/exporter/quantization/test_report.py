"""Quantization report of two models' logits on a text."""

import math
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from specedge.bundle.manifest import key_value_states
from specedge.exporter.quantization import report
from specedge.exporter.quantization.report import LogitDistance
from specedge.exporter.tracing.geometry import Geometry
from specedge.exporter.verification.runner import PassAction, ReadRows, RepeatRows
from specedge.exporter.verification.subgraph import SubgraphSession

TOKENS = np.array([3, 1, 4, 1, 0])


@pytest.fixture
def logits():
    """The rounded model's and the original's, of five tokens. 2 * [5, 5]"""
    random = np.random.default_rng(0)
    wanted = random.normal(size=(5, 5)).astype(np.float32)
    return wanted + 0.1 * random.normal(size=(5, 5)).astype(np.float32), wanted


def log_softmax(rows):
    return np.log(np.exp(rows) / np.exp(rows).sum(1, keepdims=True))


def test_loss_uses_next_tokens(logits):
    found, wanted = logits
    total = LogitDistance()
    total.add(found, wanted, TOKENS, None)
    places = np.arange(4), TOKENS[1:]
    assert total.loss == pytest.approx(-log_softmax(found)[places].sum())
    assert total.original_loss == pytest.approx(-log_softmax(wanted)[places].sum())
    assert (total.num_tokens, total.num_scored) == (4, 4)


def test_nan_cache_makes_error_nan(logits):
    total = LogitDistance()
    total.compare(*logits)
    total.compare(np.array([1, np.nan]), np.array([1, 2]))
    total.compare(*logits)
    assert np.isnan(total.error)


def test_loss_of_reduced_head_uses_only_its_tokens(logits):
    found, wanted = logits
    head = np.array([0, 1, 7])
    total = LogitDistance()
    total.add(found[:, :3], wanted[:, :3], TOKENS, head)
    rows, columns = [0, 2, 3], [1, 1, 0]  # of the tokens 1, 1 and 0; it has no 4
    assert total.loss == pytest.approx(-log_softmax(found[:, :3])[rows, columns].sum())
    assert (total.num_tokens, total.num_scored) == (4, 3)
    assert total.divergence > 0


def test_rows_are_repeated_up_to_a_late_window():
    stage = SubgraphSession({"key": (1, 2, 8, 3)}, "float32", lambda name, packed: None)
    stage.fill({"key": np.arange(18, dtype=np.float32).reshape(2, 3, 3)})
    first = stage.caches["key"][0, :, :3].copy()
    stage.repeat(3, 7)
    found = stage.caches["key"][0]
    assert np.array_equal(found[:, 3:6], first)
    assert np.array_equal(found[:, 6], first[:, 0])
    assert not found[:, 7].any()


class Model:
    """Logits that are off by `late` from a position on; its actions are kept."""

    def __init__(self, context, late=0.0):
        self.geometry = Mock(
            capacity=context + 8, context_length=context, cache_names=list, num_outputs=5
        )
        self.late, self.actions, self.num_runs = late, [], 0

    def run(self, actions):
        self.actions = actions
        self.num_runs += 1
        return [self.of(action) for action in actions]

    def of(self, action):
        if not isinstance(action, PassAction):
            return [] if isinstance(action, ReadRows) else None
        random = np.random.default_rng(action.past_length)
        logits = random.normal(size=(len(action.tokens), 5))
        late = self.late if action.past_length else 0.0
        return action.then(logits + late * random.normal(size=(5,)))


TEXTS = [np.arange(80) % 5, np.arange(100, 170) % 5]


def distances(original, rounded):
    graph = report.MeasuredGraph(rounded)
    report.measure_distances(original, [graph], TEXTS)
    return graph.near, graph.late


def test_late_window_is_reported_separately():
    original, found = Model(1000), Model(1000, late=2.0)
    near, late = distances(original, found)
    assert near.divergence == 0 < late.divergence
    assert (near.num_tokens, late.num_tokens) == (79 + 69, 63)
    *_, repeat, window = found.actions
    assert repeat == RepeatRows(70, 936)
    assert window.past_length == 936
    said = report._describe_late(near, late, 1000)
    assert said is not None
    assert said.startswith("near position 1000 the KL divergence is ")
    assert report._describe_late(near, distances(original, Model(1000))[1], 1000) is None


def test_divergence_and_losses_are_those_of_float64(monkeypatch):
    monkeypatch.setattr(report, "STRIP_SIZE", 1 << 10)
    random = np.random.default_rng(0)
    exact = random.normal(scale=8, size=(40, 300)).astype(np.float32)
    logits = exact + random.normal(scale=1e-3, size=exact.shape).astype(np.float32)
    tokens, distance = random.integers(0, 300, 40), LogitDistance()
    distance.add(logits, exact, tokens, None)
    p, q = (log_softmax(x[:-1].astype(np.float64)) for x in (exact, logits))
    divergence = (np.exp(p) * (p - q)).sum()
    assert distance.divergence == pytest.approx(divergence, abs=1e-7)
    assert distance.loss == pytest.approx(-q[np.arange(39), tokens[1:]].sum(), rel=1e-7)
    assert distance.original_loss == pytest.approx(-p[np.arange(39), tokens[1:]].sum(), rel=1e-7)
    logits[3, 7] = np.nan
    distance.compare(logits, exact)
    assert np.isnan(distance.error)


def test_texts_are_run_sequentially_if_outputs_are_large(monkeypatch):
    whole = distances(Model(1000), first := Model(1000, late=2.0))
    monkeypatch.setattr(report, "MAX_OUTPUTS", 80 * 5)
    assert distances(Model(1000), second := Model(1000, late=2.0)) == whole
    assert (first.num_runs, second.num_runs) == (1, 2)


def test_cache_values_count_as_outputs():
    layers = (
        key_value_states(0, (32, 128), (32, 64), "float32"),
        key_value_states(1, (8, 64), (8, 64), "float32"),
    )
    shape = Geometry(context_length=10, capacity=16, padded_vocab_size=500, layers=layers)
    values = sum(math.prod(size) // 16 for size in shape.cache_shapes())
    assert shape.num_outputs == 500 + values == 500 + 32 * 192 + 8 * 128


def test_short_context_has_no_late_window():
    near, late = distances(Model(140), found := Model(140, late=2.0))
    assert (near.num_tokens, late.num_tokens) == (148, 0)
    assert len(found.actions) == 6
    assert report._describe_late(near, late, 140) is None


def test_perplexity_beyond_the_largest_float_is_reported_as_finite():
    distance = LogitDistance(loss=1e6, original_loss=2e6, num_tokens=10, num_scored=10)
    texts = SimpleNamespace(name="texts")
    described = report._quantization_report(distance, texts, {})
    assert 1e300 < described.perplexity < math.inf
    assert described.perplexity == described.original_perplexity
