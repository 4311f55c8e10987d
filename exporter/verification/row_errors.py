"""Row-wise comparison with the reference, bounded by float32's own error.

A row is one position's logits [V], or its keys or values of one head [D]. Errors are relative to a
row's largest value, so that large values of one head or position do not hide errors in another.
The bound is a multiple of PyTorch's own float32 error.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from specedge.bundle.precision import ERROR_FLOOR, ERROR_MULTIPLE
from specedge.errors import ParityError

TINY = 1e-6  # minimum scale of a row, relative to the output's largest value
# Multiple of float32's error that is allowed in float64. The error of a correct graph is 1e-7 of
# float32's; a constant with a relative error of 0.001 causes 10,000 times float32's.
STRUCTURE = 1e-3


def row_scales(expected: np.ndarray) -> np.ndarray:
    """Return the largest magnitude of each row. [..., n, D] -> [..., n]"""
    sizes = np.abs(expected).max(-1)
    return np.maximum(sizes, max(TINY * float(sizes.max(initial=0)), 1e-30))


def row_errors(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return the largest absolute difference in each row; NaN becomes infinite. -> [..., n]"""
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(actual - expected).max(-1)
    return np.where(np.isfinite(error), error, np.inf)


def float32_error_bounds(error: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Return float32's relative `error` of each row, at least the median. [..., n] -> [..., n]"""
    relative = error / row_scales(exact)
    usual = np.median(relative, axis=-1, keepdims=True)
    return np.maximum(relative, usual) + ERROR_FLOOR / ERROR_MULTIPLE


@dataclass
class ErrorCheck:
    """Row-wise comparison of outputs with their reference, which records the largest errors.

    `reference_name` is used in messages. A `tolerance` bounds errors relative to the largest value
    of an output, instead of by float32's own errors.
    """

    role: str
    reference_name: str
    tolerance: float | None = None
    multiple: float = ERROR_MULTIPLE
    worst: dict[str, float] = field(default_factory=dict)  # relative to the output's largest value
    row: float = 0.0  # the worst of all relative to its row's largest value
    ratio: float = 0.0  # the largest multiple of float32's own error

    def compare(
        self,
        quantity: str,
        name: str,
        actual: np.ndarray,
        expected: np.ndarray,
        float32: np.ndarray,
        start: int = 0,
        largest: float | None = None,
    ) -> None:
        """Compare rows whose first position is `start`. 2 * [n, V] or [H, n, D], [..., n]

        `largest` is the largest value of the whole output, if the rows are a part of it. Raises
        ParityError if an error exceeds its bound.
        """
        if actual.shape != expected.shape:
            raise ParityError(
                f"{self.role}: {name} from position {start} on has the shape "
                f"{list(actual.shape)}, not {list(expected.shape)} as {self.reference_name}"
            )
        size = largest or float(np.abs(expected).max(initial=1e-30))
        error, scale = row_errors(actual, expected), row_scales(expected)
        self.worst[quantity] = max(
            self.worst.get(quantity, 0.0), float(error.max(initial=0)) / size
        )
        self.row = max(self.row, float((error / scale).max(initial=0)))
        ratio = error / scale / float32
        self.ratio = max(self.ratio, float(ratio.max(initial=0)))
        over = error / size / self.tolerance if self.tolerance else ratio / self.multiple
        if over.max(initial=0) <= 1:
            return
        worst = np.unravel_index(over.argmax(), over.shape)
        *head, row = map(int, worst)
        where = f"{name}{f' head {head[0]}' if head else ''} at position {start + row}"
        if self.tolerance:
            reason = (
                f"{error[worst] / size:.1e} of the largest value, --tolerance is {self.tolerance:g}"
            )
        else:
            reason = (
                f"{error[worst] / scale[worst]:.1e} of the row's largest value, allowed are "
                f"{self.multiple:g} times float32's own {float32[worst]:.1e}"
            )
        raise ParityError(f"{self.role}: {where} differs from {self.reference_name} by {reason}")
