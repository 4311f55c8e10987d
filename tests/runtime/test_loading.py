"""Slots and lengths of `load`."""

import pytest

import specedge
from specedge.bundle import store
from specedge.errors import ContextLengthError
from specedge.runtime.backend import self_test
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
