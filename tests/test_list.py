"""`specedge list`: all bundles are listed and stale export folders are removed."""

import json
import os
import subprocess
import sys

import filelock
import pytest

from installed import age, corrupt, garble, install, listed, run, strip
from manifests import make_bundle
from specedge import bundle_library, staging
from specedge.bundle import MANIFEST, store


def test_the_users_bundles_and_the_embedded_pair_are_listed_with_the_default():
    folder = install()
    assert list(listed()) == ["pair", "embedded"]
    assert [entry.is_default for entry in listed().values()] == [False, True]
    store.set_default(folder)
    result = run("list")
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["NAME", "TARGET", "DRAFT", "SIZE", "OPS", "LICENSE"]
    row = ["*", "pair", "some/target", "some/draft", "0.0", "MB", "onnx", "apache-2.0"]
    assert lines[1].split() == row
    assert lines[2].split()[:3] == ["embedded", "python-9m", "python-1m"]
    assert result.stderr == ""


def test_different_target_and_draft_are_both_listed():
    folder = install()
    manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
    manifest["models"]["draft"]["source"]["license"] = None
    (folder / MANIFEST).write_text(json.dumps(manifest), "utf-8")
    row = run("list").stdout.splitlines()[1].split()
    assert row[-5:] == ["onnx", "apache-2.0", "/", "not", "stated"]


def test_a_list_without_any_export_makes_no_folder():
    assert run("list").returncode == 0
    assert not store.data_folder().exists()


def test_json_list_has_metadata_of_each_bundle():
    folder = install()
    one, embedded = json.loads(run("list", "--json").stdout)
    assert one["folder"] == str(folder)
    source = {"id": "some/target", "revision": "abc", "license": "apache-2.0"}
    assert one["target"] == source | {"ops": ["onnx"]}
    assert one["size"] == sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    assert (one["error"], one["is_default"]) == (None, False)
    assert (embedded["name"], embedded["is_default"]) == ("embedded", True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (corrupt, "has 5 bytes"),
        (age, "format is 1"),
        (garble, MANIFEST),
        (strip, "has no bundle.js"),
    ],
)
def test_broken_bundle_is_listed_with_one_line_error(change, said):
    install("good")
    change(install("bad"))
    result = run("list")
    assert result.returncode == 0
    assert len(result.stdout.splitlines()) == 4
    assert said in result.stdout.splitlines()[1]
    assert listed()["good"].error is None


def test_list_removes_files_of_killed_exports():
    install()
    work = store.bundles_folder() / f".other{staging.SUFFIX}"
    (work / "new").mkdir(parents=True)
    (work / "new/weights.bin").write_bytes(b"half")
    running = store.bundles_folder() / f".running{staging.SUFFIX}"
    running.mkdir()
    with filelock.FileLock(running / "lock"):
        result = run("list")
        assert running.exists()
    assert result.stderr == f"removed an unfinished export: {work}\n"
    assert not work.exists()


def test_cleanup_does_not_follow_symbolic_links(tmp_path):
    (tmp_path / "mine").write_text("precious", "utf-8")
    install()
    os.symlink(tmp_path, store.bundles_folder() / f".x{staging.SUFFIX}")
    assert bundle_library.remove_stale_folders() == []
    assert (tmp_path / "mine").exists()


def test_a_default_outside_the_list_is_reported(tmp_path):
    make_bundle(tmp_path)
    assert str(tmp_path) in run("list", SPECEDGE_BUNDLE=str(tmp_path)).stderr
    store.set_default(tmp_path / "gone")
    result = run("list")
    assert result.returncode == 0
    assert "no longer exists" in result.stderr
    result = run("list", SPECEDGE_BUNDLE=str(tmp_path / "nothing"))
    assert result.returncode == 0
    assert f"no bundle at {tmp_path / 'nothing'}" in result.stderr


def test_neither_command_needs_the_export_extra():
    install()
    code = (
        "import sys; sys.modules.update(torch=None, transformers=None, onnx=None)\n"
        "from specedge.cli import main\n"
        "sys.argv = ['specedge', *sys.argv[1:]]; main()\n"
    )
    for arguments in (["list"], ["remove", "pair", "--yes"]):
        result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True)
        assert result.returncode == 0, result.stderr
