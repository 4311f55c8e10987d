"""Bundles and checkpoints at unusual paths, and users without a home folder."""

import os
import pwd
import shutil

import pytest

import specedge
from installed import run
from specedge.bundle import store


@pytest.fixture
def hub_snapshot(tmp_path):
    """Return a folder with links to files, as huggingface_hub's cache has them."""
    root = tmp_path / "models--org--bundle"
    snapshot = root / "snapshots" / ("0" * 40)
    (root / "blobs").mkdir(parents=True)
    files = [path for path in store.embedded_folder().rglob("*") if path.is_file()]
    for number, path in enumerate(files):
        blob = shutil.copy(path, root / "blobs" / str(number))
        link = snapshot / path.relative_to(store.embedded_folder())
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def test_bundle_in_the_cache_layout_of_the_hub_is_loaded(hub_snapshot):
    with specedge.load(hub_snapshot) as pipeline:
        assert pipeline.generate("import ", 3).text


def test_links_out_of_the_hub_cache_are_refused(hub_snapshot, tmp_path):
    tokenizer = hub_snapshot / "tokenizer.json"
    os.replace(tokenizer.resolve(), tmp_path / "elsewhere")
    tokenizer.unlink()
    tokenizer.symlink_to(tmp_path / "elsewhere")
    result = run("inspect", "--bundle", hub_snapshot)
    assert result.returncode == 1
    assert "is a link that leaves the bundle" in result.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "x", "-n", "1", "--bundle"),
        ("inspect", "--bundle"),
        ("export", "--target", "x", "--output"),
        ("export", "--output", "y", "--target"),
    ],
    ids=lambda command: command[-1],
)
def test_path_that_is_not_utf8_is_one_line_error(tmp_path, command, monkeypatch):
    pytest.importorskip("torch", reason="needs the export extra")
    monkeypatch.chdir(tmp_path)
    path = os.fsdecode(os.fsencode(tmp_path) + b"/b\xff")
    shutil.copytree(store.embedded_folder(), path)
    result = run(*command, path)
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert "is not valid UTF-8" in result.stderr


@pytest.fixture
def _without_home(monkeypatch):
    def unknown(user):
        raise KeyError(user)

    for variable in ("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.usefixtures("_without_home", "own_costs")
@pytest.mark.parametrize("command", [("generate", "import ", "-n", "3"), ("list",), ("inspect",)])
def test_user_without_a_home_folder_runs_without_caches(command):
    result = run(*command)
    assert result.returncode == 0
    assert result.stdout
    assert "Traceback" not in result.stderr


@pytest.mark.usefixtures("_without_home")
def test_export_without_a_home_folder_needs_an_output(tmp_path):
    pytest.importorskip("torch", reason="needs the export extra")
    result = run("export", "--target", tmp_path / "missing")
    assert (result.returncode, len(result.stderr.splitlines())) == (1, 1)
    assert "--output" in result.stderr


def test_files_of_one_name_in_two_folders_have_separate_default_bundles(tmp_path, monkeypatch):
    folders = set()
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.gguf").write_bytes(b"GGUF")
        folders.add(store.default_destination(None, str(tmp_path / name / "model.gguf")))
        monkeypatch.chdir(tmp_path / name)
        folders.add(store.default_destination(None, "model.gguf"))
    assert len(folders) == 2
