"""The user's default bundle, and the cache of file hashes."""

import errno
import os

import pytest

from manifests import make_bundle
from specedge.bundle import MAX_EAGER_HASH_SIZE, Bundle, store
from specedge.errors import BundleError


def test_large_files_are_hashed_once_and_again_after_a_change(tmp_path):
    make_bundle(tmp_path, weights_size=MAX_EAGER_HASH_SIZE + 1)
    weights = tmp_path / "target" / "weights.bin"
    bundle = Bundle.read(tmp_path)
    read = []
    store.verify_large_files(bundle, read.append)
    assert sum(read) == 2 * (MAX_EAGER_HASH_SIZE + 1)
    store.verify_large_files(bundle, read.append)
    assert sum(read) == 2 * (MAX_EAGER_HASH_SIZE + 1)
    with weights.open("r+b") as file:
        file.write(b"\xff")
    os.utime(weights, ns=(1, 1))
    assert Bundle.read(tmp_path) == bundle
    with pytest.raises(BundleError, match="SHA-256"):
        store.verify_large_files(bundle)


@pytest.mark.slow(after_first=True)
@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 10**5, '{"\\u0000": 1}', "\ufeff{}"])
def test_a_damaged_hash_cache_is_rebuilt(tmp_path, text):
    make_bundle(tmp_path, weights_size=MAX_EAGER_HASH_SIZE + 1)
    bundle = Bundle.read(tmp_path)
    store.record_export(bundle)
    (checked,) = store.cache_folder().iterdir()
    checked.write_text(text, "utf-8")
    read = []
    store.verify_large_files(bundle, read.append)
    assert sum(read) == 2 * (MAX_EAGER_HASH_SIZE + 1)


def test_bundle_precedence(tmp_path, monkeypatch):
    assert store.find_bundle() == store.embedded_folder()
    store.set_default(tmp_path)
    assert store.find_bundle() == tmp_path
    monkeypatch.setenv("SPECEDGE_BUNDLE", "variable")
    assert str(store.find_bundle()) == "variable"
    assert str(store.find_bundle("named")) == "named"


def test_failed_hash_cache_write_leaves_no_file(tmp_path, monkeypatch):
    def full(*paths):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        store.set_default(tmp_path)
    assert list(store.data_folder().iterdir()) == []


def test_concurrent_writes_use_separate_temporary_files(tmp_path):
    path = tmp_path / "costs.json"
    with store.temporary_beside(path) as first, store.temporary_beside(path) as second:
        assert first != second


def test_a_missing_default_bundle_is_an_error(tmp_path):
    store.set_default(tmp_path / "gone")
    with pytest.raises(BundleError, match="no longer exists"):
        store.find_bundle()
