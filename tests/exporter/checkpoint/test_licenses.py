"""A bundle carries the licenses of the checkpoints that it was made from."""

from types import SimpleNamespace

import pytest

from specedge.exporter import Progress
from specedge.exporter.checkpoint import checkpoints, hub, licenses


def carried(source, folder, license=None):
    progress = Progress()
    folder.mkdir()
    licenses.copy_licenses("target", source, license, folder, progress)
    return sorted(p.name for p in folder.iterdir()), progress.notes


def test_license_file_names_are_sanitized_and_unique(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    names = ["LICENSE", "Licence für alle.md", "license", "USE_POLICY.md", "notice" + 200 * "x"]
    for name in (*names, "README.md", "in-license.txt"):
        (source / name).write_text(name, "utf-8")
    found, notes = carried(source, tmp_path / "out")
    lower = {name.lower() for name in found}
    assert lower >= {"license", "licence-f-r-alle.md", "use_policy.md"}
    assert len(lower) == len(found) == len({p.name for p in source.glob("[LlnU]*")})
    assert max(map(len, found)) <= 82
    assert notes == []


def test_huge_license_file_is_skipped_with_note(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "LICENSE").write_bytes(b"x" * (licenses.LARGEST + 1))
    found, notes = carried(source, tmp_path / "out", "mit")
    assert found == []
    assert notes == ["target: LICENSE is over 1 MB and is not copied"]


def test_folders_and_external_links_are_not_copied(tmp_path):
    source = tmp_path / "source"
    (source / "LICENSES").mkdir(parents=True)
    (tmp_path / "secret").write_text("secret", "utf-8")
    try:
        (source / "LICENSE").symlink_to(tmp_path / "secret")
    except OSError:
        pytest.skip("no symbolic links here")
    (source / "NOTICE").symlink_to("nowhere")
    assert carried(source, tmp_path / "out")[0] == []


def test_license_links_to_hub_cache_blobs_are_copied(tmp_path):
    source = tmp_path / "models--a--b/snapshots/abc"
    blob = tmp_path / "models--a--b/blobs/123"
    for folder in (source, blob.parent):
        folder.mkdir(parents=True)
    blob.write_text("Terms", "utf-8")
    try:
        (source / "LICENSE").symlink_to("../../blobs/123")
    except OSError:
        pytest.skip("no symbolic links here")
    assert carried(source, tmp_path / "out")[0] == ["LICENSE"]
    assert (tmp_path / "out/LICENSE").read_text("utf-8") == "Terms"


def test_license_files_are_downloaded_by_name(monkeypatch, tmp_path):
    sizes = {"config.json": 5, "License [v2].txt": 9, "notice": 9, "LICENSE.pdf": 2_000_000}
    for name in ("config.json", "License [v2].txt", "notice"):
        (tmp_path / name).write_bytes(bytes(sizes[name]))
    files = [SimpleNamespace(rfilename=name, size=size) for name, size in sizes.items()]
    info = SimpleNamespace(siblings=files, sha="abc")
    api = SimpleNamespace(model_info=lambda *args, **kwargs: info)
    asked = {}
    monkeypatch.setattr(hub.huggingface_hub, "HfApi", lambda: api)
    monkeypatch.setattr(
        hub.huggingface_hub,
        "snapshot_download",
        lambda name, **kwargs: asked.update(kwargs) or str(tmp_path),
    )
    hub.find("target", "a/b", None, lambda folder, names: [])
    filtered = hub.huggingface_hub.utils.filter_repo_objects
    assert set(filtered(sizes, allow_patterns=asked["allow_patterns"])) == {
        "config.json", "License [v2].txt", "notice",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "license"),
    [
        ("---\nlicense: mit\ntags: [a]\n---\n# Model\n", "mit"),
        ("---\nlicense: other\nlicense_name: llama3\n---\n", "llama3"),
        ("---\nlicense: [mit, apache-2.0]\n---\n", "mit, apache-2.0"),
        ('---\nlicense: "a\\nb\\e[2J"\n---\n', "a?b?[2J"),
        ("# Model\n", None),
        ("---\nlicense: [\n---\n", None),
        ("---\nlicense: " + "[" * 500, None),
        ("", None),
    ],
)
def test_license_is_read_from_readme(checkpoint, text, license):
    (checkpoint / "README.md").write_text(text, "utf-8")
    assert checkpoints.find("target", str(checkpoint), None).source.license == license
