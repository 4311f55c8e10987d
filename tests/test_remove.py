"""`specedge remove` deletes exactly the named bundles."""

import os
import subprocess
import sys

import filelock
import pytest

from installed import COMMAND, age, corrupt, everything_below, garble, install, listed, run, strip
from manifests import make_bundle
from specedge import bundle_library, staging
from specedge.bundle import MANIFEST, store
from specedge.errors import BundleError


@pytest.mark.parametrize("by_name", [True, False])
def test_remove_deletes_only_the_named_bundle(by_name):
    folder, other = install(), install("other")
    result = run("remove", "pair" if by_name else folder, "--yes")
    assert (result.returncode, result.stdout) == (0, "")
    assert result.stderr == f"removed {folder}\n"
    assert list(store.bundles_folder().iterdir()) == [other]


def test_removing_default_falls_back_to_embedded_pair_with_note():
    folder = install()
    store.set_default(folder)
    result = run("remove", "pair", "-y")
    assert "the default bundle is now the embedded pair" in result.stderr
    assert store.find_bundle() == store.embedded_folder()
    assert store.last_exported() is None


def test_removing_another_bundle_keeps_the_default():
    default = install("default")
    store.set_default(default)
    bundle_library.remove(install("other"))
    assert store.find_bundle() == default


def test_bundle_outside_bundles_folder_is_removed_by_path(tmp_path):
    make_bundle(tmp_path / "bundle")
    age(tmp_path / "bundle")
    bundle_library.remove(bundle_library.find_removable(str(tmp_path / "bundle")))
    assert list(tmp_path.iterdir()) == []


def test_broken_user_bundles_can_be_removed():
    for change in (corrupt, age, garble):
        change(install())
        bundle_library.remove(bundle_library.find_removable("pair"))
        assert not list(store.bundles_folder().iterdir())


def test_without_a_terminal_removal_needs_yes():
    folder = install()
    result = run("remove", "pair")
    assert result.returncode == 1
    assert "--yes" in result.stderr
    assert folder.exists()


def test_unknown_name_aborts_removal_of_all_bundles():
    folder = install()
    result = run("remove", "pair", "missing", "--yes")
    assert result.returncode == 1
    assert "no bundle 'missing'" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert folder.exists()


@pytest.mark.parametrize(
    "name", ["embedded", str(store.embedded_folder()), f"{store.embedded_folder()}/"]
)
def test_the_embedded_pair_is_never_removed(name):
    with pytest.raises(BundleError, match="embedded pair is part of specedge"):
        bundle_library.find_removable(name)


def test_a_folder_without_a_bundle_is_never_removed(tmp_path, monkeypatch):
    (tmp_path / "plain").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / MANIFEST).write_text('{"name": "an app"}', "utf-8")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / MANIFEST).write_text("{", "utf-8")
    (tmp_path / "file").write_text("", "utf-8")
    strip(install("stripped"))
    before = everything_below(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("plain", "other", "text", "file", ".", "..", "", "/", "stripped", "../.."):
        with pytest.raises(
            BundleError, match=r"no bundle|not written|cannot be read|current folder"
        ):
            bundle_library.find_removable(name)
    for name in ("..", "."):
        with pytest.raises(BundleError):
            bundle_library.find_removable(str(store.bundles_folder() / name))
    assert everything_below(tmp_path) == before


def test_a_bundle_with_other_files_is_not_removed(tmp_path):
    make_bundle(tmp_path)
    (tmp_path / "target/notes.txt").write_text("precious", "utf-8")
    with pytest.raises(BundleError, match=r"contains target/notes\.txt"):
        bundle_library.find_removable(str(tmp_path))
    (install() / "notes.txt").write_text("precious", "utf-8")
    with pytest.raises(BundleError, match=r"contains notes\.txt"):
        bundle_library.find_removable("pair")
    (tmp_path / "target/notes.txt").unlink()
    (tmp_path / "photos").mkdir()
    with pytest.raises(BundleError, match="contains photos"):
        bundle_library.find_removable(str(tmp_path))


def test_a_link_is_not_followed(tmp_path):
    make_bundle(tmp_path / "bundle")
    store.bundles_folder().mkdir(parents=True)
    os.symlink(tmp_path / "bundle", store.bundles_folder() / "pair")
    os.symlink(tmp_path / "bundle", tmp_path / "link")
    for name in ("pair", str(tmp_path / "link"), f"{tmp_path / 'link'}/."):
        with pytest.raises(BundleError, match="is a link"):
            bundle_library.find_removable(name)


def test_link_targets_are_kept(tmp_path):
    weights = install() / "target/weights.bin"
    os.replace(weights, tmp_path / "mine")
    os.symlink(tmp_path / "mine", weights)
    bundle_library.remove(bundle_library.find_removable("pair"))
    assert (tmp_path / "mine").exists()
    assert not list(store.bundles_folder().iterdir())


def test_the_current_folder_is_not_removed(monkeypatch):
    folder = install()
    monkeypatch.chdir(folder / "target")
    with pytest.raises(BundleError, match="is the current folder"):
        bundle_library.find_removable("pair")


def test_bundle_is_not_removed_during_running_export():
    folder = install()
    work = staging.staging_folder(folder)
    work.mkdir()
    with filelock.FileLock(work / "lock"):
        result = run("remove", "pair", "--yes")
    assert result.returncode == 1
    assert "export to" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert listed()["pair"].error is None


def test_interrupted_removal_is_completed_by_next_list(monkeypatch):
    folder = install()
    store.set_default(folder)
    code = (
        "import os, shutil, sys\n"
        "from pathlib import Path\n"
        "from specedge import bundle_library as library\n"
        "shutil.rmtree = lambda *a, **k: os._exit(9)\n"
        "library.remove(Path(sys.argv[1]))\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(folder)]).returncode == 9
    assert list(listed()) == ["embedded"]
    assert store.find_bundle() == store.embedded_folder()
    assert bundle_library.remove_stale_folders() == [staging.staging_folder(folder)]
    assert list(store.bundles_folder().iterdir()) == []


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_removal_from_read_only_folder_is_rejected():
    folder = install()
    folder.parent.chmod(0o500)
    with pytest.raises(BundleError, match="cannot be removed"):
        bundle_library.remove(folder)


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX terminal")
@pytest.mark.parametrize(("answer", "code", "stays"), [(b"y\n", 0, False), (b"\n", 1, True)])
def test_remove_prompts_for_confirmation_on_terminal(answer, code, stays):
    import pty

    folder = install()
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "remove", "pair"], stdin=theirs, stderr=subprocess.PIPE, text=True
    )
    os.close(theirs)
    while "?" not in (shown := process.stderr.read(1)):
        assert shown
    os.write(ours, answer)
    process.communicate(timeout=60)
    assert process.returncode == code
    os.close(ours)
    assert folder.exists() is stays
