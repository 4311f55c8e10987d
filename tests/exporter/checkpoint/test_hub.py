"""huggingface_hub against a local server: downloads, errors and caching."""

import json
import os
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

import hub_server
from hubs import NAME, WHOLE, Bars, files, find, patch_endpoint, refusal, same
from specedge.errors import CheckpointError
from specedge.exporter import Progress
from specedge.exporter.checkpoint import loader


def test_whole_repository_is_fetched_after_its_small_files(server, original):
    found = find()
    assert not files(server)
    assert found.source.id == NAME
    assert found.source.revision == hub_server.commit(server.folder / NAME)
    assert same(found, original)
    assert files(server) == [None, None]  # a redirect, and the file where it leads
    sent = server.sent
    assert same(find(), original)
    assert server.sent - sent < 10_000  # the second time nothing but what is small


def test_named_chat_templates_of_their_folder_are_fetched_and_no_other_folder(server, original):
    folder = server.folder / NAME
    (folder / "chat_template.jinja").write_text("{{ messages }}", "utf-8")
    for name in ("additional_chat_templates/tool_use.jinja", "onnx/config.json"):
        (folder / name).parent.mkdir()
        (folder / name).write_text("{{ tools }}", "utf-8")
    found = find()
    assert found.tokenizer.chat_template == {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    assert not (found.folder / "onnx").exists()


def test_sharded_repository_is_fetched(server, original):
    folder = server.folder / NAME
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / WHOLE).unlink()
    model.save_pretrained(folder, max_shard_size="1MB")
    shards = sorted(p.name for p in folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    (folder / "unused.safetensors").write_bytes(b"x" * 100)
    found = find()
    assert sorted(found.remote.weights) == shards
    assert same(found, original)
    assert not files(server, "unused.safetensors")


def test_revision_selects_commit_and_missing_revision_is_rejected(server, original):
    other = server.folder / f"{NAME}@v2"
    other.mkdir()
    for path in original.iterdir():
        if path.name != "README.md":
            os.link(path, other / path.name)
    (other / "README.md").write_text("---\nlicense: mit\n---\n", "utf-8")
    first, second = find().source, find("v2").source
    assert first.revision == find(first.revision).source.revision
    assert second.revision == hub_server.commit(other) != first.revision
    assert (first.license, second.license) == (None, "mit")
    assert "has no revision 'v3' on the hub" in refusal("v3")


def test_private_repository_needs_login(server, original, monkeypatch):
    server.private.add(NAME)
    assert "'hf auth login'" in refusal()
    Path(constants.HF_TOKEN_PATH).write_text(hub_server.TOKEN, "utf-8")
    assert same(find(), original)


def test_missing_repository_error_names_it(server):
    assert "org/other is neither a local folder nor a model on the hub" in refusal(name="org/other")


@pytest.mark.parametrize("known", [True, False])
def test_gated_repository_error_links_its_terms(server, known):
    server.gated.add(NAME)
    if known:
        Path(constants.HF_TOKEN_PATH).write_text(hub_server.TOKEN, "utf-8")
    message = refusal()
    assert "is gated: accept its terms on" in message
    assert "'hf auth login'" in message


def test_repository_gated_during_download_is_reported(server):
    found = find()
    server.gated.add(NAME)
    with pytest.raises(CheckpointError, match="is gated: accept its terms"):
        loader.load(found, Progress())


def test_unauthorized_token_is_not_reported_as_missing_network(server):
    server.statuses[NAME] = 403
    assert "the hub denies access (403); log in with 'hf auth login'" in refusal()


def test_interrupted_download_resumes(server, original):
    found, sent = find(), server.sent
    size = (original / WHOLE).stat().st_size
    server.cuts += [300_000, 500_000]
    assert same(found, original)
    assert files(server)[1::2] == [None, "bytes=300000-", "bytes=800000-"]
    assert server.sent - sent == size  # no byte was fetched twice


def test_download_resumes_in_next_process(server, original):
    found, sent = find(), server.sent
    size = (original / WHOLE).stat().st_size
    server.cuts += [400_000, *[0] * 50]
    with pytest.raises(CheckpointError, match="run the export again to resume"):
        loader.load(found, Progress())
    server.cuts.clear()
    server.requests.clear()
    progress = Bars()
    loader.load(find(), progress)
    assert files(server)[1::2] == ["bytes=400000-"]
    assert server.sent - sent < size + 10_000
    total, first, *_ = moves = progress.moves[f"Downloading {NAME}"]
    assert (total, first, sum(moves[1:])) == (size, 400_000, size)
    assert same(find(), original)


def test_download_restarts_if_server_lacks_range_support(server, original):
    server.ranges = False
    server.cuts.append(300_000)
    progress = Bars()
    loader.load(find(), progress)
    assert same(find(), original)
    assert sum(progress.moves[f"Downloading {NAME}"][1:]) == (original / WHOLE).stat().st_size


def test_full_disk_keeps_partial_download(server, original):
    found = find()
    blobs = found.folder.parents[1] / "blobs"
    part = blobs / f"{hub_server.etag(server.folder / NAME / WHOLE)}.part"
    part.symlink_to("/dev/full")  # the kernel's own ENOSPC
    with pytest.raises(CheckpointError, match=r"no space left in .* free disk space") as caught:
        loader.load(found, Progress())
    assert "\n" not in str(caught.value)
    part.unlink()
    assert same(find(), original)


def test_full_disk_is_not_reported_as_network_error(server, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    assert "no space left in" in refusal()


def test_warm_cache_suffices_without_network(server, original, monkeypatch):
    commit = find().source.revision
    loader.load(find(), Progress())
    server.requests.clear()
    patch_endpoint(monkeypatch, "http://127.0.0.1:9")
    found = find()
    assert found.source.revision == commit
    assert same(found, original)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert same(find(), original)
    assert not server.requests


def test_cache_without_weights_fails_without_network(server, monkeypatch):
    find()
    patch_endpoint(monkeypatch, "http://127.0.0.1:9")
    assert "the hub cannot be reached" in refusal()


def add_subfolder(server):
    folder = server.folder / NAME / "original"
    folder.mkdir()
    (folder / "params.json").write_text("{}", "utf-8")


def download(*files):
    """Fill the cache as `hf download --include` does."""
    huggingface_hub.snapshot_download(NAME, allow_patterns=[*files])


def go_offline(server, monkeypatch):
    server.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_offline_snapshot_lacks_json_of_subfolders(server, original, monkeypatch):
    add_subfolder(server)
    loader.load(find(), Progress())
    go_offline(server, monkeypatch)
    found = find()
    assert not (found.folder / "original").exists()
    assert same(found, original)
    assert not server.requests


def test_offline_snapshot_serves_with_files_that_an_export_reads(server, original, monkeypatch):
    add_subfolder(server)
    (server.folder / NAME / "vocab.json").write_text("{}", "utf-8")
    (server.folder / NAME / "README.md").write_text("text", "utf-8")
    read = {p.name for p in original.iterdir()} & {"generation_config.json", "chat_template.jinja"}
    download(WHOLE, "config.json", "tokenizer*.json", *read)
    go_offline(server, monkeypatch)
    assert same(find(), original)


@pytest.mark.parametrize(
    "missing", [WHOLE, "config.json", "tokenizer.json", "generation_config.json"]
)
def test_offline_snapshot_without_a_file_that_an_export_reads_names_it(
    missing, server, original, monkeypatch
):
    if not (server.folder / NAME / missing).exists():
        (server.folder / NAME / missing).write_text("{}", "utf-8")
    download(*({p.name for p in (server.folder / NAME).iterdir()} - {missing}))
    go_offline(server, monkeypatch)
    assert f"org/model: {missing} is not in the hub's cache, and the hub cannot be" in refusal()


def truncate(found, file, size=1000):
    """Cut the blob of a cached file."""
    with (found.folder / file).resolve().open("r+b") as blob:
        blob.truncate(size)


@pytest.mark.parametrize("size", [0, 300_000])
def test_truncated_weights_are_downloaded_again(size, server, original):
    found = find()
    loader.load(found, Progress())
    truncate(found, WHOLE, size)
    server.requests.clear()
    assert same(find(), original)
    assert files(server)[1::2] == [f"bytes={size}-" if size else None]
    server.requests.clear()
    assert same(find(), original)
    assert not files(server)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_truncated_small_files_are_downloaded_again(file, server, original):
    truncate(find(), file, 100)
    assert same(find(), original)


@pytest.mark.parametrize("file", [WHOLE, "tokenizer.json"])
def test_truncated_file_is_named_offline(file, server, original, monkeypatch):
    found = find()
    loader.load(found, Progress())
    truncate(found, file)
    go_offline(server, monkeypatch)
    size = (original / file).stat().st_size
    message = refusal()
    assert f"{found.folder / file} has 1000 instead of {size} bytes" in message


def test_branch_update_during_resolution_yields_one_commit(server, monkeypatch):
    old = hub_server.commit(server.folder / NAME)
    ask = huggingface_hub.HfApi.model_info

    def pushed(self, *args, **kwargs):
        info, readme = ask(self, *args, **kwargs), server.folder / NAME / "README.md"
        if not readme.exists():
            readme.write_text("---\nlicense: mit\n---\n", "utf-8")
        return info

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", pushed)
    source = find().source
    assert source.revision == hub_server.commit(server.folder / NAME) != old
    assert source.license == "mit"


def test_quantised_repository_is_refused_before_its_weights_are_fetched(server):
    path = server.folder / NAME / "config.json"
    text = json.loads(path.read_text("utf-8"))
    path.unlink()  # it is a link to the original's
    config = {"quant_method": "awq", "version": "gemv"}
    path.write_text(json.dumps(text | {"quantization_config": config}), "utf-8")
    assert "AWQ's layout 'gemv'" in refusal()
    assert not files(server)


def corrupt(server, found):
    """Partial download of an earlier run with different bytes."""
    part = (
        found.folder.parents[1] / "blobs" / f"{hub_server.etag(server.folder / NAME / WHOLE)}.part"
    )
    part.write_bytes(bytes(300_000))


def test_corrupt_partial_download_is_fetched_again(server, original):
    found = find()
    corrupt(server, found)
    progress = Bars()
    loader.load(found, progress)
    assert same(find(), original)
    assert files(server)[1::2] == ["bytes=300000-", None]
    total, *moves = progress.moves[f"Downloading {NAME}"]
    assert sum(moves) == total


def test_repeatedly_corrupt_download_is_rejected(server, original):
    found = find()
    server.corrupt.add(WHOLE)
    with pytest.raises(CheckpointError, match="each time with a SHA-256 that differs") as caught:
        loader.load(found, Progress())
    assert "\n" not in str(caught.value)
    assert not [*(found.folder.parents[1] / "blobs").glob("*.part")]
    server.corrupt.clear()
    assert same(find(), original)
