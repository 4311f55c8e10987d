"""Reading any folder returns a bundle or raises an actionable one-line error."""

import contextlib
import copy
import errno
import itertools
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manifests import make_bundle
from specedge.bundle import MANIFEST, MAX_MANIFEST_SIZE, Bundle
from specedge.errors import BundleError

LARGE = st.sampled_from([0, -1, 2**31, 2**53, 2**53 + 1, 2**63, -(2**64), 10**400, 10**4299])
STRANGE = st.text() | st.sampled_from(
    ["..", "../../etc/passwd", "/etc/passwd", "a\\b", "C:/a", "C:a", "//host/a", "a/./b", "a//b",
     "target/", "~", "bundle.json", "target", "\0", "a\0b", "a\nb", "\x1b[2J", "\ud800", "e\u0301",
     "con", "x" * 201, "x" * 10**5]
)  # fmt: skip
SURROGATES = st.text(st.characters(categories=["Cs", "Cc", "Lu"]), max_size=5)
LEAVES = st.none() | st.booleans() | st.integers() | LARGE | st.floats() | STRANGE | SURROGATES
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRANGE, inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A bundle whose manifest is written anew for each example."""
    folder = tmp_path_factory.mktemp("whole")
    make_bundle(folder)
    return folder, (folder / MANIFEST).read_bytes()


@pytest.fixture
def folder(tmp_path):
    make_bundle(tmp_path / "bundle")
    return tmp_path / "bundle"


def read(folder, manifest: bytes):
    """A bundle, which writes and reads as itself, or None for one line that says what to do."""
    (folder / MANIFEST).write_bytes(manifest)
    try:
        bundle = Bundle.read(folder)
    except BundleError as error:
        check_message(str(error))
        return None
    assert Bundle.from_json(bundle.to_json()) == bundle
    bundle.to_json().encode()
    return bundle


def check_message(message):
    assert message.isprintable()
    assert len(message) < 1500
    assert "export" in message or "upgrade specedge" in message


def refusal(folder):
    with pytest.raises(BundleError) as caught:
        Bundle.read(folder)
    check_message(str(caught.value))
    return str(caught.value)


def places(value, before=()):
    """The path of every value inside, at any depth."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*before, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*before, key))


@pytest.mark.slow
@settings(max_examples=150)
@given(data=st.data())
def test_mutated_manifest_is_valid_or_one_line_error(whole, data):
    folder, text = whole
    manifest = json.loads(text)
    for _ in range(data.draw(st.integers(1, 3))):
        keys = data.draw(st.sampled_from(sorted(places(manifest), key=repr)))
        inner = manifest
        for key in keys[:-1]:
            inner = inner[key]
        change(data, inner, keys[-1])
    read(folder, json.dumps(manifest).encode())


def change(data, inner, key):
    """Drop a value, put another in its place, or give it another or a second name."""
    how = data.draw(st.sampled_from(["drop", "replace", "replace", "rename", "copy"]))
    if how == "replace":
        inner[key] = data.draw(JSON)
    elif isinstance(inner, list):
        value = inner.pop(key)
        inner.extend([value, copy.deepcopy(value)] if how == "copy" else [])
    else:
        value = inner[key] if how == "copy" else inner.pop(key)
        if how in ("rename", "copy"):
            inner[data.draw(STRANGE | SURROGATES)] = copy.deepcopy(value)


@settings(max_examples=60)
@given(data=st.binary(max_size=200))
def test_random_bytes_are_one_line_error(whole, data):
    assert read(whole[0], data) is None


@settings(max_examples=100)
@given(data=st.data())
def test_manifest_with_replaced_bytes_is_valid_or_one_line_error(whole, data):
    folder, text = whole
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 40)))
    read(folder, text[:start] + data.draw(st.binary(max_size=20)) + text[end:])


@settings(max_examples=25)
@given(value=JSON)
def test_arbitrary_json_is_one_line_error(whole, value):
    assert read(whole[0], json.dumps(value).encode()) is None


@pytest.mark.parametrize("key", ["format", "end_tokens", "models"])
@pytest.mark.parametrize("depth", [100, 900, 960, 980, 10**5])
def test_deep_nesting_is_one_line_error(whole, key, depth):
    folder, text = whole
    manifest = json.loads(text)
    manifest[key] = "here"
    deep = json.dumps(manifest).replace('"here"', "[" * depth + "]" * depth)
    assert read(folder, deep.encode()) is None


