"""The hidden folder beside a bundle's place in which the bundle comes and goes.

Everything unfinished lies in it, with a lock that its export or removal holds: what has the folder
but not the lock is left over and may go.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import filelock

SUFFIX = ".specedge-export"
REPLACED = "old"  # a bundle that is being replaced; it comes back if its replacement never does
_LOCK = "lock"


def staging_folder(place: Path) -> Path:
    """Where the unfinished business of a bundle's place lies."""
    return place.with_name(f".{place.name}{SUFFIX}")


@contextlib.contextmanager
def locked_folder(work: Path) -> Iterator[None]:
    """Make such a folder, empty, hold its lock, and remove it in the end.

    Raises TimeoutError where another process holds the lock, else OSError.
    """
    lock = _acquired(work)
    try:
        clear_folder(work)
        yield
    finally:
        clear_folder(work)
        # Windows removes no open file; elsewhere the name must go before the lock is free.
        if os.name != "nt":
            (work / _LOCK).unlink(missing_ok=True)
        lock.release()
        with contextlib.suppress(OSError):
            if os.name == "nt":
                (work / _LOCK).unlink(missing_ok=True)
            work.rmdir()


def _acquired(work: Path) -> filelock.BaseFileLock:
    """The lock in a folder made for it; again if another process removes the folder meanwhile."""
    for _ in range(9):
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            return _acquired_once(work)
    return _acquired_once(work)


def _acquired_once(work: Path) -> filelock.BaseFileLock:
    work.mkdir(exist_ok=True)
    lock = filelock.FileLock(work / _LOCK, timeout=0)
    lock.acquire()
    return lock


def remove_stale_folders(parent: Path) -> list[Path]:
    """Remove what killed exports and removals left in a folder; what still runs is left alone."""
    removed = []
    for work in sorted(parent.glob(f".*{SUFFIX}")):
        if work.is_symlink():
            continue
        with contextlib.suppress(OSError), locked_folder(work):
            removed.append(work)
    return removed


def clear_folder(work: Path) -> None:
    """Remove everything but the lock; first put back a bundle whose replacement never came."""
    place = work.with_name(work.name[1:].removesuffix(SUFFIX))
    if (work / REPLACED).exists() and not place.exists():
        os.rename(work / REPLACED, place)
    for path in work.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != _LOCK:
            path.unlink(missing_ok=True)
