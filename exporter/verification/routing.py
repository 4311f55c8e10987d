"""Which experts a model chooses, and how nearly it chose others.

A choice between two experts by less than rounding is no fault of whoever makes it otherwise; but
all that follows differs. Every router takes its experts by `torch.topk`, so that is watched.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch.overrides import TorchFunctionMode

from specedge.bundle.precision import FLOAT32


class Choices(TorchFunctionMode):
    """The scores of every choice, [rows, E], in the order of the calls, and how many are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = slice(0, 0)  # of the watched pass; each has the same number of rows
        self.scores: list[tuple[slice, np.ndarray, int]] = []

    @property
    def num_experts(self) -> int:
        """Among how many experts a layer chooses at most; 0 where none does."""
        numbers = (scores.shape[1] for _, scores, k in self.scores if k < scores.shape[1])
        return max(numbers, default=0)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "topk":
            scores, k = args[0], args[1] if len(args) > 1 else kwargs["k"]
            rows = scores.detach().double().reshape(-1, scores.shape[-1]).numpy()
            self.scores.append((self.positions, rows, int(k)))
        return func(*args, **kwargs)


def close(exact: Choices, rounded: Choices, num_positions: int) -> np.ndarray:
    """Which positions float32 may send to other experts: by margins near its error. [n]"""
    near = np.zeros(num_positions, bool)
    for (positions, wanted, k), (_, found, _) in zip(exact.scores, rounded.scores, strict=True):
        if k < wanted.shape[1]:
            with np.errstate(invalid="ignore"):
                moved = np.abs(found.reshape(-1, *wanted.shape) - wanted)
                noise = np.nan_to_num(moved, posinf=0).max((0, 2))
                ordered = -np.sort(-wanted, axis=1)
                margin = np.nan_to_num(ordered[:, k - 1] - ordered[:, k], nan=np.inf)
            part = near[positions]
            part |= (margin < 2 * FLOAT32.multiple * noise).reshape(len(part), -1).any(1)
    return near
