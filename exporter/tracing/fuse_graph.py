"""Graph that fuses hidden states of a target for a draft, [B, T, F] -> [B, T, H]."""

from __future__ import annotations

import onnx_ir as ir
import torch

from ..checkpoint.draft_heads import DraftHeadModule
from ..checkpoint.placeholders import WeightSources
from .encoder_graphs import EXAMPLE_LENGTH, trace_module


class TraceableFusion(torch.nn.Module):
    """Norms and product of a draft model over hidden states of its target."""

    def __init__(self, model: DraftHeadModule) -> None:
        super().__init__()
        self.model = model

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.fuse(hidden).float()


def trace_fuse(model: DraftHeadModule, sources: WeightSources) -> ir.Model:
    """Trace the graph `fuse`."""
    example = torch.zeros(1, EXAMPLE_LENGTH, model.hidden.size)
    axes = {1: torch.export.Dim("T", min=1)}
    return trace_module(TraceableFusion(model), example, "hidden", ["fused"], axes, sources)
