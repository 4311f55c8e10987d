"""Limit of the resident memory of memory-mapped files.

A checkpoint stays mapped while its matrices are read repeatedly. Its pages are reclaimable, but
count towards the resident set size. Unmodified pages of large mappings that were created here or
registered with `register` are therefore released before they exceed a limit.
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
PAUSE = 0.1  # seconds between checks, in which a fast disk reads a few hundred megabytes
_DONTNEED = 4  # MADV_DONTNEED on Linux
_STATUS, _MAPPINGS = Path("/proc/self/status"), Path("/proc/self/smaps")

_registered: dict[int, tuple[weakref.ref[Any], int]] = {}  # owners of mappings, with an address


def map_file(path: Path, offset: int, size: int) -> np.memmap[Any, Any]:
    """Map bytes of a file copy-on-write and register the mapping. [size] of uint8"""
    array = np.memmap(path, np.uint8, "c", offset, (size,))
    _register(array, array.ctypes.data)
    return array


def register(tensor: torch.Tensor) -> torch.Tensor:
    """Register a memory-mapped tensor, whose pages may be released as long as it has views."""
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
    """Keep the resident pages of mapped files near a limit, in bytes; Linux only.

    Released pages are read again, from the page cache or the file, on the next access.
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
    """Release unmodified pages of registered large mappings while the limit is exceeded."""
    libc = ctypes.CDLL(None)
    while not done.wait(pause):
        if _mapped_bytes() > limit:
            # Strong references keep the mappings alive, so that their addresses are not reused.
            owned = [(ref(), address) for ref, address in [*_registered.values()]]
            addresses = [address for owner, address in owned if owner is not None]
            for start, end in _unmodified_mappings(addresses):
                libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _DONTNEED)


def _mapped_bytes() -> int:
    """Return the bytes of this process's resident memory that are backed by files."""
    return 1024 * int(re.findall(r"RssFile:\s+(\d+)", _STATUS.read_text())[0])


def _unmodified_mappings(addresses: list[int]) -> Iterator[tuple[int, int]]:
    """Yield bounds of large file mappings at these addresses that have no modified page."""
    for mapping in psutil.Process().memory_maps(grouped=False):
        start, end = (int(address, 16) for address in mapping.addr.split("-"))
        is_file = mapping.path.startswith("/") and "x" not in mapping.perms
        is_registered = any(start <= address < end for address in addresses)
        is_unmodified = not mapping.anonymous and not mapping.swap
        if is_registered and is_file and end - start >= LARGE and is_unmodified:
            yield start, end
