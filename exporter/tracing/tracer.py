"""Tracing of a Hugging Face decoder to a graph over fixed KV-cache buffers.

B sequences, T new tokens, S rows of cache, H heads of D, V vocabulary entries.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
import onnxscript.optimizer
import torch
import torch.onnx.ops

from specedge.errors import ExportError, SpecEdgeError

from .. import internals
from ..checkpoint.decoder_layers import layer_list, truncate
from ..checkpoint.draft_heads import DraftHeadConfig
from ..checkpoint.encoder_decoder import as_decoder
from ..checkpoint.placeholders import WeightSources
from ..libraries import quiet
from . import experts, geometry
from .attention import OPSET, LayerAttention, TracedPass, active_pass, buffer_cache
from .families import registered_functions
from .geometry import Geometry
from .hidden_states import HIDDEN_STATES, HiddenStateRecorder, join_hidden_states
from .named_weights import (
    StoredMatrix,
    hide_weights,
    named_weights,
    reads_stored_matrix,
    restore_weights,
)
from .repeated_layers import (
    LayerCalls,
    LayerGraph,
    NotRepeatableError,
    check_constants,
    find_kinds,
    marked_layers,
)

EXAMPLE_LENGTH = 5


class TraceableModel(torch.nn.Module):
    """Model with explicit caches.

    input_ids [B, T], past_length [B], caches 2 * [B, H, S, D] per layer -> logits, caches

    Hidden states of `hidden_layers`, [B, T, F] each, follow the logits.

    Those of an encoder-decoder read the first `source_length` [B] rows of constants [B, H, E, D].
    Drafts that read their target's hidden states have them as `hidden`, [B, T, H].
    """

    def __init__(
        self,
        model: torch.nn.Module,
        context_length: int,
        ops: str,
        layers: Sequence[LayerAttention],
        marked: bool = False,
        hidden_layers: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.model = model
        self.last = context_length - 1
        self.ops, self.layers = ops, layers
        self.marked = marked
        self.hidden_layers = tuple(hidden_layers)

    def forward(
        self,
        input_ids: torch.Tensor,
        past_length: torch.Tensor,
        caches: list[torch.Tensor],
        source_length: torch.Tensor | None = None,
        constants: Sequence[torch.Tensor] = (),
        hidden: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        offsets = torch.cumsum(input_ids * 0 + 1, 1) - 1  # a Range node would run on the CPU
        cache = buffer_cache(caches)
        layers = () if self.ops == "none" else self.layers
        now = TracedPass(self.ops, past_length, offsets, caches[0].shape[2], [*layers])
        now.source_length, now.constants = source_length, constants
        options: dict[str, Any] = {"constants": constants} if constants else {}
        if hidden is not None:
            options["hidden"] = hidden
        marked = layer_list(self.model)[1] if self.marked else ()
        recorder = HiddenStateRecorder(self.model, self.hidden_layers)
        with active_pass(now), marked_layers(marked), recorder.recorded():
            output = self.model(
                input_ids=input_ids,
                # Padding rows may lie beyond the last position, which Gather rejects.
                position_ids=torch.clamp(now.positions, max=self.last),
                use_cache=True,
                **{internals.cache_name(self.model): cache},
                **options,
            )
        self.layers = now.layers
        caches = [t for x in cache.layers for t in (x.keys, x.values)]
        return output.logits.float(), *(x.float() for x in recorder.take()), *caches


@dataclass(frozen=True)
class ObservedLayers:
    """Attention calls of a model in order, and the first layer of the kind of each layer.

    `kinds` is empty if layers cannot be separated.
    """

    attention: list[LayerAttention]
    kinds: tuple[int, ...]

    @property
    def num_traced(self) -> int:
        """Number of first layers that include all kinds."""
        return max(self.kinds, default=-1) + 1

    @property
    def num_representative(self) -> int:
        """Number of first layers whose graph has the nodes of all others between two attentions.

        Nodes after an attention node belong to its layer and the next one. Those of the first three
        read values that do not depend on a layer, and those of the last two are unused without
        logits, so layers in between have to include all kinds of neighbors.
        """
        kinds = self.kinds
        needed = {*itertools.pairwise(kinds[2:])}
        for count in range(5, len(kinds)):
            middle = {*itertools.pairwise(kinds[2 : count - 1])}
            if middle >= needed and kinds[count - 2 : count] == kinds[-2:]:
                return count
        return len(kinds)


@dataclass(frozen=True)
class TracedModel:
    """Graph of a model, and of its first `num_representative` layers if it has more."""

    model: ir.Model
    first: ir.Model | None = None


def observe(model: torch.nn.Module, geometry: Geometry) -> ObservedLayers:
    """Observe each attention call and each layer of the model. Raises ExportError."""
    whole = TraceableModel(model, geometry.context_length, "none", [])
    context = f"{model.config.model_type} models cannot be run for tracing"
    calls = LayerCalls(model)
    with (
        internals.translate_internal_errors(ExportError, context),
        quiet(),
        registered_functions(model),
        calls.recorded(),
    ):
        whole(*example_inputs(geometry, next(model.parameters()).device))
        kinds = find_kinds(model, calls, whole.layers)
    if len(whole.layers) < len(geometry.layers):
        raise ExportError(
            f"{len(whole.layers)} of its {len(geometry.layers)} layers use transformers' "
            f"attention interface ({internals.describe_versions()})"
        )
    return ObservedLayers([*whole.layers], kinds if len(kinds) == len(geometry.layers) else ())


def trace(
    model: torch.nn.Module,
    geometry: Geometry,
    ops: str,
    layers: ObservedLayers,
    sources: WeightSources | None = None,
) -> TracedModel:
    """Trace the model as a graph with T symbolic, whose initializers share the model's memory.

    Uses torch 2.13's `dynamo` exporter, and optimizes the graph with onnxscript. `sources` have the
    values of placeholders.
    """
    sources = sources or WeightSources()
    with quiet(), registered_functions(model, sources), internals.reuse_operator_registry():
        weights = named_weights(model, sources)
        if layers.num_traced < len(layers.kinds):
            # Errors that have another cause are raised again by the trace of the whole model.
            with contextlib.suppress(Exception):
                return _trace_first_layers(model, geometry, ops, layers, weights)
        whole = TraceableModel(
            model, geometry.context_length, ops, layers.attention,
            hidden_layers=geometry.hidden_layers,
        )  # fmt: skip
        traced = optimize(translate(whole, geometry), model, sources)
        if count := len(geometry.hidden_layers):
            join_hidden_states(traced.graph, traced.graph.outputs[1 : 1 + count], count)
        return TracedModel(traced)


def optimize(
    program: torch.onnx.ONNXProgram, model: torch.nn.Module, sources: WeightSources
) -> ir.Model:
    """Optimize a traced model; matrices of the checkpoint are those of `sources`, unread."""
    weights, graph = named_weights(model, sources), program.model.graph
    hide_weights(graph, lambda name: isinstance(weights.get(name), StoredMatrix))
    with quiet(), np.errstate(divide="ignore", invalid="ignore"):
        program.optimize()
    restore_weights(graph, weights)
    return program.model


def _trace_first_layers(
    model: torch.nn.Module,
    geometry: Geometry,
    ops: str,
    layers: ObservedLayers,
    weights: Mapping[str, ir.Tensor],
) -> TracedModel:
    """Trace the first layers of each kind, and repeat them. Raises NotRepeatableError."""
    name, all_layers = layer_list(model)
    prefix = f"model.{name}"
    for layer, kind in zip(all_layers, layers.kinds, strict=True):  # whose modules are patched now
        if [*map(type, layer.modules())] != [*map(type, all_layers[kind].modules())]:
            raise NotRepeatableError("modules of equal layers are replaced by different ones")
    traced = geometry.first_layers(layers.num_traced)
    restore = truncate(model, layers.num_traced)
    try:
        attention = layers.attention[: layers.num_traced]
        normalized = (layers.num_traced + 1,) if geometry.hidden else ()
        whole = TraceableModel(
            model, geometry.context_length, ops, attention, marked=True, hidden_layers=normalized
        )
        program = translate(whole, traced)
    finally:
        restore()
    check_constants(program.model.graph, prefix, weights)
    hide_weights(
        program.model.graph,
        lambda name: (
            name in weights
            and (name.startswith(f"{prefix}.") or isinstance(weights[name], StoredMatrix))
        ),
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        program.optimize()

    def repeat(graph_model: ir.Model, num_layers: int) -> ir.Model:
        hidden_layers = geometry.first_layers(num_layers).hidden_layers
        LayerGraph(graph_model, prefix, weights).repeat(layers.kinds[:num_layers], hidden_layers)
        onnxscript.optimizer.fold_constants(
            graph_model,
            onnx_shape_inference=False,
            should_fold=lambda node: False if reads_stored_matrix(node) else None,
        )
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(graph_model)
        # Equal weights stay separate, so that layers differ in nothing but their weights.
        hide_weights(graph_model.graph, weights.__contains__)
        passes.DeduplicateInitializersPass()(graph_model)
        passes.CommonSubexpressionEliminationPass()(graph_model)
        restore_weights(graph_model.graph, weights)
        return graph_model

    num_first, num_layers = layers.num_representative, len(layers.kinds)
    first = repeat(_clone(program.model), num_first) if num_first < num_layers else None
    return TracedModel(repeat(program.model, num_layers), first)


def _clone(model: ir.Model) -> ir.Model:
    """Return a clone whose values have types of their own: onnx-ir's are changed in place."""
    clone = model.clone()
    graph = clone.graph
    outputs = (x for node in graph for x in node.outputs)
    for value in (*graph.inputs, *graph.initializers.values(), *outputs):
        value.type = copy.copy(value.type)
    return clone