@pytest.mark.parametrize("digits", [17, 4300, 10**5])
@pytest.mark.parametrize("key", ["format", "end_tokens", "models"])
def test_huge_integer_is_one_line_error(whole, key, digits):
    folder, text = whole
    manifest = json.loads(text)
    manifest[key] = ["here"] if key == "end_tokens" else "here"
    assert read(folder, json.dumps(manifest).replace('"here"', "9" * digits).encode()) is None


def test_duplicate_among_many_keys_is_one_line_error(whole):
    names = ", ".join(f'"{i}": 0' for i in range(10**5))
    assert read(whole[0], f'{{{names}, "{10**5 - 1}": 0}}'.encode()) is None


def test_an_oversized_manifest_is_refused_unread(folder):
    with (folder / MANIFEST).open("r+b") as file:
        file.truncate(MAX_MANIFEST_SIZE + 1)
    assert "the limit is" in refusal(folder)


@pytest.mark.parametrize(
    ("key", "text"),
    [("id", "a\nb"), ("id", "a\x9bb"), ("revision", "\x1b[2J"), ("license", "\x7f")],
)
def test_terminal_control_characters_are_refused(whole, key, text):
    folder, manifest = whole[0], json.loads(whole[1])
    manifest["models"]["target"]["source"][key] = text
    assert read(folder, json.dumps(manifest).encode()) is None


def set_size(folder, name):
    """Write a file's size to the manifest."""
    manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
    manifest["files"][name]["size"] = (folder / name).stat().st_size
    (folder / MANIFEST).write_text(json.dumps(manifest), "utf-8")


@pytest.mark.parametrize("name", ["tokenizer.json", "target/weights.bin", MANIFEST])
def test_a_fifo_is_refused_without_waiting_for_a_writer(folder, name):
    if not hasattr(os, "mkfifo"):
        pytest.skip("no named pipes here")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    if name != MANIFEST:
        set_size(folder, name)
    assert "is not a regular file" in refusal(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "target/weights.bin", MANIFEST])
def test_a_folder_in_place_of_a_file_is_refused(folder, name):
    (folder / name).unlink()
    (folder / name).mkdir()
    if name != MANIFEST:
        set_size(folder, name)
    assert "is not a regular file" in refusal(folder)


@pytest.mark.parametrize(
    ("name", "aim"),
    [
        *itertools.product(
            ["tokenizer.json", "target/weights.bin", MANIFEST],
            ["itself", "nothing", "outside", "device"],
        ),
        ("target/weights.bin", "folder outside"),
    ],
)
def test_links_out_of_the_bundle_are_refused(folder, name, aim, tmp_path):
    path, outside = folder / name, tmp_path / "outside"
    outside.mkdir()
    shutil.copy(path, outside)
    if aim == "folder outside":
        shutil.rmtree(path.parent)
        path, target = path.parent, outside
    else:
        path.unlink()
        targets = {"itself": path, "nothing": "gone", "device": os.devnull}
        target = targets.get(aim, outside / path.name)
    try:
        path.symlink_to(target)
    except OSError:
        pytest.skip("no symbolic links here")
    refusal(folder)


def test_symbolic_links_to_and_within_a_bundle_are_supported(folder, tmp_path):
    (folder / "draft/weights.bin").unlink()
    try:
        (folder / "draft/weights.bin").symlink_to("../target/weights.bin")
        (tmp_path / "link").symlink_to(folder)
    except OSError:
        pytest.skip("no symbolic links here")
    assert Bundle.read(tmp_path / "link").folder == tmp_path / "link"


@pytest.mark.parametrize("name", ["", "\0", "a" * 5000, "\ud800", "file", "file/below"])
def test_invalid_bundle_path_is_one_line_error(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("", "utf-8")
    with pytest.raises(BundleError) as caught:
        Bundle.read(Path(name))
    assert "specedge export" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "code"), [("tokenizer.json", errno.EACCES), (MANIFEST, errno.EIO)]
)
def test_file_read_error_is_one_line_error(folder, name, code, monkeypatch):
    real = Path.open

    def failing(self, *args, **kwargs):
        if self == folder / name:
            raise OSError(code, os.strerror(code))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", failing)
    assert os.strerror(code) in refusal(folder)


@contextlib.contextmanager
def nobody():
    """Be a user whom permissions bind, as root is not."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.skipif(os.name == "nt", reason="Windows has other permissions")
@pytest.mark.parametrize("name", [".", "target", "tokenizer.json", MANIFEST])
def test_unreadable_files_are_one_line_error(name):
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        folder.chmod(0o755)
        bundle = make_bundle(folder)
        with nobody():
            assert Bundle.read(folder) == bundle
        (folder / name).chmod(0)
        with nobody():
            assert "Permission denied" in refusal(folder)
        (folder / name).chmod(0o755)
