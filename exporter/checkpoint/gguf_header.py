"""Header of a GGUF file: its fields, and the type, shape and position of its tensors.

gguf-py's reader trusts counts and lengths, so that a damaged header can exhaust time or memory, and
takes seconds for a vocabulary. Here all of them are checked against the size of the file. The
format is specified in ggml's docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import functools
import itertools
import math
import mmap
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import mapped_memory

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_TEXT = 1 << 26  # maximum bytes of a string in the header
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
            12: "d"}  # fmt: skip
_DTYPES = {"F16": np.float16, "F32": np.float32, "F64": np.float64, "I8": np.int8,
           "I16": np.int16, "I32": np.int32, "I64": np.int64}  # fmt: skip
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
class GgufTensor:
    """Tensor of a file.

    Attributes:
        name: Name of the tensor.
        tensor_type: gguf-py's GGMLQuantizationType.
        shape: Sizes in the file's order, which begins with the innermost axis.
        offset: Position of the data in bytes.
        n_bytes: Size of the data.
        file: Bytes of the file, memory-mapped.
    """

    name: str
    tensor_type: Any
    shape: tuple[int, ...]
    offset: int
    n_bytes: int
    file: np.ndarray = field(repr=False, compare=False)

    @property
    def data(self) -> np.ndarray:
        """The data, memory-mapped: numbers of its type, or the bytes of blocks. [..., rows, n]"""
        stored = self.file[self.offset : self.offset + self.n_bytes]
        numbers = stored.view(_DTYPES.get(self.tensor_type.name, np.uint8))
        return numbers.reshape(*reversed(self.shape[1:]), -1)


@dataclass(frozen=True)
class GgufHeader:
    """Values of the fields by name, the offset of the data, and the tensors."""

    fields: dict[str, Any]
    data_offset: int
    tensors: tuple[GgufTensor, ...]


def is_gguf(name: str) -> bool:
    """Return True for the name of a GGUF file."""
    return name.lower().endswith(".gguf")


def read_header(path: Path) -> GgufHeader:
    """Read and validate a header. Raises ValueError with the fault and advice.

    The last headers are remembered: an export opens a file several times.
    """
    stat = path.stat()
    if stat.st_size == 0:
        raise ValueError("it is empty; download it again")
    return _read_header(path, stat.st_size, stat.st_mtime_ns, stat.st_ino)


@functools.lru_cache(maxsize=4)
def _read_header(path: Path, size: int, *version: int) -> GgufHeader:
    """Read the header of a file in a version, by time and number."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = data[:64].lstrip().lower()
        for beginning, explanation in _OTHER_FILES.items():
            if start.startswith(beginning.lower()):
                raise ValueError(f"it is {explanation}")
        if data[:4] != MAGIC:
            raise ValueError("it does not begin with GGUF; download it again")
        return _Scanner(mapped_memory.map_file(path, 0, size), data).header()


class _Scanner:
    """Sequential reader of values with bounds checks."""

    def __init__(self, file: np.ndarray, data: mmap.mmap) -> None:
        self._file = file
        self._data, self._size, self._at = data, file.size, len(MAGIC)
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
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            self._field(fields)
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
            end = start + tensor.offset + tensor.n_bytes
            if end > self._size:
                raise ValueError(
                    f"{tensor.name} ends at byte {end}, and the file has {self._size}; it is "
                    "truncated: download it again"
                )
            placed.append(replace(tensor, offset=start + tensor.offset))
        ordered = sorted(placed, key=lambda tensor: tensor.offset)
        for first, second in itertools.pairwise(ordered):
            if first.offset + first.n_bytes > second.offset:
                raise ValueError(f"{first.name} and {second.name} overlap; download it again")
        return GgufHeader(fields, start, tuple(placed))

    def _number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self._take(struct.calcsize(form)))[0]

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

    def _field(self, fields: dict[str, Any]) -> None:
        name = self._text("the name of a field")
        if not name or name in fields:
            raise ValueError("a field has no name" if not name else f"{name[:80]} occurs twice")
        type_id = self._number("I")
        value = fields[name] = self._value(name[:80], type_id)
        if name == "general.alignment":
            if type_id != 4 or value < 1 or value & (value - 1):
                raise ValueError("general.alignment is not a power of two")
            self._alignment = value
        if name.endswith(".block_count") and isinstance(value, int):
            self._num_layers = value

    def _value(self, name: str, type_id: int) -> Any:
        if type_id == _ARRAY:
            return self._array(name)
        if type_id == _STRING:
            return self._text(name)
        if type_id not in _FORMATS:
            raise ValueError(f"{name} has the unknown type {type_id}")
        return self._number(_FORMATS[type_id])

    def _array(self, name: str) -> list[Any]:
        type_id, count = self._number("I"), self._number("Q")
        if type_id == _STRING:
            self._check_count(f"texts in {name}", count, 8)
            return [self._text(f"a text in {name}") for _ in range(count)]
        if type_id not in _FORMATS:
            raise ValueError(f"{name} is a list of the unknown type {type_id}")
        form = _FORMATS[type_id]
        size = struct.calcsize(form)
        self._check_count(f"numbers in {name}", count, size)
        return list(struct.unpack(f"<{count}{form}", self._take(count * size)))

    def _tensor(self) -> GgufTensor:
        """Read a tensor's entry, with its offset from the start of the data."""
        import gguf

        name = self._text("the name of a tensor")[:80]
        num_dims = self._number("I")
        if not 1 <= num_dims <= MAX_DIMENSIONS:
            raise ValueError(f"{name} has {num_dims} dimensions")
        dims = [self._number("Q") for _ in range(num_dims)]
        type_id, offset = self._number("I"), self._number("Q")
        try:
            tensor_type = gguf.GGMLQuantizationType(type_id)
            block_size, num_bytes = gguf.GGML_QUANT_SIZES[tensor_type]
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"{name} has type {type_id}, which gguf-py {_gguf_version()} does not know"
            ) from error
        count = math.prod(dims)
        if not count or dims[0] % block_size:
            raise ValueError(f"{name} is {dims}, in blocks of {block_size}")
        size = count // block_size * num_bytes
        return GgufTensor(name, tensor_type, tuple(dims), offset, size, self._file)


def _gguf_version() -> str:
    from importlib.metadata import version

    return version("gguf")
