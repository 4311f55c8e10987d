"""Graphs of an encoder, and of the cross-attention states that the decoder reads.

N tokens of a source, of which spectrograms have a fixed number; F hidden size; E rows of a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from specedge.bundle.manifest import ENCODER, OPEN

from ..checkpoint.encoder_decoder import SourceConditionedDecoder
from ..checkpoint.placeholders import WeightSources
from ..libraries import quiet
from .attention import OPSET
from .families import eager_attention
from .geometry import Geometry
from .tracer import optimize

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
        program = torch.onnx.export(
            module,
            (example,),
            input_names=[input_name],
            output_names=output_names,
            dynamic_shapes=(axes,),
            dynamo=True,
            opset_version=OPSET,
            verbose=False,
            optimize=False,
        )
        assert program is not None
        return optimize(program, module.model, sources)
