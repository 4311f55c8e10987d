"""Verification and quantization reports of a graph variant, recorded at export."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from ..strict_json import OPTIONAL
from .precision import ERROR_FLOOR, ERROR_MULTIPLE


@dataclass(frozen=True)
class ParityReport:
    """Numerical verification of a graph against the PyTorch model.

    Errors are relative to the largest value of the output, except for `structure_error`. The
    reference is PyTorch in float64, and in float32 for passes through all layers of a deep model.

    Attributes:
        structure_error: Error of the graph in float64, relative to the row of logits or of one
            head's keys or values; it is large only if the graph differs from the model.
        logits_error: Error of the graph's logits in float32.
        cache_error: Error of the graph's caches in float32.
        float32_logits_error: Largest float32 error of PyTorch in four runs that round differently.
        float32_cache_error: The same for the caches.
        error_ratio: Largest error of a row as a multiple of float32's in that row.
        tolerance: Error that `--tolerance` allowed instead, or None.
        logits_std: Standard deviation of the logits.
        num_positions: Number of compared positions.
        num_left_out: Positions excluded because rounding could select other experts.
        invariant_lengths: Pass lengths T for which logits are batch-invariant.
        versions: Versions of the packages involved.
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
    invariant_lengths: tuple[int, ...]
    versions: dict[str, str]

    def __post_init__(self) -> None:
        numbers = {n: v for n, v in vars(self).items() if isinstance(v, int | float)}
        if low := [name for name, value in numbers.items() if not 0 <= value < math.inf]:
            raise ValueError(f"{low[0]} must be at least 0 and finite")
        if min(self.invariant_lengths, default=1) < 1:
            raise ValueError("invariant_lengths must be at least 1")
        for text in (*self.versions, *self.versions.values()):
            check_single_line("versions", text)

    def summary(self) -> str:
        """Return both checks as one line."""
        allowed = f"limit {ERROR_MULTIPLE:g}"
        if self.tolerance is not None:
            allowed = f"--tolerance {self.tolerance:g}"
        return (
            f"float64 error {self.structure_error:.0e}; float32 error: logits "
            f"{self.logits_error:.1e} (PyTorch {self.float32_logits_error:.1e}), caches "
            f"{self.cache_error:.1e} ({self.float32_cache_error:.1e}), worst row "
            f"{self.error_ratio:.1f} times PyTorch's ({allowed}); {self.num_positions} positions"
        )

    @property
    def bound(self) -> float:
        """Largest error of a correct graph, relative to the largest value."""
        if self.tolerance is not None:
            return self.tolerance
        error = max(self.float32_logits_error, self.float32_cache_error)
        return ERROR_MULTIPLE * error + ERROR_FLOOR


@dataclass(frozen=True)
class WeightType:
    """Quantization type of a checkpoint's weights.

    Attributes:
        num_weights: Weights of the type.
        file_bits: Bits per weight in the checkpoint, with scales.
        bundle_bits: Bits per weight in the bundle, with scales, offsets and zero points; 32 if
            dequantized.
    """

    num_weights: int
    file_bits: float
    bundle_bits: float


@dataclass(frozen=True)
class QuantizationReport:
    """Effect of quantization on a graph variant, measured on a text.

    Attributes:
        text: Name of the evaluation text.
        num_tokens: Tokens of the text; 0 if the exporting machine could not run the graphs.
        perplexity: Perplexity of the quantized graphs; 0 for a self-draft.
        original_perplexity: Perplexity of the float graphs; 0 for a self-draft.
        agreement: Top-1 agreement.
        divergence: Mean Kullback-Leibler divergence in nats.
        error: Largest difference of a logit or cache value, relative to the largest value.
        num_cut: Groups of matrices with a common input and several scales along K.
        num_left: Groups that are not quantized.
        num_in_blocks: Groups that are quantized block-wise.
        product_error: Relative RMS error of the worst matrix product.
        plain_product_error: The same without splitting.
        exceptions: One line for each group that deviates from the requested precision.
        bits_per_weight: Size of the weights file in bits over the model's parameters, with scales,
            embedding and LM head; 0 if unknown.
        types: Quantization types of the checkpoint by name, where its weights are kept.
        num_smoothed: Groups with SmoothQuant scales, in bundles that had them.
    """

    text: str
    num_tokens: int
    perplexity: float
    original_perplexity: float
    agreement: float
    divergence: float
    error: float
    num_cut: int
    num_left: int
    num_in_blocks: int
    product_error: float
    plain_product_error: float
    exceptions: tuple[str, ...]
    bits_per_weight: float = field(default=0.0, metadata=OPTIONAL)
    types: dict[str, WeightType] = field(default_factory=dict, metadata=OPTIONAL)
    num_smoothed: int = field(default=0, metadata=OPTIONAL)

    def __post_init__(self) -> None:
        for line in (self.text, *self.exceptions, *self.types):
            check_single_line("text and exceptions", line)
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not 0 <= value < math.inf:
                raise ValueError(f"{name} must be at least 0 and finite")

    def summary(self) -> str:
        """Return the report as one line."""
        if not self.num_tokens:
            return "not measured: ONNX Runtime cannot run these graphs on the exporting machine"
        where = f"on {self.num_tokens} tokens of {self.text}"
        loss = f"perplexity {self.perplexity:.4g} {where} (float {self.original_perplexity:.4g})"
        line = (
            f"{loss if self.perplexity else where}; top-1 agreement {self.agreement:.1%}, "
            f"KL divergence {self.divergence:.2g}, largest error {self.error:.1%}"
        )
        if self.bits_per_weight:
            line += f"; {self.bits_per_weight:.2f} bits per weight"
        for name, size in self.types.items():
            line += (
                f"; {size.num_weights / 1e6:.1f} M weights in {name}: {size.file_bits:.4g} bits "
                f"in the file, {size.bundle_bits:.4g} in the bundle"
            )
        if not self.plain_product_error:
            return line
        return (
            f"{line}; error of the worst product {self.product_error:.1%} "
            f"({self.plain_product_error:.1%} without splitting; groups: {self.num_cut} split, "
            f"{self.num_in_blocks} block-wise, {self.num_left} not quantized)"
        )


def check_single_line(name: str, text: str | None) -> None:
    """Raise ValueError for text with control characters or more than 500 characters."""
    if text is not None and (len(text) > 500 or re.search(r"[\x00-\x1f\x7f-\x9f]", text)):
        raise ValueError(
            f"{name} must be one line of at most 500 characters without control characters"
        )