def translate(whole: TraceableModel, geometry: Geometry) -> torch.onnx.ONNXProgram:
    """Translate a model with explicit caches."""
    names, constants = geometry.cache_names(), geometry.constant_names()
    inputs = example_inputs(geometry, torch.device("cpu"))
    length = torch.export.Dim("T", min=1)
    more_names = [*(["source_length", *constants] if constants else ())]
    more_shapes: list[Any] = [None, [None] * len(constants)]
    if geometry.reads_hidden:
        more_names.append(HIDDEN_STATES)
        more_shapes.append({1: length})
    return export_program(
        whole,
        inputs,
        ["input_ids", "past_length", *names, *more_names],
        [
            *("logits", *(f"{HIDDEN_STATES}.{i}" for i in range(len(whole.hidden_layers)))),
            *(n.replace("past_key_values", "present") for n in names),
        ],
        ({1: length}, None, [None] * len(names), *more_shapes)[: len(inputs)],
    )


def export_program(
    module: torch.nn.Module,
    inputs: tuple[Any, ...],
    input_names: Sequence[str],
    output_names: Sequence[str],
    dynamic_shapes: tuple[Any, ...],
) -> torch.onnx.ONNXProgram:
    """Translate a module with PyTorch's exporter, before any optimization."""
    program = torch.onnx.export(
        module,
        inputs,
        input_names=input_names,
        output_names=output_names,
        dynamic_shapes=dynamic_shapes,
        dynamo=True,
        opset_version=OPSET,
        verbose=False,
        optimize=False,
    )
    assert program is not None
    return program


