"""Any Hugging Face decoder becomes a graph over fixed KV-cache buffers.

B sequences, T new tokens, S rows of cache, H heads of D, V vocabulary entries.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import onnx_ir as ir
import torch
import torch.onnx.ops

from specedge.errors import ExportError, SpecEdgeError

from .. import private
from ..quiet import quiet
from .attention import OPSET, TracedPass, buffers, running
from .families import registered
from .geometry import Geometry
from .layers import Layer

EXAMPLE_LENGTH = 5


class Traceable(torch.nn.Module):
    """input_ids [B, T], past_length [B], caches 2 * [B, H, S, D] a layer -> logits, caches."""

    def __init__(
        self, model: torch.nn.Module, context_length: int, ops: str, layers: list[Layer]
    ) -> None:
        super().__init__()
        self.model = model
        self.last = context_length - 1
        self.ops, self.layers = ops, layers

    def forward(
        self, input_ids: torch.Tensor, past_length: torch.Tensor, caches: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        offsets = torch.cumsum(input_ids * 0 + 1, 1) - 1  # a Range node would run on the CPU
        cache = buffers(caches)
        layers = [] if self.ops == "none" else self.layers
        with running(TracedPass(self.ops, past_length, offsets, caches[0].shape[2], layers)) as now:
            output = self.model(
                input_ids=input_ids,
                # Rows that pad a pass may lie beyond the last position; Gather refuses those.
                position_ids=torch.clamp(now.positions, max=self.last),
                past_key_values=cache,
                use_cache=True,
            )
        self.layers = now.layers
        return output.logits.float(), *(t for x in cache.layers for t in (x.keys, x.values))


def observe(model: torch.nn.Module, geometry: Geometry) -> list[Layer]:
    """What each attention call of the model does, in their order."""
    whole = Traceable(model, geometry.context_length, "none", [])
    what = f"{model.config.model_type} models cannot be run for tracing"
    with private.tried(ExportError, what), quiet(), registered(model):
        whole(*example(geometry, next(model.parameters()).device))
    if len(whole.layers) < len(geometry.layers):
        raise ExportError(
            f"{len(whole.layers)} of its {len(geometry.layers)} layers attend through "
            f"transformers' interface ({private.versions()})"
        )
    return whole.layers


def trace(
    model: torch.nn.Module,
    geometry: Geometry,
    ops: str,
    layers: list[Layer],
    change: Callable[[ir.Graph], None] = lambda graph: None,
) -> ir.Model:
    """The model as a graph with T symbolic; its initializers still share the model's memory.

    Of torch 2.13: `dynamo` is its newer exporter, which optimises the graph with onnxscript;
    `change` is made to the graph before that.
    """
    with quiet(), registered(model):
        program = translated(Traceable(model, geometry.context_length, ops, layers), geometry)
    change(program.model.graph)
    program.optimize()
    return program.model


def translated(whole: Traceable, geometry: Geometry) -> torch.onnx.ONNXProgram:
    """What PyTorch makes of a model, before any optimizer has seen it."""
    names = geometry.cache_names()
    program = torch.onnx.export(
        whole,
        example(geometry, torch.device("cpu")),
        input_names=["input_ids", "past_length", *names],
        output_names=["logits", *(n.replace("past_key_values", "present") for n in names)],
        dynamic_shapes=({1: torch.export.Dim("T", min=1)}, None, [None] * len(names)),
        dynamo=True,
        opset_version=OPSET,
        verbose=False,
        optimize=False,
    )
    assert program is not None
    return program


def example(
    geometry: Geometry, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Arguments of a pass with an empty cache: ids, past_length and caches."""
    return (
        torch.zeros(1, EXAMPLE_LENGTH, dtype=torch.long, device=device),
        torch.zeros(1, dtype=torch.long, device=device),
        [torch.zeros(shape, device=device) for shape in geometry.cache_shapes()],
    )


@contextlib.contextmanager
def refusal(model: Any) -> Iterator[None]:
    """Say in one line why a model, or a checkpoint, with such a config cannot be exported."""
    try:
        yield
    except (SpecEdgeError, OSError):
        raise
    except Exception as error:
        causes: list[BaseException] = [error]
        while (cause := causes[-1].__cause__ or causes[-1].__context__) and cause not in causes:
            causes.append(cause)
        if ours := next((c for c in causes if isinstance(c, ExportError)), None):
            raise ours from None
        raise ExportError(
            f"{model.config.model_type} models cannot be exported ({private.trouble(causes[-1])})"
        ) from error
