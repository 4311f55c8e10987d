"""What a pipeline knows of its costs: stored, estimated, learnt from a request, or tuned."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from specedge import store
from specedge.bundle import Bundle
from specedge.errors import ContextLengthError, SpecEdgeError
from specedge.runtime.backend.sessions import Device
from specedge.runtime.bench.tune import accepted_copies, measure
from specedge.runtime.drafters.prompt_lookup import Lookup
from specedge.runtime.planning import cost_files
from specedge.runtime.planning.cost_table import EXPECTED, estimate
from specedge.runtime.planning.known_costs import KnownCosts, Seen, measured
from virtual import table


@pytest.fixture
def bundle():
    return Bundle.read(store.embedded())


@pytest.fixture
def key(bundle):
    return cost_files.key_of(bundle, Device(), Device(), "gqa")


def seen(**changes):
    target = {1: [9.0, 2.0, 1.5, 2.5], 5: [9.0, 4.0, 2.0, 3.0], 3: [1.0]}
    draft = {(1, 4): [9.0, 0.75, 0.75], (2, 1): [9.0, 0.25, 0.25], (1, 40): [9.0] * 9}
    facts = {"greedy": True, "target": target, "draft": draft}
    facts |= {"firsts": {1: [0.25] * 9, 2: [0.3] * 9}}
    return Seen(**facts | {"host": 0.1, "num_tested": 10, "num_accepted": 9} | changes)


def test_a_first_request_is_planned_with_an_estimate_and_serves_the_next(bundle, key):
    costs = KnownCosts(bundle, key)
    assert costs.table.origin == "bytes"
    costs.learn(seen())
    assert costs.table.origin == "use"
    assert KnownCosts(bundle, key).table == costs.table


def test_drawn_text_is_planned_with_costs_that_no_request_changes(bundle, key):
    costs = KnownCosts(bundle, key)
    before = costs.settled_table
    costs.learn(seen())
    assert costs.settled_table == before == KnownCosts(bundle, key).settled_table
    costs.remember(table())
    assert costs.settled_table == table() == KnownCosts(bundle, key).settled_table


def test_what_was_seen_replaces_the_estimate_and_scales_its_neighbours(bundle):
    before = estimate(bundle, 16)
    after = measured(before, seen())
    known, (target,) = before.greedy.target[0], after.greedy.target
    assert target[0] == 2.0
    assert target[4] == pytest.approx(3.0)
    assert target[16] == pytest.approx(known[16] * 3.0 / known[4])
    assert list(target) == sorted(target)
    ratio = (2 * 0.75 + 2 * 0.25) / (2 * 4.0 + 2 * 1.1)  # passes, one over two tokens is 1.1
    assert after.greedy.draft[0] == pytest.approx([ratio * k for k in range(1, 17)])
    assert after.greedy.pending == pytest.approx((0.1 * ratio,))
    assert after.greedy.host[0] == 0.1
    rate = (9 + 3 * EXPECTED) / (10 + 3)  # what was expected counts as three tests
    assert after.greedy.acceptance == before.greedy.acceptance | {"model": rate}
    assert after.sampled.target == after.greedy.target
    assert after.sampled.host == before.sampled.host
    assert after.sampled.acceptance == before.sampled.acceptance


def test_one_bad_text_does_not_lower_what_later_ones_expect(bundle):
    found = measured(estimate(bundle, 16), seen(num_accepted=1))
    assert found.greedy.acceptance == estimate(bundle, 16).greedy.acceptance


@pytest.mark.parametrize(
    "change", [{"target": {}}, {"draft": {}}, {"draft": {(1, 4): [1.0, 1.0, 1.0]}}]
)
def test_too_little_is_not_learnt_from(bundle, key, change):
    costs = KnownCosts(bundle, key)
    costs.learn(seen(**change))
    assert costs.table.origin == "bytes"
    assert not store.costs_folder().exists()


def test_measured_costs_stay_as_they_are(bundle, key):
    KnownCosts(bundle, key).remember(table())
    costs = KnownCosts(bundle, key)
    costs.learn(seen())
    assert costs.table == table()


def test_a_pipeline_that_was_not_loaded_learns_nothing(bundle):
    costs = KnownCosts(bundle)
    before = costs.table
    costs.learn(seen())
    assert costs.table is before
    with pytest.raises(SpecEdgeError, match="not stored"):
        costs.remember(table())


def test_a_full_disk_does_not_stop_a_request(bundle, key, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    costs = KnownCosts(bundle, key)
    costs.learn(seen())
    assert costs.table.origin == "use"
    assert KnownCosts(bundle, key).table.origin == "bytes"


def test_a_damaged_file_leaves_the_estimate_and_a_note(bundle, key):
    cost_files.write(key, table()).write_text("{", "utf-8")
    costs = KnownCosts(bundle, key)
    assert costs.table.origin == "bytes"
    assert "is not used" in costs.note


def test_a_loaded_pipeline_learns_from_its_first_request_whatever_it_asks_for():
    pytest.importorskip("onnxruntime", reason="needs the cpu or gpu extra")
    import specedge

    pipeline = specedge.load(store.embedded())
    pipeline.generate("def f(", 40, num_draft_tokens=2)
    learnt = pipeline.costs.table
    assert learnt.origin == "use"
    assert specedge.load(store.embedded()).costs.table == learnt
    pipeline.generate("def f(", 40)
    assert pipeline.costs.table is learnt


def test_a_pair_in_whose_context_no_draft_token_fits_cannot_be_tuned():
    models = {name: SimpleNamespace(context_length=length) for name, length in (("a", 9), ("b", 2))}
    pair = SimpleNamespace(bundle=SimpleNamespace(models=models), max_planned_tokens=8)
    with pytest.raises(ContextLengthError, match="needs a context of 3 tokens, the pair has 2"):
        measure(pair)


def test_a_text_of_one_round_tells_what_a_pass_takes(pipeline, monkeypatch):
    """A slow target's first round may take all the time of a text."""
    from specedge.runtime.bench import tune as tuning

    monkeypatch.setattr(tuning, "TEXT_SECONDS", -1.0)
    found, _ = tuning._run_texts(pipeline, [0, 4], lambda share: None)
    assert all(sum(map(len, one.target.values())) == 1 for one in found["greedy"])


