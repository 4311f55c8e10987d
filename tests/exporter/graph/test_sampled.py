"""K draft steps that draw, in one graph, are K passes and K draws: from the same uniforms the same
tokens, and the distributions that the accept rule needs.
"""

from dataclasses import replace

import numpy as np
import pytest

from draft_calls import pipelines_by_draft
from specedge.bundle.gpu_signatures import SAMPLED, num_best
from specedge.runtime.backend.cuda.draft_graphs import (
    DeviceDistribution,
    DraftGraph,
    SampledDraftGraph,
)
from specedge.runtime.backend.model_session import ModelSession
from specedge.runtime.backend.sessions import Device
from specedge.runtime.decoding.verification import DraftRequest, draw_draft
from specedge.runtime.sampling.history import History
from specedge.sampling_options import Sampling, TimestampRules

OPS = "onnx"  # float32 is batch-invariant
TEXT = [7 * i % 500 for i in range(300)]
SAMPLINGS = [
    {"temperature": 1.0},
    {"temperature": 1e-60},
    {"temperature": 1e60},
    {"temperature": 0.8, "top_k": 1},
    {"temperature": 1.5, "top_k": 200},
    {"temperature": 1.0, "top_k": 10**6},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.1, "top_k": 40},
    {"temperature": 1.0, "min_p": 1.0},
    {"repetition_penalty": 1.3},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.2},
]


@pytest.fixture(scope="module")
def session(bundle):
    return ModelSession(bundle, bundle.draft, Device(), OPS, SAMPLED)


@pytest.fixture
def sampled(session, cached):
    return SampledDraftGraph(session, cached.cache, None)


def by_passes(model, tokens, request):
    def next_row(drafted):
        return model.forward(drafted[-1:] or tokens)[-1]

    return draw_draft(next_row, request)


@pytest.mark.parametrize("options", SAMPLINGS, ids=str)
def test_sampled_draft_loop_equals_single_passes(passes, cached, sampled, options):
    sampling, k = Sampling(**options), sampled.num_steps
    for i in range(4):
        count = (1, k, k + 1, 2 * k + 1)[i % 4]
        length, num_fed = 20 + i, 1 + i % 2
        for model in (passes, cached):
            model.reuse(TEXT[:length])
            model.prefill(TEXT[model.length : length])
        tokens = TEXT[length : length + num_fed]
        history = History(TEXT[: length + num_fed])
        numbers = np.random.default_rng(i).random(count)
        asked = tokens, DraftRequest(history, count, sampling, numbers)
        assert sampled.supports(history, sampling)
        found, wanted = sampled.draft(*asked), by_passes(passes, *asked)
        assert found.tokens == wanted.tokens
        assert cached.cache._tokens == passes.cache._tokens
        rows = (model.cache_rows(0, model.length) for model in (cached, passes))
        assert all(map(np.array_equal, *rows))
        size = sampled._size
        for j, token in enumerate(wanted.tokens):
            mine, its = found.distribution(j), wanted.distribution(j)
            if sampling.greedy:
                assert mine is its is None
                continue
            assert mine.of(token) == pytest.approx(its.of(token), rel=1e-5)
            assert mine.of((token + 1) % size) == pytest.approx(
                its.of((token + 1) % size), rel=1e-5
            )
            np.testing.assert_allclose(mine.row(size), its.row(size), rtol=1e-5, atol=1e-7)


def test_full_distribution_is_fetched_on_demand(sampled):
    def kinds(**options):
        sampled._cache.truncate(0)
        sampling = Sampling(temperature=1.0, **options)
        request = DraftRequest(History([5]), 2, sampling, np.full(2, 0.5))
        return [type(one) is DeviceDistribution for one in sampled.draft([5], request).probs]

    most = num_best(sampled._size)
    assert kinds() == kinds(top_k=most + 1) == [True, True]
    assert kinds(top_k=most) == kinds(top_k=2) == kinds(min_p=1.0) == [False, False]


def test_distribution_fetched_late_belongs_to_its_call(sampled, monkeypatch):
    fetched = []
    fetch = SampledDraftGraph._fetch
    monkeypatch.setattr(
        SampledDraftGraph, "_fetch", lambda self, array: fetched.append(1) or fetch(self, array)
    )
    sampling = Sampling(temperature=1.0)

    def draft(over, token):
        request = DraftRequest(History([token]), 1, sampling, np.array([0.5]))
        return over.draft([token], request).distribution(0)

    first, other = draft(sampled, 5), DraftGraph.over(sampled, sampled._cache)
    dropped = draft(sampled, 6)
    assert len(fetched) == 1  # the first's, before it was written anew
    del dropped
    last = draft(other, 7)
    assert len(fetched) == 1  # the previous distribution is no longer available
    sampled._cache.truncate(0)
    again = draft(sampled, 5)
    assert np.array_equal(first.weights, again.weights)
    assert not np.array_equal(first.weights, last.weights)


