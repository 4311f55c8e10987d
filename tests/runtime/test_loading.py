"""Slots and lengths of `load`."""

import dataclasses

import pytest

import specedge
from specedge.bundle import store
from specedge.errors import ContextLengthError
from specedge.runtime.backend import self_test
from specedge.runtime.planning import cost_files
from specedge.runtime.requests.loader import memory_of

pytestmark = pytest.mark.usefixtures("own_costs")


def test_max_length_limits_prompt_and_output():
    short = specedge.load(store.embedded_folder(), max_length=40)
    one = short.generate([7] * 30, 100, ignore_eos=True)
    assert (len(one.tokens), one.finish_reason) == (10, "context")
    with pytest.raises(ContextLengthError, match="takes 40 with at least one new"):
        short.generate([7] * 40)


def test_slot_memory_is_reported(pipeline):
    one, four = memory_of(pipeline.bundle), memory_of(pipeline.bundle, slots=4)
    assert (
        four.slot
        == one.slot
        == sum(
            array.nbytes
            for model in (pipeline.target, pipeline.draft)
            for array in model.cache.arrays.values()
        )
    )
    assert four.parts["caches"] == 4 * one.slot
    assert four.parts["packed weights"] == one.parts["packed weights"]
    half = memory_of(pipeline.bundle, slots=4, max_length=pipeline.bundle.context_length // 2)
    assert half.slot == pytest.approx(one.slot / 2, rel=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 0}, "slots must be at least 1, got 0"),
        ({"slots": 1, "max_length": 10**6}, "max_length must be between 2 and"),
        ({"slots": "2"}, "slots must be an integer"),
        ({"slots": True}, "slots must be an integer"),
    ],
)
def test_invalid_slots_and_lengths_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        specedge.load(store.embedded_folder(), **options)


def test_all_slots_share_invariant_lengths_of_self_test(monkeypatch):
    def run(model, facts, seconds):
        model.invariant_lengths = (1, 2)
        return "wider passes have other bits here"

    monkeypatch.setattr(self_test, "verify_cpu_lengths", run)
    with specedge.load(slots=2) as pipeline:
        found = [slot.target.invariant_lengths for slot in pipeline.slots.all]
    assert found == [(1, 2), (1, 2)]


@pytest.fixture
def tested(monkeypatch):
    """Return the lengths that the self-tests of later loads test."""
    lengths, verify = [], self_test.verify_lengths

    def record(model, *args):
        lengths.append(model.invariant_lengths)
        return verify(model, *args)

    monkeypatch.setattr(self_test, "verify_lengths", record)
    return lengths


def test_a_load_with_confirmed_costs_does_not_repeat_the_self_test(tested):
    with specedge.load() as first:
        first.costs.store(first.costs.table)
    with specedge.load() as second:
        assert len(tested) == 1
        assert second.target.invariant_lengths == first.target.invariant_lengths
        assert second.costs.table == first.costs.table


@pytest.mark.parametrize("change", ["table", "kernels"])
def test_a_load_repeats_the_self_test_that_did_not_pass_here(change, tested, monkeypatch):
    with specedge.load() as first:
        passed = change != "table"
        first.costs.store(dataclasses.replace(first.costs.table, is_invariant=passed))
    if passed:
        monkeypatch.setattr(cost_files, "kernels_fingerprint", lambda: "another processor")
    with specedge.load():
        assert len(tested) == 2


def test_lengths_that_vary_are_tested_and_reported_at_each_load(monkeypatch):
    monkeypatch.setattr(self_test, "_varying_lengths", lambda *_, **__: {9})
    for _ in range(2):
        with specedge.load() as pipeline:
            pipeline.costs.store(pipeline.costs.table)
            assert "passes of 9 tokens are not bitwise equal" in pipeline.note
            assert pipeline.target.invariant_lengths == (1, 2, 3, 5)
