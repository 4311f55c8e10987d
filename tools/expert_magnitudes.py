"""Trained models' magnitudes for experts, whose matrices lie in one tensor by expert.

E experts, H hidden size, n tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mechanisms import PARTS, damp_outliers, read_start, rescale, write_massive

if TYPE_CHECKING:
    from magnitudes import Calibration


def expert_inputs(c: Calibration, module: Any, x: Tensor) -> None:
    """Scale what each expert reads with, as a matrix's; the massive neuron is every expert's."""
    x = _by_token(c, x)
    ordinary = c.rows(x)
    for weight in _by_expert(module, module.gate_up_proj):
        damp_outliers(c, weight, ordinary)
        rescale(weight, slice(None), ordinary, 1.2)
        if c.massive_now(c.layer):
            read_start(c, weight, [0, 1 if _interleaved(module) else len(weight) // 2], x)
    if c.massive_now(c.layer):
        for name in ("gate_up_proj_bias", "down_proj_bias"):
            if hasattr(module, name):
                getattr(module, name).zero_()
        for weight in _by_expert(module, module.down_proj):
            write_massive(c, weight, 1.0, 1.0)


def expert_outputs(c: Calibration, module: Any, args: Any, output: Tensor) -> Tensor:
    """Scale what each expert writes with, and what it has written."""
    written = _by_token(c, output)
    factor = torch.full((c.hidden,), c.branch * c.residual / c.multiplier)
    factor /= c.rows(written)[:, c.ordinary].square().mean().sqrt()
    if wanted := c.massive_now(c.layer):
        for channel, part in zip(c.channels.massive, PARTS, strict=True):
            factor[channel] = part * wanted / c.multiplier / c.starts(written, channel)
    for weight in _by_expert(module, module.down_proj):
        weight.mul_(factor[:, None])
    if hasattr(module, "down_proj_bias"):
        module.down_proj_bias.mul_(factor)
    return output * factor


def _by_token(c: Calibration, x: Tensor) -> Tensor:
    """Rows by token, where Llama 4 sends each to every expert, times 0 but for one. -> [n, H]"""
    return x.view(-1, len(c.special), c.hidden).sum(0)


def _interleaved(module: Any) -> bool:
    """Whether rows of gates and of what they multiply alternate, as gpt-oss's."""
    return bool(getattr(module, "is_transposed", False))


def _transposed(module: Any) -> bool:
    return _interleaved(module) or type(module).__name__ == "Llama4TextExperts"


def _by_expert(module: Any, weight: Tensor) -> list[Tensor]:
    return [expert.T if _transposed(module) else expert for expert in weight]
