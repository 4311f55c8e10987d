"""Shared libraries, read without loading them."""

import struct
import sys
from pathlib import Path

import pytest

from specedge.diagnosis import shared_library
from specedge.diagnosis.shared_library import gpu_codes, needed, runs_on

HEADER = 64  # bytes of an ELF file's, and of a section's


def library(path, names=(), pieces=()):
    """A library of three sections: its dynamic one, its texts, and code for GPUs."""
    texts = b"\0.dynamic\0.texts\0.nv_fatbin\0"
    places = []
    for name in names:
        places.append(len(texts))
        texts += name.encode() + b"\0"
    dynamic = b"".join(struct.pack("<qQ", 1, place) for place in places) + struct.pack("<qQ", 0, 0)
    code = b"".join(map(piece, pieces))
    fat = struct.pack("<IHHQ", shared_library.FAT_BINARY, 1, 16, len(code)) + code
    parts, sections, start = [texts, dynamic, bytes(8) + fat], [], HEADER
    for (name, kind, link), part in zip(((10, 3, 0), (1, 6, 0), (17, 1, 0)), parts, strict=True):
        sections.append(
            struct.pack("<IIQQQQIIQQ", name, kind, 0, 0, start, len(part), link, 0, 0, 0)
        )
        start += len(part)
    header = b"\x7fELF\x02\x01" + bytes(0x28 - 6) + struct.pack("<Q", start)
    header = header.ljust(0x3A, b"\0") + struct.pack("<HHH", HEADER, 3, 0)
    path.write_bytes(header + b"".join(parts + sections))
    return path


def piece(of):
    kind, number, flags = of
    code = bytes(24)
    head = struct.pack("<HHIQ", kind, 0x101, HEADER, len(code)).ljust(28, b"\0")
    return (head + struct.pack("<I8xQ", number, flags)).ljust(HEADER, b"\0") + code


def test_needed_libraries_are_named_in_order(tmp_path):
    names = ["libcublasLt.so.13", "libcuda.so.1", "libc.so.6"]
    assert needed(library(tmp_path / "a.so", names)) == names
    assert needed(library(tmp_path / "b.so")) == []


def test_kinds_of_gpu_are_named_once_in_order(tmp_path):
    pieces = [(2, 120, 0x108011), (2, 86, 0x8011), (2, 86, 0x8011), (2, 90, 0x108011), (1, 90, 0)]
    path = library(tmp_path / "a.so", pieces=pieces)
    assert gpu_codes(path) == ["sm_86", "compute_90", "sm_90a", "sm_120a"]


@pytest.mark.skipif(sys.platform != "linux", reason="libraries of other systems are no ELF files")
def test_onnxruntimes_own_library_needs_the_c_library():
    ort = pytest.importorskip("onnxruntime")
    (path,) = Path(ort.__file__).parent.glob("capi/onnxruntime_pybind11_state*.so")
    assert "libc.so.6" in needed(path)
    assert gpu_codes(path) == []


@pytest.mark.parametrize("keep", [0, 3, 63, 100, -1])
def test_what_is_no_library_is_a_value_error(tmp_path, keep):
    path = library(tmp_path / "a.so", ["libc.so.6"])
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"a\.so is no shared library that can be read"):
        needed(path)


@pytest.mark.parametrize(
    ("code", "runs", "does_not"),
    [
        ("sm_80", [(8, 0), (8, 6), (8, 9)], [(7, 5), (9, 0)]),
        ("sm_86", [(8, 6), (8, 9)], [(8, 0), (12, 0)]),
        ("sm_90a", [(9, 0)], [(8, 9), (9, 1), (10, 0)]),
        ("sm_120a", [(12, 0)], [(12, 1)]),
        ("compute_90", [(9, 0), (10, 0), (12, 1)], [(8, 9)]),
    ],
)
def test_which_gpu_runs_which_code(code, runs, does_not):
    assert all(runs_on(code, capability) for capability in runs)
    assert not any(runs_on(code, capability) for capability in does_not)
