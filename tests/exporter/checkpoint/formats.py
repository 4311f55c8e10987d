"""What tests of stored weights share: small checkpoints, and whether their numbers are theirs."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from architectures import ARCHITECTURES
from checkpoints import make_model, make_tokenizer, save
from specedge.errors import CheckpointError
from specedge.exporter import Progress
from specedge.exporter.checkpoint import checkpoints, loading
from specedge.exporter.checkpoint.lazy_tensors import numbers

TOKENS = torch.arange(12)[None]


def load(folder):
    progress = Progress()
    loaded = loading.load(checkpoints.find("target", str(folder), None), progress)
    return loaded, " ".join(progress.notes)


def refusal(folder):
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), "utf-8")


def make(folder, name, **changes):
    """A checkpoint of one of the tried families, and its model in float32."""
    config = ARCHITECTURES[name][1]()
    for key, value in changes.items():
        setattr(config, key, value)
    model = make_model(config)
    tokenizer = make_tokenizer(folder / "tokenizer")
    made = save(model.to(torch.bfloat16), tokenizer, folder / "checkpoint")
    return made, AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32).eval()


def stored_numbers(loaded):
    """Every parameter with what is behind its stand-in, in float32."""
    found = {}
    for name, parameter in loaded.model.named_parameters():
        behind = loaded.sources.behind(parameter)
        found[name] = (parameter if behind is None else numbers(behind)).float()
    return found


def same(loaded, wanted):
    """Whether a model holds, and computes with, exactly the numbers of another."""
    found, expected = stored_numbers(loaded), dict(wanted.named_parameters())
    assert found.keys() == expected.keys()
    with torch.no_grad(), loaded.sources.reading(loaded.model, at_once=True):
        logits = loaded.model(TOKENS).logits
        near = torch.allclose(logits, wanted(TOKENS).logits, rtol=1e-5, atol=1e-5)
    return near and all(torch.equal(found[name], expected[name]) for name in found)
