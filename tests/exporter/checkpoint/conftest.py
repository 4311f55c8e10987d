"""A hub on this machine with one repository."""

import os

import pytest
from huggingface_hub import constants

import hub_server
from checkpoints import make_checkpoint, make_tokenizer
from hubs import NAME, patch_endpoint


@pytest.fixture(scope="session")
def original(tmp_path_factory):
    """A checkpoint of a few megabytes."""
    folder = tmp_path_factory.mktemp("original")
    tokenizer = make_tokenizer(folder / "tokenizer")
    return make_checkpoint(folder / "model", "llama", tokenizer, hidden=256, scale=0.05)


@pytest.fixture
def server(original, tmp_path, monkeypatch):
    """A hub with one repository, which is the one that huggingface_hub asks, and an empty cache."""
    place = tmp_path / "hub" / NAME
    place.parent.mkdir(parents=True)
    place.mkdir()
    for path in original.iterdir():
        os.link(path, place / path.name)
    found = hub_server.Hub(tmp_path / "hub")
    servers = hub_server.serve(found)
    patch_endpoint(monkeypatch, f"http://127.0.0.1:{found.port}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between two tries
    # A broken connection loses its partial chunk; the file is smaller than one default chunk.
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100_000)
    yield found
    for one in servers:
        one.shutdown()
        one.server_close()
