"""The table that a bundle is planned with: stored, measured at load, tuned, or assumed."""

import os
from types import SimpleNamespace

import pytest

from specedge.benchmarks import tune as tuning
from specedge.benchmarks.tune import accepted_copies
from specedge.bundle import Bundle, store
from specedge.errors import ContextLengthError, SpecEdgeError
from specedge.runtime.backend.sessions import Device
from specedge.runtime.drafters.suffix import Suffix
from specedge.runtime.planning import cost_files
from specedge.runtime.planning.cost_files import PassCosts
from virtual import table

pytestmark = pytest.mark.usefixtures("own_costs")


@pytest.fixture
def key():
    return cost_files.cost_key(Bundle.read(store.embedded_folder()), Device(), Device(), "gqa")


def fail():
    pytest.fail("measured again")


def test_the_first_measurement_is_stored_for_later_processes(key):
    costs = PassCosts(key)
    costs.complete(lambda: table(0.1))
    later = PassCosts(key)
    later.complete(fail)
    assert later.table == costs.table == table(0.1)


def test_tuned_costs_replace_costs_measured_at_load(key):
    costs = PassCosts(key)
    costs.complete(lambda: table(0.1))
    costs.store(table(0.2))
    assert costs.table == PassCosts(key).table == table(0.2)


def test_a_read_only_folder_keeps_the_measurement_in_memory(key, monkeypatch):
    def refuse(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "replace", refuse)
    costs = PassCosts(key)
    costs.complete(lambda: table(0.1))
    costs.complete(fail)
    assert costs.table == table(0.1)
    assert PassCosts(key).table.origin == "assumed"


def test_a_damaged_file_is_measured_again_and_noted(key):
    cost_files.write(key, table()).write_text("{", "utf-8")
    costs = PassCosts(key)
    assert "is not used" in costs.note
    costs.complete(lambda: table(0.2))
    assert PassCosts(key).table == table(0.2)


def test_a_pipeline_without_bundle_assumes_costs_and_stores_none():
    costs = PassCosts()
    assert costs.table.origin == "assumed"
    with pytest.raises(SpecEdgeError, match="cannot be stored"):
        costs.store(table())
    assert not store.costs_folder().exists()


def test_a_loaded_pipeline_plans_with_measured_costs_that_no_request_changes():
    pytest.importorskip("onnxruntime", reason="needs the cpu or gpu extra")
    import specedge

    with specedge.load(store.embedded_folder()) as pipeline:
        measured = pipeline.costs.table
        assert measured.origin == "load"
        assert measured.max_draft_tokens >= 8
        for temperature in (0.0, 1.0):
            pipeline.generate("def f(", 40, temperature)
        assert pipeline.costs.table is measured
    with specedge.load(store.embedded_folder()) as again:
        assert again.costs.table == measured


def test_a_context_without_room_for_drafts_cannot_be_tuned():
    models = {name: SimpleNamespace(context_length=length) for name, length in (("a", 9), ("b", 3))}
    pair = SimpleNamespace(bundle=SimpleNamespace(models=models), max_planned_tokens=8)
    with pytest.raises(ContextLengthError, match="needs a context of 10 tokens, the pair has 3"):
        tuning.measure(pair)


@pytest.mark.slow
def test_tuning_times_every_pass_within_the_context(pipeline, monkeypatch):
    monkeypatch.setattr(tuning, "SECONDS", 1e-9)
    monkeypatch.setattr(tuning, "TEXT_TOKENS", 24)
    shares = []
    found = tuning.measure(pipeline, shares.append).costs
    assert found.origin == "tune"
    assert found.rows == (1, 2, 3, 5, 9, 17)
    assert found.lengths == (32, 224, 448)
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert len(found.greedy.draft[0]) == 5
    assert found.sampled.token > found.greedy.token == 0
    for mode in (found.greedy, found.sampled):
        assert mode.host > 0
        assert all(list(costs) == sorted(costs) for costs in mode.draft)
        assert 0.3 < mode.acceptance["model"] < 1
        assert 0 < mode.acceptance["suffix"] < 1
        assert all(list(costs) == sorted(costs) for costs in mode.target)


@pytest.mark.parametrize(("max_tokens", "accepted"), [(8, [1, 1, 1, 1, 0]), (2, [1, 1, 1, 0])])
def test_acceptance_of_copies_counts_tests_of_their_own_rounds(max_tokens, accepted):
    text = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 9]
    assert list(accepted_copies(Suffix(), text, 6, max_tokens)) == accepted
