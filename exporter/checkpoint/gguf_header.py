"""Validation of a GGUF file's header before gguf-py reads it.

gguf-py trusts counts and lengths, so that a damaged header can exhaust time or memory. All of them
are first checked against the size of the file. The format is specified in ggml's docs/gguf.md,
versions 2 and 3.
"""

from __future__ import annotations

import itertools
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_TEXT = 1 << 26  # maximum bytes of a string in the header
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
            12: "d"}  # fmt: skip
_STRING, _ARRAY = 8, 9  # types of a value that have no fixed size
_OTHER_FILES = {
    b"version https://git-lfs": "a Git LFS pointer, not the file; fetch it with 'git lfs pull'",
    b"<!doctype html": "an HTML page; download the file again",
    b"<html": "an HTML page; download the file again",
    b"<?xml": "an XML page; download the file again",
    b"PK\x03\x04": "a zip archive; unpack it",
    b"ggjt": "of a format before GGUF; specify a GGUF file",
    b"ggml": "of a format before GGUF; specify a GGUF file",
}


@dataclass(frozen=True)
class StoredRange:
    """Byte range of a tensor's data in the file."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class GgufHeader:
    """Offset of the data and byte ranges of the tensors."""

    data_offset: int
    tensors: tuple[StoredRange, ...]


def is_gguf(name: str) -> bool:
    """Return True for the name of a GGUF file."""
    return name.lower().endswith(".gguf")


def read_header(path: Path) -> GgufHeader:
    """Read and validate a header. Raises ValueError with the fault and advice."""
    size = path.stat().st_size
    if size == 0:
        raise ValueError("it is empty; download it again")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = data[:64].lstrip().lower()
        for beginning, explanation in _OTHER_FILES.items():
            if start.startswith(beginning.lower()):
                raise ValueError(f"it is {explanation}")
        if data[:4] != MAGIC:
            raise ValueError("it does not begin with GGUF; download it again")
        return _Scanner(data, size).header()


class _Scanner:
    """Sequential reader of values with bounds checks."""

    def __init__(self, data: mmap.mmap, size: int) -> None:
        self._data, self._size, self._at = data, size, len(MAGIC)
        self._alignment = 32
        self._num_layers = 0

    def header(self) -> GgufHeader:
        version = self._number("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(struct.pack(">I", version), "little")
            if swapped in VERSIONS:
                raise ValueError("it is big-endian, which is not supported; convert it")
            raise ValueError(f"it has version {version}; versions 2 and 3 are supported")
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        self._check_count("tensors", num_tensors, 24)
        self._check_count("fields", num_fields, 12)
        if not num_tensors:
            raise ValueError("it contains no tensors; download it again")
        names = set[str]()
        for _ in range(num_fields):
            self._field(names)
        if self._num_layers > num_tensors:
            raise ValueError(f"it has {self._num_layers} layers in {num_tensors} tensors")
        tensors = [self._tensor() for _ in range(num_tensors)]
        if len({tensor.name for tensor in tensors}) < num_tensors:
            raise ValueError("it has two tensors of one name")
        start = -(-self._at // self._alignment) * self._alignment
        placed = []
        for tensor in tensors:
            if tensor.offset % self._alignment:
                raise ValueError(f"{tensor.name} is not aligned to {self._alignment} bytes")
            end = start + tensor.offset + tensor.size
            if end > self._size:
                raise ValueError(
                    f"{tensor.name} ends at byte {end}, and the file has {self._size}; it is "
                    "truncated: download it again"
                )
            placed.append(StoredRange(tensor.name, start + tensor.offset, tensor.size))
        ordered = sorted(placed, key=lambda tensor: tensor.offset)
        for first, second in itertools.pairwise(ordered):
            if first.offset + first.size > second.offset:
                raise ValueError(f"{first.name} and {second.name} overlap; download it again")
        return GgufHeader(start, tuple(placed))

    def _number(self, form: str) -> int:
        (value,) = struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}")))
        return int(value)

    def _take(self, size: int) -> bytes:
        if size > self._size - self._at:
            raise ValueError(f"it ends within its header, at byte {self._size}; download it again")
        self._at += size
        return self._data[self._at - size : self._at]

    def _text(self, description: str) -> str:
        size = self._number("Q")
        if size > min(MAX_TEXT, self._size - self._at):
            raise ValueError(
                f"{description} has {size} bytes, which exceeds the file; download it again"
            )
        try:
            return self._take(size).decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{description} is not UTF-8") from error

    def _check_count(self, description: str, count: int, min_size: int) -> None:
        if count * min_size > self._size - self._at:
            raise ValueError(
                f"it has {count} {description}, which do not fit into {self._size} bytes; "
                "download it again"
            )

    def _field(self, names: set[str]) -> None:
        name = self._text("the name of a field")
        if not name or name in names:
            raise ValueError("a field has no name" if not name else f"{name[:80]} occurs twice")
        names.add(name)
        type_id = self._number("I")
        if type_id == _STRING:
            self._text(name[:80])
        elif type_id == _ARRAY:
            self._array(name[:80])
        else:
            value = self._value(name[:80], type_id)
            if name == "general.alignment":
                if value < 1 or value & (value - 1) or type_id != 4:
                    raise ValueError("general.alignment is not a power of two")
                self._alignment = value
            if name.endswith(".block_count"):
                self._num_layers = value

    def _value(self, name: str, type_id: int) -> int:
        if type_id not in _FORMATS:
            raise ValueError(f"{name} has the unknown type {type_id}")
        form = _FORMATS[type_id]
        (value,) = struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}")))
        return int(value) if form not in "fd" else 0

    def _array(self, name: str) -> None:
        type_id, count = self._number("I"), self._number("Q")
        if type_id == _STRING:
            self._check_count(f"texts in {name}", count, 8)
            for _ in range(count):
                self._text(f"a text in {name}")
            return
        if type_id not in _FORMATS:
            raise ValueError(f"{name} is a list of the unknown type {type_id}")
        size = struct.calcsize(f"<{_FORMATS[type_id]}")
        self._check_count(f"numbers in {name}", count, size)
        self._take(count * size)

    def _tensor(self) -> StoredRange:
        """Read a tensor's entry, with its offset from the start of the data."""
        import gguf

        name = self._text("the name of a tensor")[:80]
        num_dims = self._number("I")
        if not 1 <= num_dims <= MAX_DIMENSIONS:
            raise ValueError(f"{name} has {num_dims} dimensions")
        dims = [self._number("Q") for _ in range(num_dims)]
        type_id, offset = self._number("I"), self._number("Q")
        try:
            block_size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(type_id)]
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"{name} has type {type_id}, which gguf-py {_gguf_version()} does not know"
            ) from error
        count = math.prod(dims)
        if not count or dims[0] % block_size:
            raise ValueError(f"{name} is {dims}, in blocks of {block_size}")
        return StoredRange(name, offset, count // block_size * num_bytes)


def _gguf_version() -> str:
    from importlib.metadata import version

    return version("gguf")
