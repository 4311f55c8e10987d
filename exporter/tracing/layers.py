"""What each layer's attention does, seen in one pass of the model before it is traced."""

from __future__ import annotations

from dataclasses import dataclass

import torch

OTHER = -1  # in a window's place: a mask that is neither causal nor a window


@dataclass(frozen=True)
class Layer:
    """What one attention call does: its window (None: all rows), and what else it takes."""

    window: int | None
    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    as_cached: bool  # whether it reads the cache's own keys and values

    def obstacle(self) -> str | None:
        """Why GroupQueryAttention cannot do this, if it cannot."""
        if self.window == OTHER:
            return "its attention mask is neither causal nor a window"
        if not self.as_cached:
            return "its cache holds something other than the keys and values it attends to"
        if self.key_size != self.value_size:
            return f"its keys have size {self.key_size}, its values {self.value_size}"
        if self.key_size % 8:
            return f"its heads have size {self.key_size}, which is not a multiple of 8"
        return None


def window_of(mask: torch.Tensor, queries: torch.Tensor) -> int | None:
    """How many rows each query sees, itself included; None for all. [n, S], [n] -> window"""
    keys = torch.arange(mask.shape[1])
    widths = mask.sum(1)
    width = int(widths.max())
    for window in (None, width):
        lowest = queries - (window or mask.shape[1])
        wanted = (keys <= queries[:, None]) & (keys > lowest[:, None])
        if torch.equal(mask, wanted):
            return window
    return OTHER
