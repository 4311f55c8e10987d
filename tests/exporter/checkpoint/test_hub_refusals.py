"""Refusals without the hub: names, no network, and downloads that exceed the disk."""

from types import SimpleNamespace

import pytest
from formats import refusal

from specedge.errors import CheckpointError
from specedge.exporter.checkpoint import hub


def test_hub_id_without_network_is_refused_at_once():
    assert "hub cannot be reached" in refusal("someone/something")


def test_unreachable_hub_is_refused_at_once(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    api = hub.huggingface_hub.HfApi
    monkeypatch.setattr(hub.huggingface_hub, "HfApi", lambda: api(endpoint="http://127.0.0.1:9"))
    assert "hub cannot be reached" in refusal("someone/something")


def test_invalid_repository_name_is_rejected():
    assert "neither a folder nor a hub id" in refusal("what is this?")


def test_download_larger_than_free_space_is_rejected(tmp_path):
    snapshot = hub.Snapshot("target", "a/b", "c", tmp_path, set(), {"model.safetensors": 1 << 60})
    with pytest.raises(CheckpointError, match="GB free"):
        hub.check_space([snapshot], tmp_path)


def test_shared_draft_and_target_repository_is_counted_once(tmp_path, monkeypatch):
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda place: SimpleNamespace(free=35e9))
    roles = [
        hub.Snapshot(role, "a/b", "c", tmp_path, set(), {"model.safetensors": 10**10})
        for role in ("target", "draft")
    ]
    hub.check_space(roles, tmp_path / "bundle")
    roles[1].weights = {"another.gguf": 10**10}
    with pytest.raises(CheckpointError, match=r"20\.0 GB are to be downloaded"):
        hub.check_space(roles, tmp_path / "bundle")


def test_bundle_larger_than_disk_is_rejected_with_both_sizes(tmp_path, monkeypatch):
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub.shutil, "disk_usage", lambda place: SimpleNamespace(free=45e9))
    snapshot = hub.Snapshot("target", "a/b", "c", tmp_path, set(), {"model.gguf": 10**10})
    hub.check_space([snapshot], tmp_path / "bundle")
    snapshot.growth = 4.0
    with pytest.raises(CheckpointError) as caught:
        hub.check_space([snapshot], tmp_path / "bundle")
    assert "10.0 GB are to be downloaded and 40.0 GB written to the bundle" in str(caught.value)
    assert "has 45.0 GB free" in str(caught.value)
