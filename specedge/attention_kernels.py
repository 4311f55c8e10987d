"""Attention kernels of ONNX Runtime on CPUs.

MLAS, its library of matrix products, sums the scores of heads with more than 128 channels in blocks
whose size depends on the number of cache rows after the pass, up to 64: rows of a pass across such
a number are not bitwise equal to those of shorter passes.

In ONNX Runtime 1.30 to 1.32, flash attention of GroupQueryAttention (CPU, passes of several tokens)
sums the last block of keys in an order that depends on the number of cache rows: on Arm, rows of
different passes are then not bitwise equal. On x86-64 they are.
"""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager

BLOCK, MAX_ROWS = 128, 64  # channels of a block, and cache rows up to which blocks are longer
VARIABLE = "ORT_GQA_DISABLE_FLASH_ATTENTION"
_lock = threading.Lock()
_num_users = 0


def pass_boundaries(head_size: int) -> tuple[int, ...]:
    """Return the cache lengths, ascending, that no pass of several tokens may cross.

    A single token is passed as two rows, so a boundary is one less than the number of cache rows.
    """
    boundaries = []
    rows, channels = MAX_ROWS, BLOCK
    while head_size > channels and rows > 1:
        boundaries.append(rows - 1)
        rows, channels = rows // 2, channels * 2
    return tuple(reversed(boundaries))


@contextmanager
def batch_invariant_attention() -> Iterator[None]:
    """Disable flash attention in sessions that are created on an Arm CPU meanwhile.

    Kernels read the environment variable when a session is created. A value that the user has set
    is kept; after the last concurrent use, the environment is as before.
    """
    global _num_users
    if platform.machine().lower() not in ("aarch64", "arm64"):
        yield
        return
    with _lock:
        is_set_by_user = VARIABLE in os.environ and not _num_users
        if not is_set_by_user:
            os.environ[VARIABLE] = "1"
            _num_users += 1
    try:
        yield
    finally:
        with _lock:
            if not is_set_by_user:
                _num_users -= 1
                if not _num_users:
                    os.environ.pop(VARIABLE, None)