@pytest.mark.slow
def test_tuning_times_every_pass_within_the_context(pipeline, monkeypatch):
    from specedge.runtime.bench import tune as tuning

    monkeypatch.setattr(tuning, "SECONDS", 1e-9)
    monkeypatch.setattr(tuning, "TEXT_TOKENS", 24)
    shares = []
    found = tuning.measure(pipeline, shares.append).costs
    assert found.origin == "tune"
    assert found.rows == (*range(1, 10), 17)
    assert found.lengths == (32, 224, 448)
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert [len(found.greedy.draft[0]), len(found.greedy.host)] == [9, 10]
    for mode in (found.greedy, found.sampled):
        assert list(mode.host) == sorted(mode.host)
        assert all(list(costs) == sorted(costs) for costs in mode.draft)
        assert all(pending >= 0 for pending in mode.pending)
        assert 0.3 < mode.acceptance["model"] < 1
        assert 0 < mode.acceptance["lookup"] < 1
        assert 0 < mode.acceptance["suffix"] < 1
        assert all(list(costs) == sorted(costs) for costs in mode.target)


@pytest.mark.parametrize(("max_tokens", "accepted"), [(8, [1, 1, 1, 1]), (2, [1, 1, 1, 0])])
def test_copies_are_judged_as_rounds_of_their_drafter_alone_would_test_them(max_tokens, accepted):
    text = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 9]
    assert list(accepted_copies(Lookup(), text, 6, max_tokens)) == accepted
