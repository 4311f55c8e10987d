"""What a shared library (64-bit ELF) needs, and which GPUs it has machine code for.

Read from the file, without loading it. `elf.h` has the layout; NVIDIA documents no fat binary, so
that part was read off onnxruntime-gpu's libraries: each is a header and then pieces of code, one
for each kind of GPU.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

DYNAMIC = 6  # the type of a section
NEEDED = 1  # the tag of an entry of it
FAT_BINARY = 0xBA55ED50
PTX, MACHINE_CODE = 1, 2  # kinds of a piece
ONE_GPU_ALONE = 0x100000  # the flag of sm_90a and the like


class Section(NamedTuple):
    """A part of the file."""

    name: str
    kind: int
    offset: int
    size: int
    link: int


def needed(path: Path) -> list[str]:
    """The names of the libraries that must be found for this one to load, in the loader's order.

    ValueError where it is no such library, as throughout.
    """
    with _mapped(path) as content:
        sections = _sections(content)
        for section in sections:
            if section.kind == DYNAMIC:
                names = sections[section.link].offset
                return [
                    _text(content, names + value)
                    for tag, value in _pairs(content, section)
                    if tag == NEEDED
                ]
    return []


def gpu_codes(path: Path) -> list[str]:
    """The kinds of GPU that it has code for, such as sm_86, sm_90a or compute_90 (PTX)."""
    with _mapped(path) as content:
        found: set[tuple[int, str]] = set()
        for section in _sections(content):
            if section.name == ".nv_fatbin":
                found |= {*_pieces(content, section)}
    return [name for _, name in sorted(found)]


def runs_on(code: str, capability: tuple[int, int]) -> bool:
    """Whether a GPU of this compute capability runs such code."""
    kind, _, version = code.partition("_")
    major, minor = divmod(int(version.rstrip("a")), 10)
    if kind == "compute":  # the driver translates it
        return (major, minor) <= capability
    if version.endswith("a"):
        return (major, minor) == capability
    return major == capability[0] and minor <= capability[1]


def _pieces(content: mmap.mmap, section: Section) -> Iterator[tuple[int, str]]:
    place, end = section.offset, section.offset + section.size
    while place + 16 <= end:
        magic, _, header, size = struct.unpack_from("<IHHQ", content, place)
        if magic != FAT_BINARY:  # padding between two
            place += 8
            continue
        piece = place + header
        place = piece + size
        while piece < place:
            kind, _, header, size = struct.unpack_from("<HHIQ", content, piece)
            (number,) = struct.unpack_from("<I", content, piece + 28)
            (flags,) = struct.unpack_from("<Q", content, piece + 40)
            if kind in (PTX, MACHINE_CODE):
                name = f"{'sm' if kind == MACHINE_CODE else 'compute'}_{number}"
                yield number, name + ("a" if flags & ONE_GPU_ALONE else "")
            piece += header + size


def _sections(content: mmap.mmap) -> list[Section]:
    if content[:6] != b"\x7fELF\x02\x01":
        raise ValueError("no 64-bit ELF file")
    (start,) = struct.unpack_from("<Q", content, 0x28)
    size, number, names = struct.unpack_from("<HHH", content, 0x3A)
    rows = [struct.unpack_from("<IIQQQQIIQQ", content, start + i * size) for i in range(number)]
    texts = rows[names][4]
    return [Section(_text(content, texts + row[0]), row[1], row[4], row[5], row[6]) for row in rows]


def _pairs(content: mmap.mmap, section: Section) -> Iterator[tuple[int, int]]:
    yield from struct.iter_unpack(
        "<qQ", content[section.offset : section.offset + section.size // 16 * 16]
    )


def _text(content: mmap.mmap, place: int) -> str:
    return content[place : content.find(b"\0", place)].decode()


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            yield content
    except (struct.error, IndexError, ValueError) as error:
        raise ValueError(f"{path} is no shared library that can be read: {error}") from error
