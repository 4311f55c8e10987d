"""Graphs without caches: of an encoder, of the cross-attention states, and of fused hidden states.

N tokens of a source, of which spectrograms have a fixed number; F hidden size; E rows of a state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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
from .tracer import EXAMPLE_LENGTH, export_program, optimize

Function = Callable[[torch.Tensor], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class UncachedGraph:
    """Graph without caches, which has one input.

    Attributes:
        name: Name of the graph.
        input_name: Name of the input.
        outputs: Names of the outputs.
        function: Function of PyTorch.
        example: Input of the trace.
        axes: Dynamic dimensions of the input.
    """

    name: str
    input_name: str
    outputs: list[str]
    function: Function
    example: torch.Tensor
    axes: dict[int, Any]


class TraceableFunction(torch.nn.Module):
    """Function of a model."""

    def __init__(self, model: torch.nn.Module, function: Function) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.function(value))


def uncached_graphs_of(model: torch.nn.Module, geometry: Geometry) -> list[UncachedGraph]:
    """Return the graphs of a model in order; each reads the first output of the previous one."""
    if isinstance(model, DraftHeadModule) and geometry.has_fuse:
        fuse, hidden = model.fuse, torch.zeros(1, EXAMPLE_LENGTH, model.hidden.size)
        axes = {1: torch.export.Dim("T", min=1)}
        return [UncachedGraph(FUSE, "hidden", ["fused"], lambda x: [fuse(x).float()], hidden, axes)]
    if not isinstance(model, SourceConditionedDecoder):
        return []
    entry, encode = geometry.encoder, model.encode
    assert entry is not None
    source = model.sample_source(EXAMPLE_LENGTH)
    hidden = torch.zeros(1, EXAMPLE_LENGTH, entry.hidden_size)
    axes = {1: torch.export.Dim("T", min=1, max=entry.max_length)}
    if entry.num_mel_bins is not None:
        hidden, axes = torch.zeros(1, entry.capacity, entry.hidden_size), {}
    states = [name.replace("past_key_values", "present") for name in geometry.constant_names()]
    open_ = partial(_open, model, entry.capacity)
    return [
        UncachedGraph(ENCODER, "source", ["hidden"], lambda x: [encode(x).float()], source, axes),
        UncachedGraph(OPEN, "hidden", states, open_, hidden, axes),
    ]


def trace_uncached(
    model: torch.nn.Module, geometry: Geometry, sources: WeightSources, names: Sequence[str]
) -> dict[str, ir.Model]:
    """Trace the graphs without caches that have these names."""
    traced = {}
    attention = eager_attention(model) if geometry.encoder else contextlib.nullcontext()
    with attention, quiet(), torch.no_grad():
        for graph in uncached_graphs_of(model, geometry):
            if graph.name in names:
                module, inputs = TraceableFunction(model, graph.function), (graph.example,)
                program = export_program(
                    module, inputs, [graph.input_name], graph.outputs, (graph.axes,)
                )
                traced[graph.name] = optimize(program, model, sources)
    return traced


def _open(
    model: SourceConditionedDecoder, capacity: int, hidden: torch.Tensor
) -> list[torch.Tensor]:
    """Return keys and values of cross-attention, followed by zeros. [B, N, F] -> [B, H, E, D]"""
    missing = capacity - hidden.shape[1]
    states = model.open(hidden)
    if isinstance(missing, int) and not missing:
        return states
    return [torch.nn.functional.pad(state, (0, 0, 0, missing)) for state in states]
