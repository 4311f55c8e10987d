"""The files of a bundle's folder: their paths, sizes and hashes. Standard library only."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

from ..errors import BundleError
from .manifest import REEXPORT_HINT, FileEntry


def file_entry(path: Path) -> FileEntry:
    """A file's entry for the manifest."""
    return FileEntry(path.stat().st_size, sha256(path))


def sha256(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """A file's SHA-256 in hexadecimal, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(4 * 2**20):
            digest.update(piece)
            if progress:
                progress(len(piece))
    return digest.hexdigest()


def check_relative_path(name: str) -> None:
    """Refuse a path that could leave the folder on any system."""
    part = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
    if not re.fullmatch(f"{part}(/{part})*", name) or len(name) > 200:
        raise ValueError(f"files has '{name}', which is not a plain path inside the bundle")


def contained_file_size(folder: Path, path: Path) -> int:
    """A file's size; nothing outside the folder counts, and nothing that reading could wait for."""
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        raise BundleError(f"{path}: is a link out of the bundle; {REEXPORT_HINT}")
    facts = path.stat()
    if not stat.S_ISREG(facts.st_mode):
        raise BundleError(f"{path}: is no file; {REEXPORT_HINT}")
    return facts.st_size
