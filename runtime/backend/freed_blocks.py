"""What glibc does with memory that is freed while sessions open."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD = -3, 32 << 20  # of glibc's malloc.h, on 64 bits


@contextmanager
def large_blocks_apart() -> Iterator[None]:
    """Have glibc give blocks from 1 MB on back to the system as soon as they are freed.

    While a session packs weights, those that it copied from would stay behind among the packed
    ones: 420 MB beside 1.1 GB. Afterwards the limit is the one that glibc would have moved to by
    itself. Other allocators are left alone.
    """
    set_option = _mallopt()
    set_option(_MMAP_THRESHOLD, 1 << 20)
    try:
        yield
    finally:
        set_option(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)


def _mallopt() -> Callable[[int, int], object]:
    """glibc's function of this name, else one that does nothing."""
    try:
        found: Callable[[int, int], object] = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return lambda option, value: None
    return found
