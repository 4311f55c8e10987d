"""Key-value cache of a model: buffers of fixed shape, and the tokens of their rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from specedge.bundle.manifest import ModelEntry

from ..sampling.history import common_prefix_length
from .buffers import Array, Buffers


class KeyValueCache:
    """Key-value cache of fixed capacity: the model's states [1, H, S, D] by name.

    Row i belongs to `tokens[i]` and depends on no later token. Rows past `length` are stale and
    never read, so a rollback costs nothing.
    """

    def __init__(self, arrays: dict[str, Any], buffers: Buffers) -> None:
        self.arrays = arrays
        self._buffers = buffers
        self._tokens: list[int] = []

    @property
    def length(self) -> int:
        """Number of valid rows."""
        return len(self._tokens)

    @property
    def last_token(self) -> int:
        """Token of the last valid row."""
        return self._tokens[-1]

    def extend(self, tokens: Sequence[int]) -> None:
        """Record the tokens whose rows a pass has written."""
        self._tokens += tokens

    def truncate(self, length: int) -> None:
        """Roll back to `length` rows."""
        assert 0 <= length <= self.length
        del self._tokens[length:]

    def shared(self, tokens: Sequence[int]) -> int:
        """Return the length of the longest common prefix with `tokens`."""
        return common_prefix_length(self._tokens, tokens)

    def reuse(self, tokens: Sequence[int]) -> int:
        """Roll back to the longest common prefix with `tokens`; return its length."""
        self.truncate(self.shared(tokens))
        return self.length

    def rows(self, start: int, end: int) -> list[Array]:
        """Copy a range of rows from every buffer. -> [H, end - start, D] each"""
        arrays = map(self._buffers.fetch, self.arrays.values())
        return [array[0, :, start:end].copy() for array in arrays]


def cache_arrays(
    model: ModelEntry,
    ops: str,
    allocate: Callable[[tuple[int, ...], str], Any],
    num_slots: int = 1,
) -> dict[str, Any]:
    """Allocate the states of all slots by name. -> [num_slots, H, S, D] each"""
    return {
        state.name: allocate(state.sizes(model.capacity, num_slots), state.dtype)
        for state in model.states_of(ops)
    }
