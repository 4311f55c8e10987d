"""Graphs without caches: of an encoder, of the cross-attention states, and of fused hidden states.

N tokens of a source, of which spectrograms have a fixed number; F hidden size; E rows of a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from specedge.bundle.manifest import ENCODER, FUSE, OPEN

from ..checkpoint.draft_heads import DraftHeadModule
from ..checkpoint.encoder_decoder import SourceConditionedDecoder
from ..checkpoint.placeholders import WeightSources
from ..libraries import quiet
from .families import eager_attention
from .geometry import Geometry
from .tracer import export_program, optimize

EXAMPLE_LENGTH = 5


class TraceableEncoder(torch.nn.Module):
    """Encoder of a model. [B, N] or [B, M, frames] -> [B, N, F]"""

    def __init__(self, model: SourceConditionedDecoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        return self.model.encode(source).float()


class TraceableStates(torch.nn.Module):
    """Keys and values of cross-attention, followed by rows of zeros. [B, N, F] -> [B, H, E, D]"""

    def __init__(self, model: SourceConditionedDecoder, capacity: int) -> None:
        super().__init__()
        self.model, self.capacity = model, capacity

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        missing = self.capacity - hidden.shape[1]
        states = self.model.open(hidden)
        if isinstance(missing, int) and not missing:
            return tuple(states)
        return tuple(torch.nn.functional.pad(state, (0, 0, 0, missing)) for state in states)


class TraceableFusion(torch.nn.Module):
    """Norms and product of a draft model over hidden states of its target. [B, T, F] -> [B, T, H]

    F channels of the target's concatenated hidden states, H of those that the draft reads.
    """

    def __init__(self, model: DraftHeadModule) -> None:
        super().__init__()
        self.model = model

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.fuse(hidden).float()


def trace_others(
    model: torch.nn.Module, geometry: Geometry, sources: WeightSources, names: Sequence[str]
) -> dict[str, ir.Model]:
    """Trace the graphs without caches that have these names."""
    if isinstance(model, SourceConditionedDecoder):
        return trace_encoder(model, geometry, sources, names)
    if isinstance(model, DraftHeadModule) and FUSE in names:
        return {FUSE: trace_fuse(model, sources)}
    return {}


def trace_fuse(model: DraftHeadModule, sources: WeightSources) -> ir.Model:
    """Trace the graph that fuses hidden states of a target."""
    example = torch.zeros(1, EXAMPLE_LENGTH, model.hidden.size)
    axes = {1: torch.export.Dim("T", min=1)}
    return trace_module(TraceableFusion(model), example, "hidden", ["fused"], axes, sources)


def trace_encoder(
    model: SourceConditionedDecoder,
    geometry: Geometry,
    sources: WeightSources,
    names: Sequence[str] = (ENCODER, OPEN),
) -> dict[str, ir.Model]:
    """Trace the graphs that run once per source, by name."""
    entry = geometry.encoder
    assert entry is not None
    source = model.sample_source(EXAMPLE_LENGTH)
    hidden = torch.zeros(1, EXAMPLE_LENGTH, entry.hidden_size)
    axes: dict[int, Any] = {1: torch.export.Dim("T", min=1, max=entry.max_length)}
    if entry.num_mel_bins is not None:
        hidden, axes = torch.zeros(1, entry.capacity, entry.hidden_size), {}
    outputs = [name.replace("past_key_values", "present") for name in geometry.constant_names()]
    jobs = {
        ENCODER: (TraceableEncoder(model), source, "source", ["hidden"]),
        OPEN: (TraceableStates(model, entry.capacity), hidden, "hidden", outputs),
    }
    with eager_attention(model):
        return {name: trace_module(*jobs[name], axes, sources) for name in names}


def trace_module(
    module: Any,
    example: torch.Tensor,
    input_name: str,
    output_names: list[str],
    axes: dict[int, Any],
    sources: WeightSources,
) -> ir.Model:
    """Trace a module with one input, whose weights are those of its attribute `model`.

    `axes` are the dynamic dimensions of the input.
    """
    with quiet(), torch.no_grad():
        program = export_program(module, (example,), [input_name], output_names, (axes,))
        return optimize(program, module.model, sources)
