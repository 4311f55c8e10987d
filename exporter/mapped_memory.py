"""Resident memory of the files that an export maps.

A checkpoint's file stays mapped while its matrices are read repeatedly. The system may drop such
pages when it needs memory, yet they count as the process's own until it does. So pages of large
mappings are dropped before they fill the memory that a user sees taken, but only those of mappings
that were created here or registered with `register`.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import torch

LIMIT = 8 << 30  # bytes of mapped files that may remain resident
LARGE = 64 << 20  # minimum bytes of a mapping to release
PAUSE = 0.1  # seconds; a fast disk reads some hundred megabytes meanwhile
_DONTNEED = 4
_STATUS, _MAPPINGS = Path("/proc/self/status"), Path("/proc/self/smaps")


_registered: dict[int, tuple[weakref.ref[Any], int]] = {}  # what maps files, and an address therein


def map_file(path: Path, offset: int, size: int) -> np.memmap[Any, Any]:
    """Map bytes of a file copy-on-write, as memory whose pages may be dropped."""
    array = np.memmap(path, np.uint8, "c", offset, (size,))
    _register(array, array.ctypes.data)
    return array


def register(tensor: torch.Tensor) -> torch.Tensor:
    """Register a tensor over a mapped file, whose pages may be dropped while it has views."""
    _register(tensor.untyped_storage(), tensor.data_ptr())
    return tensor


def _register(owner: Any, address: int) -> None:
    key = id(owner)
    _registered[key] = weakref.ref(owner, lambda _: _registered.pop(key, None)), address


def system_memory() -> Any:
    """Return this machine's `total` and `available` memory in bytes."""
    return psutil.virtual_memory()


@contextlib.contextmanager
def limit_mapped_memory(limit: int = LIMIT, pause: float = PAUSE) -> Iterator[None]:
    """Keep this process's resident pages of mapped files near a limit; on Linux alone.

    Dropped pages are read again from the page cache, or from the file, when they are touched.
    """
    if not _MAPPINGS.exists() or "RssFile:" not in _STATUS.read_text():
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_drop_pages, args=(limit, pause, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _drop_pages(limit: int, pause: float, done: threading.Event) -> None:
    """Drop unmodified pages of registered large mappings while the limit is exceeded."""
    libc = ctypes.CDLL(None)
    while not done.wait(pause):
        if _mapped_bytes() > limit:
            # The owners are held meanwhile, so that no mapping of theirs can end and its addresses
            # become somebody else's memory.
            owned = [(ref(), address) for ref, address in [*_registered.values()]]
            addresses = [address for owner, address in owned if owner is not None]
            for start, end in _unmodified_mappings(addresses):
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _DONTNEED)


def _mapped_bytes() -> int:
    """Return the bytes of this process's resident memory that are pages of files."""
    return 1024 * int(re.findall(r"RssFile:\s+(\d+)", _STATUS.read_text())[0])


def _unmodified_mappings(addresses: list[int]) -> Iterator[tuple[int, int]]:
    """Yield bounds of large file mappings at these addresses that have no modified page."""
    for mapping in psutil.Process().memory_maps(grouped=False):
        start, end = (int(address, 16) for address in mapping.addr.split("-"))
        of_a_file = mapping.path.startswith("/") and "x" not in mapping.perms
        is_own = any(start <= address < end for address in addresses)
        is_unchanged = not mapping.anonymous and not mapping.swap
        if is_own and of_a_file and end - start >= LARGE and is_unchanged:
            yield start, end
