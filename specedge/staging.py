"""Staging folder next to a bundle's folder, in which the bundle is written or removed.

An export or removal holds a lock in it. A staging folder whose lock is free was interrupted and may
be removed.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import filelock

from .bundle import MANIFEST

SUFFIX = ".specedge-export"
REPLACED = "old"  # bundle that is being replaced, restored if that fails
CONTENTS = "contents"  # the same in a mount point, by its entries
REMOVED = "removed"
_LOCK = "lock"


def staging_folder(folder: Path) -> Path:
    """Return the path of the staging folder of a bundle's folder, also of a file system's root."""
    return folder.parent / f".{folder.name or 'root'}{SUFFIX}"


@contextlib.contextmanager
def locked_folder(work: Path) -> Iterator[None]:
    """Create an empty staging folder, hold its lock, and remove it at the end.

    Raises:
        TimeoutError: If another process holds the lock.
        OSError: If the folder cannot be created.
    """
    lock = _acquired(work)
    try:
        clear_folder(work)
        yield
    finally:
        clear_folder(work)
        # Windows cannot remove an open file; elsewhere remove it before releasing the lock.
        if os.name != "nt":
            (work / _LOCK).unlink(missing_ok=True)
        lock.release()
        with contextlib.suppress(OSError):
            if os.name == "nt":
                (work / _LOCK).unlink(missing_ok=True)
            work.rmdir()


def _acquired(work: Path) -> filelock.BaseFileLock:
    """Return the lock; retry if another process removes the folder meanwhile."""
    for _ in range(9):
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            return _acquired_once(work)
    return _acquired_once(work)


def _acquired_once(work: Path) -> filelock.BaseFileLock:
    work.mkdir(exist_ok=True)
    if work.is_symlink():
        raise OSError(errno.ELOOP, "its staging folder is a link", os.fspath(work))
    lock = filelock.FileLock(work / _LOCK, timeout=0)
    lock.acquire()
    return lock


def remove_stale_folders(parent: Path) -> list[Path]:
    """Remove interrupted staging folders below a folder and return their paths."""
    removed = []
    for work in sorted(parent.glob(f".*{SUFFIX}")):
        if work.is_symlink():
            continue
        with contextlib.suppress(OSError), locked_folder(work):
            removed.append(work)
    return removed


def free_path(path: Path) -> Path:
    """Return the path, or one with a number if it exists."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(p for p in itertools.chain((path,), numbered) if not os.path.lexists(p))


def clear_folder(work: Path) -> None:
    """Remove all files but the lock, after restoring a bundle that was not replaced."""
    folder = work.parent / work.name[1:].removesuffix(SUFFIX)
    if (work / REPLACED).exists() and not (folder / MANIFEST).exists():
        os.rename(work / REPLACED, free_path(folder))
    contents = (work / CONTENTS).iterdir() if (work / CONTENTS).is_dir() else ()
    for path in sorted(contents, key=lambda path: path.name == MANIFEST):
        if os.path.lexists(target := work.parent / path.name):
            os.rename(target, free_path(work / REMOVED))
        os.rename(path, target)
    for path in work.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != _LOCK:
            path.unlink(missing_ok=True)
