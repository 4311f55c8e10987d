"""What an export measured of an op set, as the manifest has it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from .precision import Precision


@dataclass(frozen=True)
class ParityReport:
    """What the export measured against the PyTorch model.

    `structure_error` compares both in float64, where only a graph that is another model differs; it
    is relative to the row of logits, or of one head's keys or values. The others are of float32,
    against the same float64 and relative to the largest value of the output: the graph's and
    float32's own, which is PyTorch's and that of three runs with other kernels' roundings.
    `error_ratio` is the largest of the graph's errors as a multiple of that in the same row,
    `tolerance` what `--tolerance` allowed instead. `num_left_out` counts tokens left out because
    rounding could have chosen other experts. `row_independent_lengths` are the pass lengths T whose
    rows had the same bits as one pass over all of them. `versions` are those of the packages that
    took part.
    """

    structure_error: float
    logits_error: float
    cache_error: float
    float32_logits_error: float
    float32_cache_error: float
    error_ratio: float
    tolerance: float | None
    logits_std: float
    num_positions: int
    num_left_out: int
    invariant_lengths: tuple[int, ...] = field(metadata={"key": "row_independent_lengths"})
    versions: dict[str, str]

    def __post_init__(self) -> None:
        numbers = {n: v for n, v in vars(self).items() if isinstance(v, int | float)}
        if low := [name for name, value in numbers.items() if not 0 <= value < math.inf]:
            raise ValueError(f"{low[0]} is at least 0 and finite")
        if min(self.invariant_lengths, default=1) < 1:
            raise ValueError("row_independent_lengths are at least 1")
        for text in (*self.versions, *self.versions.values()):
            check_single_line("versions", text)

    def summary(self, precision: Precision) -> str:
        """Both questions and their answers in one line."""
        allowed = f"limit {precision.multiple:g}"
        if self.tolerance is not None:
            allowed = f"--tolerance {self.tolerance:g}"
        return (
            f"matches the model to {self.structure_error:.0e} in float64; in float32 logits are "
            f"off by {self.logits_error:.1e} "
            f"(float32 itself by up to {self.float32_logits_error:.1e}), "
            f"caches by {self.cache_error:.1e} ({self.float32_cache_error:.1e}), the worst row by "
            f"{self.error_ratio:.1f} times float32's own ({allowed}); "
            f"{self.num_positions} positions"
        )

    def bound(self, precision: Precision) -> float:
        """How far from exact a right graph may be, relative to the largest value."""
        if self.tolerance is not None:
            return self.tolerance
        own = max(self.float32_logits_error, self.float32_cache_error)
        return precision.multiple * own + precision.floor


@dataclass(frozen=True)
class QuantizationReport:
    """What rounding an op set's weights and inputs cost, measured on a text.

    `num_tokens` is 0 where the exporting machine could not run the graphs, and numbers say nothing.
    `perplexity` is the model's, `original_perplexity` that of the float graph it was made of, both
    0 of a self-draft, which is no language model;
    `agreement` is how often their likeliest tokens are the same, `divergence` the mean
    Kullback-Leibler divergence in nats, `error` the largest difference of a value of logits or
    cache, in the largest value. Of the groups of matrices that read one input `num_smoothed` had
    channels' sizes moved, `num_cut` have several scales a row, `num_in_blocks` one for every block
    of numbers, `num_left` are not rounded; `exceptions` say of each that is not as the precision
    has it what was done and why.
    `product_error` is the worst product's, root of the mean square over the product's own;
    `plain_product_error` what it would be with neither.
    """

    text: str
    num_tokens: int
    perplexity: float
    original_perplexity: float
    agreement: float
    divergence: float
    error: float
    num_smoothed: int
    num_cut: int
    num_left: int
    num_in_blocks: int
    product_error: float
    plain_product_error: float
    exceptions: tuple[str, ...]

    def __post_init__(self) -> None:
        for line in (self.text, *self.exceptions):
            check_single_line("text and exceptions", line)
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                raise ValueError(f"{name} is at least 0 and finite")

    def summary(self) -> str:
        """All of it in one line."""
        if not self.num_tokens:
            return "checked, but not run, as ONNX Runtime cannot on the exporting machine"
        where = f"on {self.num_tokens} tokens of {self.text}"
        loss = f"perplexity {self.perplexity:.4g} {where}, in float {self.original_perplexity:.4g}"
        found = (
            f"{loss if self.perplexity else where}; the likeliest token is the same in "
            f"{self.agreement:.1%}, KL {self.divergence:.2g}, values are off by {self.error:.1%}"
        )
        if not self.plain_product_error:
            return found
        return (
            f"{found}; the worst product is off by "
            f"{self.product_error:.1%} (rounded plainly {self.plain_product_error:.1%}; "
            f"{self.num_smoothed} smoothed, {self.num_cut} cut, {self.num_in_blocks} in blocks, "
            f"{self.num_left} not rounded)"
        )


def check_single_line(name: str, text: str | None) -> None:
    """Refuse text that could write over a terminal or pass for two lines."""
    if text is not None and (len(text) > 500 or re.search(r"[\x00-\x1f\x7f-\x9f]", text)):
        raise ValueError(f"{name} is one line of at most 500 characters, none of them for control")
