"""GGUF files, adapters and command line exports from a hub."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

import ggufs
import hub_server
from hubs import NAME, WHOLE, files, find, refusal
from specedge.bundle import Bundle
from specedge.exporter import Progress
from specedge.exporter.checkpoint import checkpoints, hub, loader
from traces import WITH_TRACES

GGUF = "model-Q8_0.gguf"


@pytest.mark.slow
def test_export_from_hub_prints_only_bundle_path_to_stdout(original, tmp_path):
    folder = tmp_path / "hub"
    (folder / "org").mkdir(parents=True)
    (folder / NAME).symlink_to(original)
    script = Path(hub_server.__file__)
    running = subprocess.Popen(
        [sys.executable, script, folder, "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        endpoint = running.stdout.readline().strip().partition("=")[2]
        info = json.load(urllib.request.urlopen(f"{endpoint}/api/models/{NAME}"))
        output = tmp_path / "bundle"
        export_by_command(endpoint, output, tmp_path)
    finally:
        running.terminate()
        running.wait()
    bundle = Bundle.read(output)
    assert bundle.target.source.id == bundle.draft.source.id.partition(" ")[0] == NAME
    assert bundle.target.source.revision == info["sha"]
    assert bundle.num_draft_tokens == 2


def export_by_command(endpoint, output, tmp_path):
    places = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home")}
    command = ["export", "--draft", "self:1", "--target", NAME, "--output", str(output), "-k", "2"]
    done = subprocess.run(
        [*WITH_TRACES, *command, "--ops", "onnx", "--max-length", "32"],
        env=os.environ | places | {"HF_HUB_OFFLINE": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{output}\n"
    assert "float32 error: logits" in done.stderr
    assert re.search(r"^\d+\.\d s: .*loading the target .* hashing \d", done.stderr, re.MULTILINE)
    assert re.search(r"^Tracing the target: \d+\.\d s$", done.stderr, re.MULTILINE)
    assert "Warning" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def gguf_server(server, tmp_path):
    """A repository with a GGUF file and no other weights."""
    folder = server.folder / NAME
    for path in folder.iterdir():
        path.unlink()
    ggufs.write(folder / GGUF, ggufs.Kind.Q8_0, tmp_path, hidden=128)
    return server


def logits_of(checkpoint):
    loaded = loader.load(checkpoint, Progress())
    with loaded.sources.materialized(loaded.model), torch.no_grad():
        return loaded.model(torch.arange(8)[None]).logits


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("name", [NAME, f"{NAME}/model-Q8_0.gguf"])
def test_gguf_repository_is_identified_from_header(gguf_server, name, monkeypatch):
    path = gguf_server.folder / NAME / GGUF
    ends, size = hub.gguf_files.header_size(path), path.stat().st_size
    monkeypatch.setattr(hub, "HEADER_BYTES", int(ends) // 2)
    found, sent = find(name=name), gguf_server.sent
    assert ends <= sent < size
    assert (found.source.id, found.config.hidden_size) == (name, 128)
    assert 3 < found.remote.growth < 4  # from eight bits and a scale to float32
    local = checkpoints.find("target", str(path), None)
    remote_logits, local_logits = map(logits_of, (find(name=name), local))
    assert remote_logits.isfinite().all()
    assert torch.equal(remote_logits, local_logits)
    sent = gguf_server.sent
    find(name=name)
    assert gguf_server.sent == sent


def test_several_gguf_files_need_choice(gguf_server):
    (gguf_server.folder / NAME / "model-Q4_0.gguf").write_bytes(b"unread")
    assert f"specify one of them, such as {NAME}/model-Q4_0.gguf" in refusal()
    assert find(name=f"{NAME}/{GGUF}").weights == [GGUF]
    assert "has no model-Q2_K.gguf" in refusal(name=f"{NAME}/model-Q2_K.gguf")


def test_adapter_on_hub_is_merged_and_its_commit_is_in_source(server, original, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(original)
    config = peft.LoraConfig(
        target_modules=["q_proj"], init_lora_weights=False, base_model_name_or_path=NAME
    )
    adapter = peft.get_peft_model(model, config)
    adapter.peft_config["default"].base_model_name_or_path = NAME
    adapter.save_pretrained(server.folder / "org" / "adapter")
    found = checkpoints.find("target", NAME, None, "org/adapter")
    assert not files(server, ".safetensors")
    commit = hub_server.commit(server.folder / "org" / "adapter")
    assert found.source.id == f"{NAME} + org/adapter@{commit}"
    assert found.source.revision == hub_server.commit(server.folder / NAME)
    loaded, whole = loader.load(found, Progress()), adapter.merge_and_unload().eval()
    tokens = torch.arange(8)[None]
    with torch.no_grad(), loaded.sources.materialized(loaded.model):
        assert torch.allclose(loaded.model(tokens).logits, whole(tokens).logits, atol=1e-5)
    assert found.remotes == [found.remote, found.adapter.remote]


def test_fetched_header_is_a_sparse_file(server, original, monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "HEADER_BYTES", 1000)
    monkeypatch.setattr(hub.gguf_files, "header_size", lambda path: 1500)
    found = find()
    size = found.remote.weights[WHOLE]
    hub.fetch_header(found.remote, WHOLE, tmp_path)
    head = (tmp_path / WHOLE).read_bytes()
    assert len(head) == size
    assert head[:2000] == (original / WHOLE).read_bytes()[:2000]
    assert not any(head[2000:])
    assert files(server)[1::2] == ["bytes=0-999", "bytes=0-1999"]