@pytest.mark.parametrize(
    "options",
    [
        {"presence_penalty": 1.0},
        {"frequency_penalty": 0.5},
        {"logit_bias": {3: 1.0}},
        {"bad_words": [[3, 4]]},
        {"min_new_tokens": 3},
        {"no_repeat_ngram_size": 3},
        {"suppress_tokens": (3,)},
        {"timestamps": TimestampRules(9, 8, 2)},
        {"begin_suppress_tokens": (3,)},
        {"typical_p": 0.9},
    ],
    ids=str,
)
def test_unsupported_options_fall_back_to_passes(sampled, options):
    sampling = Sampling(temperature=1.0, **options)
    assert not sampled.supports(History([5, 6]), sampling)
    later = History([5], [6, 7, 8])
    at_begin = {"min_new_tokens", "begin_suppress_tokens"}
    assert sampled.supports(later, sampling) is bool(at_begin & options.keys())


def test_non_finite_logits_fall_back_to_passes(sampled, monkeypatch):
    buffers = sampled._session.buffers
    fetch = type(buffers).fetch

    def damaged(self, array):
        found = fetch(self, array)
        if found.dtype == np.float64:
            found = found.copy()
            found[1, 1] = np.nan
        return found

    monkeypatch.setattr(type(buffers), "fetch", damaged)
    request = DraftRequest(History([5]), 1, Sampling(temperature=1.0), np.array([0.5]))
    assert sampled.draft([5], request) is not None  # the second step was not asked for
    sampled._cache.truncate(0)
    assert sampled.draft([5], replace(request, max_tokens=2)) is None
    assert sampled._cache.length == 0


def measured(sampled, monkeypatch, costs):
    """With calls that take as many passes as these say, one number for each of its examples."""
    seconds = iter([value for cost in costs for value in (cost, 1.0)])
    monkeypatch.setattr(DraftGraph, "_median", lambda self, run: next(seconds))
    assert sampled.measure(lambda sampling: None)
    return sampled


def test_longer_drafts_use_several_calls_only_if_faster(sampled, monkeypatch):
    few, whole, k = Sampling(temperature=1.0, top_k=2), Sampling(temperature=1.0), sampled.num_steps
    call, counts = measured(sampled, monkeypatch, (k - 0.1, 1.5)), range(1, 3 * k + 1)
    assert [n for n in counts if call.is_faster(n, few)] == [k, 2 * k, 3 * k]
    assert [n for n in counts if call.is_faster(n, whole)] == [*counts][1:]


def test_settings_not_measurable_with_small_head_use_passes(sampled, monkeypatch):
    sampled._size = 16  # of which the examples leave all
    call = measured(sampled, monkeypatch, (1.5, 1.5))
    assert call.is_faster(2, Sampling(temperature=1.0))
    for sampling in (Sampling(), Sampling(temperature=1.0, top_k=5)):
        assert not call.is_faster(call.num_steps, sampling)


@pytest.fixture(scope="module")
def pipelines(bundle):
    """One that drafts by passes and one that does in one call, on the CPU."""
    with pipelines_by_draft(bundle.folder, OPS) as pipelines:
        yield pipelines


@pytest.mark.parametrize("options", [SAMPLINGS[0], SAMPLINGS[-1]], ids=str)
def test_texts_equal_drafts_by_passes(pipelines, options):
    for seed in range(2):
        request = {"seed": seed, "num_draft_tokens": 4, "drafter": "model", "ignore_eos": True}
        found = [one.generate(TEXT[seed : seed + 9], 40, **request, **options) for one in pipelines]
        assert found[0].tokens == found[1].tokens
        assert found[0].stats.num_accepted == found[1].stats.num_accepted


def test_pruned_head_columns_map_to_token_ids(bundle, passes, open_with_pruned_head):
    ids, session, feed = open_with_pruned_head(SAMPLED)
    feed |= {name: np.ones_like(feed[name]) for name in ("temperature", "top_p")}
    feed["repetition_penalty"][:] = 1
    feed["uniforms"][:] = 0.4
    (drawn,) = session.run(["drawn"], feed)
    tokens = [5]
    for row in drawn:
        logits = passes.forward(tokens[-1:]).array()[-1].astype(float)
        sums = np.exp(logits - logits.max()).cumsum()
        column = int(sums.searchsorted(0.4 * sums[-1], "right"))
        assert row[0] == column
        tokens.append(ids[column])
