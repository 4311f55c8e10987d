"""Attention kernels of ONNX Runtime on CPUs that are not batch-invariant.

MLAS, its library of matrix products, sums the scores of heads with more than 128 channels in blocks
whose size depends on the number of keys, up to 64: rows of a pass across such a number of cache
rows are not bitwise equal to those of shorter passes. Flash attention of GroupQueryAttention
(ONNX Runtime 1.30 to 1.32, passes of several tokens) multiplies blocks of keys, whose size depends
on the processor's cache, so there this happens in the last block of any length.

On Arm, its sums over the last block depend on the number of cache rows for any head size.
"""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from .bundle.graph_variants import attention_ops
from .bundle.manifest import State

BLOCK, MAX_ROWS = 128, 64  # channels of a block, and keys up to which blocks are longer
VARIABLE = "ORT_GQA_DISABLE_FLASH_ATTENTION"
_lock = threading.Lock()
_num_users = 0


def pass_boundaries(states: Iterable[State], ops: str) -> tuple[int, ...]:
    """Return the cache lengths, ascending, that no pass of a graph variant may cross on a CPU.

    Sessions must be created in `batch_invariant_attention`. A single token is passed as two rows,
    so a boundary is one less than the number of cache rows. Attention of standard ONNX multiplies
    all rows of a cache in any case.
    """
    head_size = _widest_head(states) if attention_ops(ops) == "gqa" else 0
    boundaries = []
    rows, channels = MAX_ROWS, BLOCK
    while head_size > channels and rows > 1:
        boundaries.append(rows - 1)
        rows, channels = rows // 2, channels * 2
    return tuple(reversed(boundaries))


@contextmanager
def batch_invariant_attention(states: Iterable[State] = ()) -> Iterator[None]:
    """Disable flash attention in sessions that are created meanwhile, if this is necessary.

    It is for wide heads, and on an Arm CPU. Kernels read the environment variable when a session is
    created, so others that are created meanwhile do not use flash attention either. A value that
    the user has set is kept; after the last concurrent use, the environment is as before.
    """
    global _num_users
    is_arm = platform.machine().lower() in ("aarch64", "arm64")
    if not is_arm and _widest_head(states) <= BLOCK:
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


def flash_attention_setting() -> str | None:
    """Return the value of VARIABLE that the user has set."""
    with _lock:
        return None if _num_users else os.environ.get(VARIABLE)


def _widest_head(states: Iterable[State]) -> int:
    """Return the number of channels of the widest attention head."""
    return max((size for state in states if isinstance(size := state.shape[-1], int)), default=0)
