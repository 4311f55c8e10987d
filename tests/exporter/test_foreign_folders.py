"""Commands that replace or remove folders delete bundles only, completely or not at all."""

import errno
import itertools
import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from installed import everything_below, run
from manifests import make_bundle
from specedge import destination, staging
from specedge.bundle import MANIFEST, store
from specedge.errors import ExportError
from specedge.runtime.backend.cuda import engine_builder, engines
from specedge.runtime.backend.sessions import Device

NOTE = "thesis"
COMMANDS = {
    "export": ("export", "--target", "no-target", "--output"),
    "embed": ("embed", "--bundle", store.embedded_folder(), "--output"),
    "build": ("build", "--bundle", store.embedded_folder(), "--device", "rtx", "--output"),
    "remove": ("remove", "--yes"),
}


def app(path):
    """Write the manifest of another application."""
    path.mkdir()
    (path / MANIFEST).write_text('{"name": "web", "files": {}}', "utf-8")
    (path / "important.txt").write_text(NOTE, "utf-8")


def plain(path):
    path.mkdir()
    (path / "important.txt").write_text(NOTE, "utf-8")


def truncated(path):
    plain(path)
    (path / MANIFEST).write_text("{", "utf-8")


def notes_in_a_bundle(path):
    make_bundle(path)
    (path / "target/important.txt").write_text(NOTE, "utf-8")


def folder_in_a_bundle(path):
    make_bundle(path)
    (path / "photos").mkdir()


def link(path):
    make_bundle(path.with_name("elsewhere"))
    os.symlink(path.with_name("elsewhere"), path)


def dangling_link(path):
    os.symlink(path.with_name("nowhere"), path)


def file(path):
    path.write_text(NOTE, "utf-8")


KINDS = (
    app, plain, truncated, notes_in_a_bundle, folder_in_a_bundle, link, dangling_link, file,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _gpu(monkeypatch):
    """Let `build` find a GPU, and write an engine of a few bytes."""
    platform = engines.EnginePlatform("rtx", "0.5", "1.7", "sm89")
    monkeypatch.setattr(Device, "platform", lambda *_: platform)
    monkeypatch.setattr(
        engine_builder, "_compile", lambda device, graph, path, *_: path.write_bytes(b"engine")
    )
    monkeypatch.setattr(engine_builder, "choose_ops", lambda model, *_: model.cpu_ops)


def contents(folder):
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return [(str(path), path.read_bytes()) for path in paths]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("command", COMMANDS)
def test_foreign_destination_is_one_line_error_before_any_work(tmp_path, command, kind):
    kind(tmp_path / "place")
    before = contents(tmp_path), everything_below(tmp_path)
    result = run(*COMMANDS[command], tmp_path / "place")
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert "place" in result.stderr
    assert "no-target" not in result.stderr
    assert (contents(tmp_path), everything_below(tmp_path)) == before


@pytest.mark.parametrize("command", ["export", "embed", "build"])
def test_read_only_parent_is_one_line_error_before_any_work(tmp_path, monkeypatch, command):
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode & os.W_OK == 0 and access(path, mode))
    result = run(*COMMANDS[command], tmp_path / "place")
    assert (result.returncode, len(result.stderr.splitlines())) == (1, 1)
    assert f"{tmp_path} cannot be written to" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["embed", "build"])
@pytest.mark.parametrize("replaces", [False, True])
def test_full_disk_is_one_line_error_and_changes_nothing(tmp_path, monkeypatch, command, replaces):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", "weights.bin")

    if replaces and command == "embed":
        shutil.copytree(store.embedded_folder(), tmp_path / "place")
    before = everything_below(tmp_path)
    monkeypatch.setattr(shutil, "copy", full)
    result = run(*COMMANDS[command], tmp_path / "place")
    assert (result.returncode, len(result.stderr.splitlines())) == (1, 1)
    assert "o space left" in result.stderr
    assert everything_below(tmp_path) == before


def test_files_added_during_the_export_are_kept_beside_the_new_bundle(tmp_path):
    make_bundle(tmp_path / "place")

    def export():
        with destination.destination(tmp_path / "place") as work:
            (work / MANIFEST).write_text("new", "utf-8")
            (tmp_path / "place/notes.txt").write_text(NOTE, "utf-8")

    with pytest.raises(ExportError, match=r"contains notes\.txt.*is in .*place-2"):
        export()
    assert (tmp_path / "place/notes.txt").read_text("utf-8") == NOTE
    assert (tmp_path / "place-2" / MANIFEST).read_text("utf-8") == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["place", "place-2"]


