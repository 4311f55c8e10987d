"""A model's KV cache: buffers of fixed shapes, and the tokens whose rows they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specedge.bundle import manifest

from ..decoding.model import shared_beginning
from .buffers import Array, Buffers


class Cache:
    """Keys and values [1, H, S, D] of every layer, by the end of their graph names.

    Row i belongs to `tokens[i]` and depends on no later one. Rows past `length` are stale and never
    read, so forgetting costs nothing.
    """

    def __init__(self, facts: manifest.Cache, buffers: Buffers) -> None:
        self.arrays: dict[str, Any] = {}
        self._buffers = buffers
        self._tokens: list[int] = []
        for i, layer in enumerate(facts.layers):
            for name, size in (("key", layer.key_size), ("value", layer.value_size)):
                shape = (1, layer.heads, facts.capacity, size)
                self.arrays[f"{i}.{name}"] = buffers.kept(shape, facts.dtype)

    @property
    def length(self) -> int:
        """How many rows count."""
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """A pass has written the rows of these."""
        self._tokens += tokens

    def truncate(self, length: int) -> None:
        assert 0 <= length <= self.length
        del self._tokens[length:]

    def shared(self, tokens: Sequence[int]) -> int:
        """The length of the longest beginning that is one of `tokens`."""
        return shared_beginning(self._tokens, tokens)

    def reuse(self, tokens: Sequence[int]) -> int:
        """Forget all but the longest beginning that is one of `tokens`; its length."""
        self.truncate(self.shared(tokens))
        return self.length

    def rows(self, start: int, end: int) -> list[Array]:
        """A copy of rows of every buffer. -> [H, end - start, D] each"""
        arrays = map(self._buffers.fetch, self.arrays.values())
        return [array[0, :, start:end].copy() for array in arrays]
