"""When tests share a trace, and when they must not."""

import pytest
import torch

import traces
from architectures import ARCHITECTURES
from checkpoints import make_model


def test_model_as_its_library_has_it_may_share_trace():
    assert not traces._is_changed(make_model(ARCHITECTURES["llama"][1]()))


@pytest.mark.parametrize("of_class", [True, False])
def test_model_in_which_test_has_swapped_forward_is_traced_itself(monkeypatch, of_class):
    model = make_model(ARCHITECTURES["llama"][1]())
    norm = model.model.norm
    monkeypatch.setattr(type(norm) if of_class else norm, "forward", lambda *given: given[-1])
    assert traces._is_changed(model)


def test_model_with_hook_is_traced_itself():
    model = make_model(ARCHITECTURES["llama"][1]())
    model.model.norm.register_forward_hook(lambda *given: torch.zeros(1))
    assert traces._is_changed(model)