@pytest.fixture
def mount(tmp_path, monkeypatch):
    """Return a folder that cannot be renamed, with the file system's own folder in it."""
    folder, rename, is_mount = tmp_path / "mount", os.rename, os.path.ismount

    def checked(source, target):
        if folder in (Path(source), Path(target)):
            raise OSError(errno.EBUSY, "Device or resource busy", str(source))
        if Path(source).is_relative_to(folder) is not Path(target).is_relative_to(folder):
            raise OSError(errno.EXDEV, "Invalid cross-device link", str(source))
        rename(source, target)

    folder.mkdir()
    (folder / "lost+found").mkdir()
    monkeypatch.setattr(os, "rename", checked)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == folder or is_mount(path))
    return folder


def test_mount_point_is_written_and_replaced_inside(mount):
    for version in ("first", "second"):
        with destination.destination(mount) as work:
            assert work.is_relative_to(mount)
            (work / version).mkdir()
            (work / version / "weights.bin").write_bytes(b"0")
            files = {f"{version}/weights.bin": {}}
            text = json.dumps({"specedge_version": version, "files": files})
            (work / MANIFEST).write_text(text, "utf-8")
        names = {path.name for path in mount.iterdir()}
        assert names == {"lost+found", version, MANIFEST}


def test_failed_replacement_in_a_mount_point_restores_the_bundle(mount, monkeypatch):
    with destination.destination(mount) as work:
        make_bundle(work)
    before = contents(mount)
    rename = os.rename

    def failing(source, target):
        if Path(target).name == "target" and Path(target).parent == mount and "new" in str(source):
            raise OSError(errno.EIO, "Input/output error", str(source))
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match="Input/output error"), destination.destination(mount) as work:
        make_bundle(work)
    assert contents(mount) == before


@pytest.mark.parametrize("number", range(1, 7))
def test_replacement_in_a_mount_point_that_is_killed_is_undone(mount, monkeypatch, number):
    with destination.destination(mount) as work:
        make_bundle(work)
    before, rename, count = contents(mount), os.rename, itertools.count(1)

    def killed(source, target):
        if next(count) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)

    if not (child := os.fork()):
        os.rename = killed
        with destination.destination(mount) as work:
            make_bundle(work, weights_size=200)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    staging.remove_stale_folders(mount)
    assert contents(mount) == before


def test_mount_point_with_other_files_is_refused(mount):
    (mount / "important.txt").write_text(NOTE, "utf-8")
    for command in COMMANDS.values():
        result = run(*command, mount)
        assert (result.returncode, len(result.stderr.splitlines())) == (1, 1)
        assert "mount" in result.stderr
    assert (mount / "important.txt").read_text("utf-8") == NOTE


def test_embedding_in_place_keeps_files_that_are_not_listed(tmp_path):
    folder = shutil.copytree(store.embedded_folder(), tmp_path / "pair")
    (folder / "round.onnx").write_text(NOTE, "utf-8")
    result = run("embed", "--bundle", folder)
    assert (result.returncode, len(result.stderr.splitlines())) == (1, 1)
    assert "contains round.onnx" in result.stderr
    assert (folder / "round.onnx").read_text("utf-8") == NOTE


def test_staging_folder_that_is_a_link_is_not_emptied(tmp_path):
    plain(tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", tmp_path / ".place.specedge-export")
    result = run(*COMMANDS["embed"], tmp_path / "place")
    assert (result.returncode, len(result.stderr.splitlines())) == (1, 1)
    assert (tmp_path / "elsewhere/important.txt").read_text("utf-8") == NOTE


def test_removal_that_is_killed_before_it_is_checked_is_undone(tmp_path):
    make_bundle(tmp_path / "place")
    work = staging.staging_folder(tmp_path / "place")
    work.mkdir()
    destination.move_aside(tmp_path / "place", work / staging.REPLACED)
    assert staging.remove_stale_folders(tmp_path) == [work]
    assert [path.name for path in tmp_path.iterdir()] == ["place"]


def test_bundle_with_engines_is_extended_replaced_and_removed(tmp_path):
    for _ in range(2):
        assert run(*COMMANDS["build"], tmp_path / "place").returncode == 0
    assert list((tmp_path / "place/engines").iterdir())
    assert run(*COMMANDS["remove"], tmp_path / "place").returncode == 0
    assert list(tmp_path.iterdir()) == []
