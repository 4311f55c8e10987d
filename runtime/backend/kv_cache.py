"""Key-value cache of a model: buffers of fixed shape, and the tokens of their rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from specedge.bundle.manifest import ModelEntry

from ..sampling.history import common_prefix_length
from ..sampling.source import Source
from .buffers import Array, Buffers


class KeyValueCache:
    """Key-value cache of fixed capacity: the model's states [1, H, S, D] by name.

    Row i belongs to `tokens[i]` and depends on no later token. Rows past `length` are stale and
    never read, so a rollback costs nothing. In an encoder-decoder, all rows also depend on the
    `source` of the constant states, which is None if they are of no request.

    Args:
        arrays: States by name.
        buffers: Allocator of the states.
        constants: Names of the constant states.
    """

    def __init__(
        self, arrays: dict[str, Any], buffers: Buffers, constants: Collection[str] = ()
    ) -> None:
        self.arrays = arrays
        self.source: Source | None = None
        # Number of rows of the constant states, an input of every pass
        self.source_length = buffers.staging((1,), "int64") if constants else None
        self._buffers = buffers
        self._rows = [array for name, array in arrays.items() if name not in constants]
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

    def open(self, length: int) -> None:
        """Empty the cache for constant states of `length` rows, whose source is set afterwards."""
        self.truncate(0)
        self.source = None
        self._buffers.write(self.source_length, [length])

    def shared(self, tokens: Sequence[int], source: Source | None = None) -> int:
        """Return the length of the longest common prefix with `tokens`; 0 for another source."""
        return common_prefix_length(self._tokens, tokens) if source == self.source else 0

    def reuse(self, tokens: Sequence[int]) -> int:
        """Roll back to the longest common prefix with `tokens`; return its length."""
        self.truncate(common_prefix_length(self._tokens, tokens))
        return self.length

    def rows(self, start: int, end: int) -> list[Array]:
        """Copy a range of rows from every state but constants. -> [H, end - start, D] each"""
        arrays = map(self._buffers.fetch, self._rows)
        return [array[0, :, start:end].copy() for array in arrays]


def cache_arrays(
    model: ModelEntry,
    ops: str,
    allocate: Callable[[tuple[int, ...], str], Any],
    num_slots: int = 1,
) -> dict[str, Any]:
    """Allocate the states of all slots by name. -> [num_slots, H, S or E, D] each"""
    return {
        state.name: allocate(model.state_shape(state, num_slots), state.dtype)
        for state in model.states_of(ops)
    }
