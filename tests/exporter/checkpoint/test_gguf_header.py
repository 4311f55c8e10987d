"""Damaged and hostile GGUF files: one clear line each, and no time or memory by their counts."""

import struct

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from ggufs import write
from specedge.errors import CheckpointError
from specedge.exporter import Progress
from specedge.exporter.checkpoint import checkpoints, gguf_header, loader

HUGE = 1 << 60
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 98362432\n"
HTML = b"<!DOCTYPE html><html><head><title>Sign in</title></head><body>" + b"<p>Sign in" * 57


def refusal(path):
    with pytest.raises(CheckpointError) as caught:
        checkpoints.find("target", str(path), None)
    message = str(caught.value)
    assert "\n" not in message
    assert path.name in message
    return message


def text(value):
    return struct.pack("<Q", len(value)) + value


def field(name, kind, value):
    return text(name) + struct.pack("<I", kind) + value


def header(fields=(), tensors=(), num_fields=None, num_tensors=None, version=3):
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(fields) if num_fields is None else num_fields,
    )
    content = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join((*fields, *tensors))
    return content + bytes(4096)


def tensor(name=b"a", dims=(32, 2), kind=0, offset=0, num_dims=None):
    count = len(dims) if num_dims is None else num_dims
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", count, *dims, kind, offset)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it is empty"),
        (HTML[:635], "it is an HTML page"),
        (LFS, "a Git LFS pointer, not the file; fetch it with 'git lfs pull'"),
        (b"PK\x03\x04" + bytes(40), "a zip archive"),
        (b"\x93NUMPY" + bytes(40), "does not begin with GGUF"),
        (header(version=1), "version 1"),
        (header(version=3 << 24), "big-endian"),
        (header(num_tensors=0), "contains no tensors"),
        (header(num_tensors=HUGE), f"{HUGE} tensors, which do not fit"),
        (header(tensors=[tensor()], num_fields=HUGE), f"{HUGE} fields, which do not fit"),
        (header([field(b"a", 9, struct.pack("<IQ", 0, HUGE))], [tensor()]), "numbers in a"),
        (header([field(b"a", 9, struct.pack("<IQ", 8, HUGE))], [tensor()]), "texts in a"),
        (header([field(b"a", 9, struct.pack("<IQ", 9, 1))], [tensor()]), "unknown type 9"),
        (header([field(b"a", 99, b"")], [tensor()]), "unknown type 99"),
        (header([field(b"a", 8, struct.pack("<Q", HUGE))], [tensor()]), "which exceeds the file"),
        (header([field(b"a", 8, text(b"\xff\xfe"))], [tensor()]), "a is not UTF-8"),
        (header([field(b"\xff", 4, bytes(4))], [tensor()]), "name of a field is not UTF-8"),
        (header([field(b"a", 4, bytes(4))] * 2, [tensor()]), "a occurs twice"),
        (header([field(b"general.alignment", 4, bytes(4))], [tensor()]), "not a power of two"),
        (header([field(b"x.block_count", 4, b"\xff" * 4)], [tensor()]), "4294967295 layers"),
        (header(tensors=[tensor(num_dims=1 << 31)]), "dimensions"),
        (header(tensors=[tensor(dims=(HUGE, HUGE))]), "truncated"),
        (header(tensors=[tensor(dims=(0, 2))]), "a is [0, 2]"),
        (header(tensors=[tensor(dims=(33, 2), kind=8)]), "in blocks of 32"),
        (header(tensors=[tensor(kind=250)]), "has type 250"),
        (header(tensors=[tensor(offset=HUGE)]), "truncated"),
        (header(tensors=[tensor(offset=8)]), "not aligned"),
        (header(tensors=[tensor(), tensor(b"b", offset=32)]), "overlap"),
        (header(tensors=[tensor(), tensor(offset=256)]), "two tensors of one name"),
    ],
)
def test_malformed_file_is_one_line_error(content, said, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert said in refusal(path)


def test_truncated_file_is_rejected_at_any_length(tmp_path):
    path = tmp_path / "model.gguf"
    write(path, Kind.Q8_0, tmp_path)
    content, end = path.read_bytes(), gguf_header.read_header(path).data_offset
    for size in (*range(1, end, 97), end - 1, end, end + 1000, len(content) - 1):
        path.write_bytes(content[:size])
        assert "download it again" in refusal(path)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.F32, Kind.F16, Kind.BF16])
def test_fields_and_tensors_are_those_of_gguf_py(tmp_path, kind):
    path = tmp_path / "model.gguf"
    write(path, kind, tmp_path)
    reader, header_ = gguf.GGUFReader(path), gguf_header.read_header(path)
    fields = {key: x.contents() for key, x in reader.fields.items() if "GGUF." not in key}
    assert header_.fields == fields
    for ours, theirs in zip(header_.tensors, reader.tensors, strict=True):
        assert ours.data.dtype == theirs.data.dtype
        assert np.array_equal(ours.data, theirs.data)
    assert header_.data_offset == reader.data_offset
    assert [(t.name, t.offset, t.n_bytes) for t in header_.tensors] == [
        (t.name, t.data_offset, t.n_bytes) for t in reader.tensors
    ]


def split(path, num_parts):
    """Write a file's tensors to several files, as llama-gguf-split does."""
    reader, paths = gguf.GGUFReader(path), []
    for i in range(num_parts):
        part = path.with_name(f"split-{i + 1:05}-of-{num_parts:05}.gguf")
        writer = gguf.GGUFWriter(part, "llama")
        for name, stored in reader.fields.items() if i == 0 else ():
            if not name.startswith("GGUF.") and name != "general.architecture":
                kinds = stored.types
                element = kinds[-1] if kinds[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(name, stored.contents(), kinds[0], element)
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", num_parts)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for stored in reader.tensors[i::num_parts]:
            writer.add_tensor(stored.name, np.array(stored.data), raw_dtype=stored.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(part)
    return paths


@pytest.fixture
def parts(tmp_path):
    path = tmp_path / "whole.gguf"
    write(path, Kind.Q8_0, tmp_path, "llama")
    paths = split(path, 3)
    (tmp_path / "folder").mkdir()
    return path, [part.rename(tmp_path / "folder" / part.name) for part in paths]


def test_split_file_is_loaded_from_folder_or_any_part(parts):
    whole, paths = parts
    expected = loader.load(checkpoints.find("target", str(whole), None), Progress())
    for path in (paths[0].parent, paths[1]):
        found = checkpoints.find("target", str(path), None)
        assert found.weights == [part.name for part in paths]
        assert not found.config.tie_word_embeddings
        loaded = loader.load(found, Progress())
        assert len(loader.quantized_tensors(found)) == 16
        for name, parameter in expected.model.named_parameters():
            other = loaded.model.get_parameter(name)
            assert np.array_equal(parameter.numpy(), other.numpy(), equal_nan=True), name


def test_missing_part_is_named(parts):
    _, paths = parts
    paths[1].unlink()
    assert "split-00002-of-00003.gguf is missing" in refusal_of(paths[0])
    assert "split-00002-of-00003.gguf is missing" in refusal_of(paths[0].parent)


def test_part_under_another_name_is_refused(parts):
    _, paths = parts
    assert "one of 3 parts, and 1 are present" in refusal(
        paths[0].rename(paths[0].with_name("a.gguf"))
    )


def refusal_of(path):
    with pytest.raises(CheckpointError) as caught:
        checkpoints.find("target", str(path), None)
    return str(caught.value)
