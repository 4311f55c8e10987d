"""The table that a bundle is planned with: stored, measured at load, tuned, or assumed."""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import accumulate
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
from specedge.runtime.planning.cost_table import CostTable, Measurement
from specedge.runtime.requests import loader
from virtual import table, untuned

pytestmark = pytest.mark.usefixtures("own_costs")


@pytest.fixture
def key():
    return cost_files.cost_key(Bundle.read(store.embedded_folder()), Device(), Device(), "gqa")


def fail():
    pytest.fail("measured again")


def quiet(draft):
    """A measurement of a machine without other work."""
    return lambda: Measurement(untuned(draft), busy=False)


def busy(draft):
    """A measurement beside other work."""
    return lambda: Measurement(untuned(draft), busy=True)


def load(key, measure):
    """The costs of a process that loads a bundle."""
    costs = PassCosts(key)
    costs.complete(measure)
    return costs


def test_the_first_measurement_is_stored_for_later_processes(key):
    assert load(key, quiet(0.1)).table == load(key, fail).table == untuned(0.1)


def test_tuned_costs_replace_costs_measured_at_load(key):
    costs = load(key, quiet(0.1))
    costs.store(table(0.2))
    assert costs.table == load(key, fail).table == table(0.2)


def test_a_read_only_folder_keeps_the_measurement_in_memory(key, monkeypatch):
    def refuse(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "replace", refuse)
    costs = load(key, quiet(0.1))
    costs.complete(fail)
    assert costs.table == untuned(0.1)
    assert PassCosts(key).table.origin == "assumed"


def test_a_damaged_file_is_measured_again_and_noted(key):
    cost_files.write(key, table()).write_text("{", "utf-8")
    costs = PassCosts(key)
    assert "is not used" in costs.note
    costs.complete(quiet(0.2))
    assert PassCosts(key).table == untuned(0.2)


def test_costs_measured_beside_other_work_are_replaced_by_the_next_load(key, replaced_costs):
    first = load(key, busy(0.5))
    assert (first.table, first.note) == (untuned(0.5), None)
    second = load(key, quiet(0.1))
    assert second.table == untuned(0.1)
    assert "waited for a core" in second.note
    third = load(key, fail)
    assert (third.table, third.note) == (untuned(0.1), None)


def test_busy_measurements_lower_costs_until_one_is_quiet(key, replaced_costs):
    earlier = load(key, busy(0.5)).fingerprint
    again = load(key, busy(0.7))
    assert (again.table, again.note) == (untuned(0.5), None)
    again = load(key, busy(0.1))
    assert again.table == PassCosts(key).table == untuned(0.1)
    assert "waited for a core" in again.note
    assert again.restore(earlier)
    assert again.table == untuned(0.5)
    assert load(key, quiet(0.2)).table == load(key, fail).table == untuned(0.2)


@pytest.mark.parametrize(("unit", "is_lower"), [(1.1, False), (0.9, True)])
def test_busy_measurements_of_other_passes_are_not_combined(key, replaced_costs, unit, is_lower):
    load(key, busy(0.5))
    other = replace(table(0.1, rows=9, unit=unit), origin="load")
    costs = load(key, lambda: Measurement(other, busy=True))
    assert costs.table == (other if is_lower else untuned(0.5))
    assert load(key, lambda: Measurement(other, busy=False)).table == other


def test_the_lowest_costs_of_a_few_busy_measurements_are_confirmed(key, replaced_costs):
    """Then a seed reproduces its text, and an interrupted run finds its table."""
    first = load(key, busy(0.9)).fingerprint
    tables = [load(key, busy(draft)).table for draft in (0.8, 0.7, 0.6)]
    assert tables == [*map(untuned, (0.8, 0.7, 0.6))]
    confirmed = load(key, fail)
    assert (confirmed.table, confirmed.note) == (untuned(0.6), None)
    assert confirmed.restore(first)


def test_costs_of_machines_that_are_always_busy_are_confirmed_without_a_note(key, replaced_costs):
    """A CPU quota of a container lets threads wait at every load."""
    for _ in range(cost_files.MAX_BUSY):
        assert load(key, busy(0.5)).note is None
    confirmed = load(key, fail)
    confirmed.contradict()
    for _ in range(cost_files.MAX_BUSY):
        assert load(key, busy(0.7)).table == untuned(0.7)
    assert load(key, fail).table == untuned(0.7)


def test_tables_of_earlier_tunings_are_no_busy_measurements(key, replaced_costs):
    for i in range(cost_files.MAX_BUSY):
        cost_files.write(key, table(i / 10 + 0.1))
    tuned = PassCosts(key)
    tuned.store(untuned(0.9))
    PassCosts(key).contradict()
    load(key, busy(0.8))
    assert load(key, busy(0.7)).table == untuned(0.7)


