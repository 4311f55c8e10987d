"""Paths, sizes and hashes of a bundle's files. Standard library only."""

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
    """Return a file's entry for the manifest."""
    return FileEntry(path.stat().st_size, sha256(path))


def has_encodable_path(path: Path) -> bool:
    """Return True if a path is valid UTF-8, as ONNX Runtime and tokenizers require."""
    try:
        os.path.abspath(path).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def sha256(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """Return a file's SHA-256 in hexadecimal; `progress` receives the size of each chunk."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(4 * 2**20):
            digest.update(piece)
            if progress:
                progress(len(piece))
    return digest.hexdigest()


def check_relative_path(name: str) -> None:
    """Raise ValueError for a path that could leave the folder on any system."""
    part = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
    if not re.fullmatch(f"{part}(/{part})*", name) or len(name) > 200:
        raise ValueError(f"files has '{name}', which is not a plain path inside the bundle")


def contained_file_size(folder: Path, path: Path) -> int:
    """Return the size of a regular file; raise BundleError for links that leave the folder.

    In the cache layout of huggingface_hub, `snapshots/<revision>` has links to files in `blobs`.
    """
    resolved, folder = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    blobs = folder.parents[1] / "blobs" if folder.parent.name == "snapshots" else folder
    if not (resolved.is_relative_to(folder) or resolved.is_relative_to(blobs)):
        raise BundleError(f"{path}: is a link that leaves the bundle; {REEXPORT_HINT}")
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise BundleError(f"{path}: is not a regular file; {REEXPORT_HINT}")
    return status.st_size
