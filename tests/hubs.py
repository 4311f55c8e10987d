"""Shared parts of the tests of the hub: redirection of huggingface_hub, and its requests."""

import contextlib

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

from specedge.errors import CheckpointError
from specedge.exporter import Progress
from specedge.exporter.checkpoint import checkpoints, loader

NAME = "org/model"
WHOLE = "model.safetensors"


def patch_endpoint(monkeypatch, endpoint):
    """Set HF_ENDPOINT and HF_HUB_OFFLINE=0, and import huggingface_hub again."""
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


class Bars(Progress):
    """Remembers each step's total, and how it moved."""

    def __init__(self):
        super().__init__()
        self.moves = {}

    @contextlib.contextmanager
    def shown(self, description, total):
        yield self.moves.setdefault(description, [total]).append


def find(revision=None, name=NAME):
    return checkpoints.find("target", name, revision)


def refusal(revision=None, name=NAME):
    with pytest.raises(CheckpointError) as caught:
        loader.load(find(revision, name), Progress())
    assert "\n" not in str(caught.value)
    return str(caught.value)


def files(server, kind=WHOLE):
    """The ranges in which a file was asked for, from wherever it is."""
    return [r for method, path, r in server.requests if method == "GET" and path.endswith(kind)]


def same(found, folder):
    loaded = loader.load(found, Progress())
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.arange(8)[None]
    with torch.no_grad(), loaded.sources.materialized(loaded.model):
        return torch.equal(loaded.model(tokens).logits, whole(tokens).logits)