def test_processes_that_lower_costs_at_once_agree(key, replaced_costs):
    load(key, busy(0.5))
    early, late = PassCosts(key), PassCosts(key)
    early.complete(busy(0.2))
    late.complete(busy(0.1))
    assert early.table == late.table == PassCosts(key).table == untuned(0.2)


def test_equal_costs_are_confirmed_without_a_note(key, replaced_costs):
    load(key, busy(0.5))
    assert load(key, quiet(0.5)).note is None
    load(key, fail)


@pytest.mark.parametrize("first", [quiet(0.5), busy(0.5)])
def test_contradicted_costs_are_measured_again_once(key, replaced_costs, first):
    load(key, first).contradict()
    again = load(key, busy(0.7))
    assert again.table == untuned(0.7)
    assert "round times of an earlier request" in again.note
    again = load(key, quiet(0.2))
    again.contradict()
    assert load(key, fail).table == untuned(0.2)


def test_tuned_costs_are_not_contradicted(key, replaced_costs):
    costs = load(key, quiet(0.1))
    costs.store(table(0.2))
    PassCosts(key).contradict()
    assert load(key, fail).table == table(0.2)


def test_the_first_of_several_processes_to_replace_costs_wins(key, replaced_costs):
    load(key, busy(0.5))
    early, late = PassCosts(key), PassCosts(key)
    early.complete(quiet(0.1))
    late.complete(quiet(0.2))
    assert early.table == late.table == load(key, fail).table == untuned(0.1)


def test_a_process_with_replaced_costs_contradicts_nothing(key, replaced_costs):
    old = load(key, busy(0.5))
    load(key, quiet(0.1))
    old.contradict()
    assert load(key, fail).table == untuned(0.1)


def test_costs_that_cannot_be_replaced_are_used_by_the_process_alone(
    key, replaced_costs, monkeypatch
):
    def refuse(*_):
        raise OSError(30, "Read-only file system")

    costs = load(key, busy(0.5))
    for name in ("link", "replace"):
        monkeypatch.setattr(os, name, refuse)
    costs.contradict()
    assert load(key, quiet(0.1)).table == untuned(0.1)
    assert PassCosts(key).table == untuned(0.5)


def test_kept_costs_are_not_replaced(key, replaced_costs, monkeypatch):
    load(key, busy(0.5)).contradict()
    monkeypatch.setenv("SPECEDGE_KEEP_COSTS", "1")
    assert load(key, fail).table == untuned(0.5)


def test_earlier_costs_can_be_used_again(key, replaced_costs):
    earlier = load(key, busy(0.5)).fingerprint
    costs = load(key, quiet(0.1))
    assert costs.restore(earlier)
    assert costs.table == untuned(0.5)
    assert not costs.restore("another")
    assert load(key, fail).table == untuned(0.1)


def test_only_the_latest_tables_are_stored(key):
    first = load(key, quiet(0.01)).fingerprint
    costs = PassCosts(key)
    for i in range(1, cost_files.MAX_TABLES + 3):
        costs.store(table(i / 10))
    assert len(os.listdir(store.costs_folder())) == cost_files.MAX_TABLES
    assert PassCosts(key).table == table((cost_files.MAX_TABLES + 2) / 10)
    assert not PassCosts(key).restore(first)


def test_a_load_beside_a_busy_process_is_repeated_if_it_was_disturbed(replaced_costs, monkeypatch):
    """The first reliable table is used, and until then the lower costs of those measured."""
    pytest.importorskip("onnxruntime", reason="needs the cpu or gpu extra")
    import specedge

    measured, measure = [], loader.measure
    monkeypatch.setattr(
        loader, "measure", lambda *a, **k: measured.append(measure(*a, **k)) or measured[-1]
    )
    sibling = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        tables = []
        for _ in range(2):
            with specedge.load(store.embedded_folder()) as pipeline:
                tables.append(pipeline.costs.table)
    finally:
        sibling.kill()
        sibling.wait()
    assert len(measured) == (2 if measured[0].busy else 1)
    costs = [measurement.costs for measurement in measured]
    expected = [*accumulate(costs, CostTable.minimum)] if measured[-1].busy else costs
    for table_, costs in zip(tables, [*expected, *expected], strict=False):
        assert table_.greedy.target == costs.greedy.target
        assert table_.greedy.draft == costs.greedy.draft


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


def test_tuning_rejects_context_too_short_for_drafts():
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
        assert 0 <= mode.acceptance["suffix"] < 1
        assert all(list(costs) == sorted(costs) for costs in mode.target)


@pytest.mark.parametrize(("max_tokens", "accepted"), [(8, [1, 1, 1, 1, 0]), (2, [1, 1, 1, 0])])
def test_copy_acceptance_counts_tests_within_each_round(max_tokens, accepted):
    text = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 9]
    assert list(accepted_copies(Suffix(), text, 6, max_tokens)) == accepted