def example_inputs(geometry: Geometry, device: torch.device) -> tuple[Any, ...]:
    """Return the inputs of a pass with an empty cache: ids, past length and caches.

    Those of an encoder-decoder are followed by a source's length and constants, those of a draft
    that reads hidden states by no length, no constants and the hidden states.
    """
    inputs: tuple[Any, ...] = (
        torch.zeros(1, EXAMPLE_LENGTH, dtype=torch.long, device=device),
        torch.zeros(1, dtype=torch.long, device=device),
        [_zeros(shape, device) for shape in geometry.cache_shapes()],
    )
    if geometry.reads_hidden:
        hidden = geometry.hidden
        assert hidden is not None
        assert hidden.draft_size is not None
        return *inputs, None, [], _zeros((1, EXAMPLE_LENGTH, hidden.draft_size), device)
    if not geometry.constants:
        return inputs
    length = torch.ones(1, dtype=torch.long, device=device)
    return *inputs, length, [_zeros(shape, device) for shape in geometry.constant_shapes()]


def _zeros(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return zeros in float32, on the CPU without memory: unlike PyTorch, NumPy writes no pages."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, np.float32))
    return torch.zeros(shape, device=device)


@contextlib.contextmanager
def explain_refusal(model: Any) -> Iterator[None]:
    """Translate unexpected errors to an ExportError with a one-line message.

    `model` is a model or a checkpoint, whose config names the model type.
    """
    try:
        yield
    except (SpecEdgeError, OSError):
        raise
    except Exception as error:
        causes: list[BaseException] = [error]
        while (cause := causes[-1].__cause__ or causes[-1].__context__) and cause not in causes:
            causes.append(cause)
        if export_error := next((c for c in causes if isinstance(c, ExportError)), None):
            raise export_error from None
        raise ExportError(
            f"{model.config.model_type} models cannot be exported "
            f"({internals.describe_error(causes[-1])})"
        ) from error


def check_config(config: Any, context_length: int, num_draft_tokens: int, ops: str) -> None:
    """Reject a decoder that cannot be exported, or not in this graph variant. Raises ExportError.

    A model that does not run on the meta device is checked later, with its weights, unless it has
    experts that bypass transformers' interface.
    """
    num_layers = getattr(config, "num_hidden_layers", None)
    if isinstance(num_layers, int) and num_layers < 1:
        raise ExportError(f"its config.json says {num_layers} layers")
    try:
        layers = observe_config(config, context_length, num_draft_tokens)
    except ExportError as error:
        if not internals.is_meta_error(error.__cause__):
            raise
        model = meta_model(config)
        if any(p.ndim == 3 for p in model.parameters()) and not experts.find_experts(model):
            raise ExportError(
                "its experts do not use transformers' interface, and gather rows "
                "in an unsupported way"
            ) from error
        return
    reasons = filter(None, (layer.gqa_obstacle() for layer in layers.attention))
    if ops == "gqa" and (reason := next(reasons, None)):
        raise ExportError(f"{reason}; it cannot be exported in gqa")


def observe_config(config: Any, context_length: int, num_draft_tokens: int) -> ObservedLayers:
    """Observe each layer of a model with this config."""
    model = meta_model(config)
    return observe(model, geometry.measure_geometry(model, context_length, num_draft_tokens))


def meta_model(config: Any) -> Any:
    """Build the decoder of a config on the meta device. Raises ExportError."""
    context = f"transformers cannot build a {config.model_type} model of its config"
    with internals.translate_internal_errors(ExportError, context):
        if isinstance(config, DraftHeadConfig):
            model = config.build()
        else:
            model = as_decoder(internals.build_decoder(config))
    for module, layer_type in list(internals.dynamic_rotary_modules(model)):
        internals.freeze_frequencies(module, layer_type)
    return model
