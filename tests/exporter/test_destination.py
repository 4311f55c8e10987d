"""A bundle appears whole or not at all."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from specedge import destination
from specedge.bundle import Bundle, store
from specedge.errors import ExportError
from specedge.exporter import export
from specedge.exporter.graph import external_data
from specedge.staging import remove_stale_folders

SLOW = """
import pathlib, sys, time
from specedge.destination import destination
with destination(pathlib.Path(sys.argv[1])) as work:
    (work / "external_data.bin").write_bytes(b"0" * 1000)
    print("started", flush=True)
    time.sleep(60)
"""


def slow_export(output):
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(output)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    return process


def put(output, text="new"):
    with destination.destination(output) as work:
        (work / "bundle.json").write_text(manifest(text), "utf-8")


def manifest(version):
    return json.dumps({"specedge_version": version, "files": {}})


def test_interrupted_export_leaves_nothing(tmp_path):
    process = slow_export(tmp_path / "made/for/it")
    process.send_signal(signal.SIGINT)
    assert process.wait(20) != 0
    assert list(tmp_path.iterdir()) == []


def test_stale_folders_are_removed_except_of_running_exports(tmp_path):
    dead, alive = slow_export(tmp_path / "dead"), slow_export(tmp_path / "alive")
    try:
        dead.kill()
        dead.wait()
        assert [p.name for p in remove_stale_folders(tmp_path)] == [".dead.specedge-export"]
        assert [p.name for p in tmp_path.iterdir()] == [".alive.specedge-export"]
        with pytest.raises(ExportError, match="another export"):
            put(tmp_path / "alive")
    finally:
        alive.kill()
        alive.wait()


def test_bundle_is_replaced(tmp_path):
    put(tmp_path / "bundle", "old")
    put(tmp_path / "bundle", "new")
    assert (tmp_path / "bundle/bundle.json").read_text("utf-8") == manifest("new")
    assert len(list(tmp_path.iterdir())) == 1


def test_failed_export_keeps_existing_bundle(tmp_path):
    put(tmp_path / "bundle", "old")
    with pytest.raises(ZeroDivisionError), destination.destination(tmp_path / "bundle"):
        raise ZeroDivisionError
    assert (tmp_path / "bundle/bundle.json").read_text("utf-8") == manifest("old")
    assert len(list(tmp_path.iterdir())) == 1


def test_invalid_destinations_are_rejected_before_export(tmp_path):
    (tmp_path / "file").write_text("", "utf-8")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file").write_text("", "utf-8")
    put(tmp_path / "bundle")
    for name, said in (
        ("file", "is a file"),
        ("folder", "not empty"),
        ("file/below", "written to"),
        ("bundle/target/below", "inside the bundle"),
    ):
        with pytest.raises(ExportError, match=said):
            export("no-draft", "no-target", tmp_path / name)


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_parent_is_refused_before_any_work(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ExportError, match="cannot be written to"):
        export("no-draft", "no-target", tmp_path / "bundle")


def test_full_disk_is_an_error_and_leaves_no_files(pairs, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(external_data.HashedFile, "write", full)
    with pytest.raises(ExportError, match=r"^no space left"):
        export(*pairs.checkpoint("gpt2"), tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_without_output_bundle_becomes_default(pairs):
    bundle = export(*pairs.checkpoint("gpt2"), ops="onnx")
    assert store.find_bundle() == bundle.folder
    assert Path(bundle.folder).parent == store.data_folder() / "bundles"
    assert Bundle.read(store.find_bundle()).context_length == 256
