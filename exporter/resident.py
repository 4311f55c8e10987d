"""Memory: what this machine has, and what this process takes of it.

Pages of large mapped files are given back before they fill the memory that a user sees taken.

A checkpoint's file stays mapped while its matrices are read again and again. The system may drop
such pages when it needs room, yet they count as the process's own until it does.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

LIMIT = 8 << 30  # bytes of mapped files that are let stand
LARGE = 64 << 20  # bytes of a mapping that is worth it
PAUSE = 0.1  # seconds; a fast disk reads some hundred megabytes meanwhile
_DONTNEED = 4
_STATUS, _MAPPINGS = Path("/proc/self/status"), Path("/proc/self/smaps")


def memory() -> Any:
    """Bytes of memory: `total`, which this machine has, and `available`, which programs can get."""
    return psutil.virtual_memory()


@contextlib.contextmanager
def bounded(limit: int = LIMIT, pause: float = PAUSE) -> Iterator[None]:
    """Keep the pages of mapped files that this process holds near a limit; on Linux alone.

    What is given back is read again from the system's cache, or the file, when it is touched.
    """
    if not _MAPPINGS.exists() or "RssFile:" not in _STATUS.read_text():
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_watch, args=(limit, pause, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _watch(limit: int, pause: float, done: threading.Event) -> None:
    """Above the limit, let go of the pages of all large mapped files that nobody has written to."""
    libc = ctypes.CDLL(None)
    while not done.wait(pause):
        if _mapped() > limit:
            for start, end in _untouched():
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _DONTNEED)


def _mapped() -> int:
    """Bytes of this process's memory that are pages of files."""
    return 1024 * int(re.findall(r"RssFile:\s+(\d+)", _STATUS.read_text())[0])


def _untouched() -> Iterator[tuple[int, int]]:
    """Large mappings of files without a page that was changed: addresses."""
    for found in psutil.Process().memory_maps(grouped=False):
        start, end = (int(address, 16) for address in found.addr.split("-"))
        of_a_file = found.path.startswith("/") and "x" not in found.perms
        if of_a_file and end - start >= LARGE and not found.anonymous and not found.swap:
            yield start, end
