"""Selection of a quantization scheme for each group of matrices, by its calibrated error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir
import torch

from . import rounding
from .block_sources import CheckpointMatrix
from .calibration import InputStatistics
from .checkpoint_experts import CheckpointExperts
from .experts import NUM_SAMPLED_EXPERTS, ExpertWeights
from .matrices import MatrixGroup
from .rounding import IntegerMatrix

SPLITS = (2, 4, 8)  # parts of K with separate scales
# Relative product error above which K is split.
MAX_UNSPLIT_ERROR = 0.04
# Product error above which 8-bit blocks are considered, which have slower verify passes.
MAX_PER_CHANNEL_ERROR = 0.05
MAX_ERROR = 0.2  # product error above which a group is not quantized
# KL divergence in nats per token above which the LM head is per-channel int8 instead of int4.
MAX_HEAD_DIVERGENCE = 0.01
NUM_SAMPLED_COLUMNS = 512  # columns per matrix used to measure errors
MAX_NAMES = 3  # names of matrices listed per group in the report


@dataclass(frozen=True)
class Scheme:
    """Quantization scheme of a group, and the relative RMS error of its worst product.

    Attributes:
        num_parts: Parts of K with separate scales; 0 if the group is not quantized.
        error: Error of the worst product.
        plain_error: Error without splits of K.
        bits: Bits of block-wise quantization; 0 if per-channel.
        importance: Mean square of the input by channel, [K], for block-wise scales.
        reason: Explanation of a deviation from the precision's default scheme.
        integers: Matrices rounded by GPTQ, by offset; others are rounded to nearest.
        kept: The checkpoint's integers of matrices, by offset, if they are kept; others stay float.
        experts: The checkpoint's integers of experts, if they are kept.
    """

    num_parts: int
    error: float
    plain_error: float
    bits: int = 0
    importance: np.ndarray | None = None
    reason: str = ""
    integers: Mapping[int, IntegerMatrix] = field(default_factory=dict)
    kept: Mapping[int, CheckpointMatrix] | None = None
    experts: CheckpointExperts | None = None


def per_channel_scheme(group: MatrixGroup, x: InputStatistics, tied: bool = False) -> Scheme:
    """Return a per-channel scheme for a group with input x, or 8-bit blocks if it is inaccurate.

    Args:
        group: Matrices; stacked ones are not split.
        x: Statistics of their input.
        tied: True for a tied LM head, which is not split.
    """
    weights = _sampled_columns(group)
    can_cut = not tied and all(len(matrix.stored.order) == 2 for matrix in group.matrices)
    plain = best = Scheme(1, error := _worst_error(weights, x.rows), error)
    for num_parts in SPLITS if can_cut else ():
        if best.error <= MAX_UNSPLIT_ERROR or len(x.maximum) % num_parts:
            break
        best = Scheme(num_parts, _worst_error(weights, x.rows, num_parts), plain.error)
    if best.error > MAX_PER_CHANNEL_ERROR and can_cut:
        blocks = block_scheme(group, x, 8)
        if blocks.num_parts and blocks.error < best.error:
            best = replace(blocks, plain_error=plain.error)
    if best.error > MAX_ERROR:
        return unquantized(
            f"quantization would cause a product error of {best.error:.1%}", plain.error
        )
    if best.num_parts == 1 and not best.bits:
        return best
    is_split = best.num_parts > 1
    layout = f"{best.num_parts} parts of K" if is_split else f"blocks of {rounding.BLOCK_SIZE}"
    return replace(
        best, reason=f"in {layout}, off by {best.error:.1%}, in one by {plain.error:.1%}"
    )


def unquantized(reason: str, plain_error: float = 0.0) -> Scheme:
    """Return a scheme without quantization."""
    return Scheme(0, 0.0, plain_error, reason=f"not quantized, because {reason}")


def block_scheme(group: MatrixGroup, x: InputStatistics, bits: int) -> Scheme:
    """Return a block-wise scheme for a group with input x."""
    error = max(rounding.block_error(w, x.rows, bits) for w in _sampled_columns(group))
    if error > MAX_ERROR and not (bits == 4 and x.hessian is not None):  # GPTQ is more accurate
        return unquantized(f"quantization would cause a product error of {error:.1%}", error)
    return Scheme(1, error, error, bits, x.mean_square)


def expert_scheme(experts: ExpertWeights, x: InputStatistics, bits: int) -> Scheme:
    """Return a block-wise scheme for experts with input x, measured on a sample of them."""
    first, last = experts.first.data(), experts.last.data()
    if first.shape[-1] % rounding.BLOCK_SIZE or last.shape[-1] % rounding.BLOCK_SIZE:
        return unquantized(f"their sizes are not multiples of {rounding.BLOCK_SIZE}")
    rows, errors = torch.from_numpy(x.rows), []
    for expert in range(0, len(first), -(-len(first) // NUM_SAMPLED_EXPERTS)):
        inner = experts.inner(expert, rows).numpy()
        errors.append(rounding.block_error(first[expert].T, x.rows, bits))
        errors.append(rounding.block_error(last[expert].T, inner, bits))
    if (error := max(errors)) > MAX_ERROR:
        return unquantized(f"quantization would cause a product error of {error:.1%}", error)
    return Scheme(1, error, error, bits, x.mean_square)


def head_scheme(group: MatrixGroup, x: InputStatistics) -> Scheme:
    """Return 4-bit blocks for an LM head with input x, or a per-channel scheme if inaccurate."""
    (matrix,) = group.matrices
    divergence = rounding.block_divergence(matrix.stored.data(), x.rows, 4)
    if divergence <= MAX_HEAD_DIVERGENCE:
        return block_scheme(group, x, 4)
    scheme = per_channel_scheme(group, x)
    layout = scheme.reason or "in columns of 8 bits"
    return replace(
        scheme,
        reason=f"{layout}; 4 bits would increase the loss by {divergence:.3f} nats per token",
    )


def round_to_nearest(weights: torch.Tensor, choice: Scheme) -> IntegerMatrix:
    """Round a matrix that is not split along K. [K, N]"""
    if choice.bits:
        return rounding.quantize_blocks(weights, choice.bits, choice.importance)
    return rounding.quantize_columns(weights)


def _sampled_columns(group: MatrixGroup) -> list[torch.Tensor]:
    """Return a random sample of columns of each matrix."""
    samples = []
    for whole in (matrix.stored.data() for matrix in group.matrices):
        chosen = np.random.default_rng(0).permutation(whole.shape[-1])[:NUM_SAMPLED_COLUMNS]
        stack = whole if whole.ndim > 2 else whole[None]
        step = -(-len(stack) // NUM_SAMPLED_EXPERTS)
        samples += [matrix[:, np.sort(chosen)].contiguous() for matrix in stack[::step]]
    return samples


def _worst_error(weights: Sequence[torch.Tensor], x: np.ndarray, num_parts: int = 1) -> float:
    return max(rounding.product_error(w, x, num_parts) for w in weights)


def with_names(choice: Scheme, tensors: Sequence[ir.ExternalTensor]) -> Scheme:
    """Return a scheme whose reason names its matrices."""
    return replace(choice, reason=choice.reason and f"{_format_names(tensors)}: {choice.reason}")


def _format_names(tensors: Sequence[ir.ExternalTensor]) -> str:
    """Format the names of the first tensors, and the number of the others."""
    names = [tensor.name or "" for tensor in tensors]
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(name[:120] for name in names[:MAX_NAMES]) + more
