"""Estimates from the config alone: an export's time, and the costs of mixtures of experts.

Of mixtures of experts only matrices are counted, in float32. H: hidden size; E: experts of
intermediate size I, of which each token uses k.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specedge.bundle.graph_variants import OPS
from specedge.bundle.manifest import chunk_length, has_mixed_shapes
from specedge.bundle.precision import KEEP, QUANTIZED_DTYPES
from specedge.errors import ExportError

from . import internals
from .checkpoint.checkpoints import Checkpoint
from .checkpoint.draft_heads import DraftHeadConfig
from .graph.graphs import GraphFile, graph_files
from .libraries import quiet
from .mapped_memory import system_memory
from .progress import Progress
from .request import ExportRequest
from .tracing import geometry, tracer
from .tracing.experts import ExpertsModule, find_experts
from .tracing.families import count_experts
from .tracing.geometry import Geometry

_FLOAT, _DOUBLE = 4, 8  # bytes
_PROCESS = 500_000_000  # resident bytes of Python and its libraries (measured: 0.44 GB)


# Seconds of a model's steps on two cores, and seconds per billion parameters, in order
# (tools/measure_export.py --steps).
_FLOAT_STEPS = {
    "Loading the {role}": (1.0, 2.0),
    "Tracing the {role}": (3.0, 8.0),
    "Writing the {role}": (1.0, 17.0),
    "Running the {role} in PyTorch": (4.0, 13.0),
    "Comparing the {role} with PyTorch": (3.0, 20.0),
}
_QUANTIZED_STEPS = {
    "Rotating the {role}": (2.0, 40.0),
    "Calibrating the {role}": (5.0, 90.0),
    "Quantizing the {role}": (2.0, 10.0),
    "Comparing the {role} in {precision}": (5.0, 40.0),
}
_KEPT_STEPS = {
    "Quantizing the {role}": (1.5, 4.0),
    "Comparing the {role} in {precision}": (5.0, 40.0),
}
_HEAD_SECONDS = 1.0
# Steps of the target whose work measuring the hidden states that a draft head may read repeats
_CONVENTIONS_STEPS = ("Loading the {role}", "Running the {role} in PyTorch")
# Per billion parameters of the target, whose hidden states a draft head reads
_OBSERVATION_STEPS = {"Running the target over the draft's texts": (1.0, 30.0)}
_ACCEPTANCE_SECONDS = 15.0
_FINAL_STEPS = {
    "Writing the target's batched graphs": 1.0,
    "Writing the draft's batched graphs": 1.0,
    "Writing graphs for GPUs": 1.0,
    "Hashing": 0.5,
}


@dataclass(frozen=True)
class ExpertDimensions:
    """Experts of one layer.

    `fused` are the graph variants that compute them by a MoE node; `as_stored` is True if every
    graph reads them in their stored layout.
    """

    number: int  # E
    chosen: int  # k
    inner_size: int  # I
    num_matrices: int  # gate and up projections: 2, or 1
    row_size: int  # H
    fused: tuple[str, ...]
    as_stored: bool = False

    @property
    def size(self) -> int:
        """Number of weights in its matrices."""
        return self.number * (self.num_matrices + 1) * self.inner_size * self.row_size

    def read(self, ops: str) -> int:
        """Return the number of weights that a single-token pass reads."""
        return self.size * self.chosen // self.number if ops in self.fused else self.size

    def num_multiplied(self, ops: str) -> int:
        """Return the number of weights multiplied per token; MoE nodes process each row twice."""
        return 2 * self.read(ops) if ops in self.fused else self.size

    def num_activations(self, length: int, ops: str) -> int:
        """Return the peak number of activations inside the layer in a pass of `length` tokens."""
        if ops in self.fused:  # at worst all rows use one expert
            return 2 * length * (4 * self.row_size + (self.num_matrices + 1) * self.inner_size)
        return 2 * length * self.number * self.num_matrices * self.inner_size

    def num_copied(self, ops: str) -> int:
        """Return the number of weights that are copied while a graph is loaded."""
        if ops in self.fused or self.as_stored:
            return 0
        return 2 * self.number * self.inner_size * self.row_size


@dataclass(frozen=True)
class CostEstimate:
    """Cost of a model, in bytes and in floating-point operations."""

    shape: Geometry
    expert_layers: list[ExpertDimensions]
    num_parameters: int
    num_looked_up: int  # weights of the embedding; 0 if it is tied to the LM head
    num_heads: int

    @property
    def weights(self) -> int:
        """Bytes of the weights."""
        return _FLOAT * self.num_parameters

    @property
    def export_memory(self) -> int:
        """Peak memory of an export in bytes: one layer's experts in float64 and in float32."""
        return (_DOUBLE + _FLOAT) * max(m.size for m in self.expert_layers) + _PROCESS

    def read(self, ops: str) -> int:
        """Return the bytes of weights that a single-token pass reads."""
        return _FLOAT * (self._shared + sum(m.read(ops) for m in self.expert_layers))

    def operations(self, ops: str) -> int:
        """Return the floating-point operations of matrix products per token."""
        return 2 * (self._shared + sum(m.num_multiplied(ops) for m in self.expert_layers))

    def peak(self, graph: GraphFile, ops: str) -> int:
        """Return a graph's peak memory in bytes: the larger of loading and running."""
        copies = sum(m.num_copied(ops) for m in self.expert_layers)
        return self.weights + _FLOAT * max(copies, self._caches + self._num_activations(graph, ops))

    def supports(self, ops: str) -> bool:
        """Return True if cache sizes allow a graph variant; single layers may still exclude it."""
        return ops == "onnx" or not has_mixed_shapes(self.shape.layers)

    @property
    def _shared(self) -> int:
        """Number of weights outside the experts that are multiplied with every token."""
        return self.num_parameters - self.num_looked_up - sum(m.size for m in self.expert_layers)

    @property
    def _caches(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shape.cache_shapes())

    def _num_activations(self, graph: GraphFile, ops: str) -> int:
        """Return the peak number of activations in a pass."""
        rows = graph.length or chunk_length(self.shape.capacity)  # of the runtime's prefill
        logits = rows * self.shape.padded_vocab_size if graph.logits and graph.length else 0
        scores = (rows + 1) * self.num_heads * self.shape.capacity
        return max(logits, scores, *(m.num_activations(rows, ops) for m in self.expert_layers))


def predict_seconds(checkpoints: Sequence[Checkpoint], request: ExportRequest) -> dict[str, float]:
    """Predict the seconds of an export's steps on two cores, in order.

    Downloads, additional graph variants and the steps of a self-draft are not included.

    Args:
        checkpoints: Checkpoints with separate weights.
        request: The export, with its precisions.
    """
    billions = {checkpoint.role: _count_billions(checkpoint) for checkpoint in checkpoints}
    head = checkpoints[-1].config
    is_head = isinstance(head, DraftHeadConfig)
    seconds: dict[str, float] = {}
    if is_head:
        is_measured = len(head.conventions) > 1
        repeated = [_FLOAT_STEPS[step] for step in _CONVENTIONS_STEPS if is_measured]
        seconds["Checking the draft's weights"] = _HEAD_SECONDS + sum(
            fixed + rate * billions["target"] for fixed, rate in repeated
        )
    for role, num_billions in billions.items():
        precision = request.precision_of(role)
        steps = [(step, num_billions) for step in _FLOAT_STEPS.items()]
        if precision in QUANTIZED_DTYPES:
            if is_head and role == "draft":
                steps += [(step, billions["target"]) for step in _OBSERVATION_STEPS.items()]
            quantized_steps = _KEPT_STEPS if precision == KEEP else _QUANTIZED_STEPS
            steps += [(step, num_billions) for step in quantized_steps.items()]
        for (name, (fixed, rate)), size in steps:
            seconds[name.format(role=role, precision=precision)] = fixed + rate * size
    if request.draft_name is not None:
        seconds["Measuring the draft's acceptance rate"] = _ACCEPTANCE_SECONDS
    return seconds | _FINAL_STEPS


def _count_billions(checkpoint: Checkpoint) -> float:
    """Return the billions of parameters of a model, 0 if it cannot be built."""
    with contextlib.suppress(ExportError):  # loading the model reports the error
        return sum(p.numel() for p in tracer.meta_model(checkpoint.config).parameters()) / 1e9
    return 0.0


def check_costs(
    checkpoint: Checkpoint, context_length: int, num_draft_tokens: int, ops: str, progress: Progress
) -> None:
    """Report the cost of a mixture-of-experts model.

    Only the export must fit into this machine: a bundle may run on another one.

    Raises:
        ExportError: This machine has too little memory for the export.
    """
    with tracer.explain_refusal(checkpoint):
        estimate = estimate_costs(checkpoint.config, context_length, num_draft_tokens)
    if estimate is None:
        return
    graphs = graph_files(num_draft_tokens, context_length)
    names = [name for name in OPS if ops in (name, "auto", "all") and estimate.supports(name)]
    variants = names[-1:] if ops == "auto" else names
    if estimate.export_memory > (available := system_memory().total):
        raise ExportError(
            f"{checkpoint.role} {checkpoint.name} has {estimate.num_parameters / 1e9:.1f} billion "
            f"parameters; verifying one layer's experts takes "
            f"{_format_gigabytes(estimate.export_memory)} of memory, and this machine has "
            f"{_format_gigabytes(available)}; specify a smaller model, or export on a larger "
            "machine"
        )
    costs = (describe_costs(estimate, variant, graphs) for variant in variants)
    layer = estimate.expert_layers[0]
    progress.note(
        f"{checkpoint.role}: {layer.chosen} of {layer.number} experts per token, "
        f"{_format_gigabytes(estimate.weights)} of weights in float32, exported in "
        f"{_format_gigabytes(estimate.export_memory)} of memory; {'; '.join(costs)}"
    )


def describe_costs(estimate: CostEstimate, ops: str, graphs: list[GraphFile]) -> str:
    """Describe a graph variant's cost per token and the peak memory of its graphs."""
    peaks: dict[str, list[str]] = defaultdict(list)
    for graph in graphs:
        peaks[_format_gigabytes(estimate.peak(graph, ops))].append(graph.name)
    peak_memory = " and ".join(f"{size} for {', '.join(names)}" for size, names in peaks.items())
    return (
        f"{ops} reads {_format_gigabytes(estimate.read(ops))} and computes "
        f"{estimate.operations(ops) / 1e9:.3g} GFLOP per token, in memory of {peak_memory}"
    )


def estimate_costs(config: Any, context_length: int, num_draft_tokens: int) -> CostEstimate | None:
    """Estimate the cost of a model from its config; None for a dense model."""
    try:
        model = tracer.meta_model(config)
    except ExportError:  # loading the model reports the error
        return None
    llama4_modules = [
        module for module in model.modules() if type(module).__name__ == "Llama4TextMoe"
    ]
    if not llama4_modules and not find_experts(model):
        return None
    with torch.no_grad(), quiet(), count_experts(model) as chosen:
        model(input_ids=torch.zeros(1, 2, dtype=torch.long, device="meta"), use_cache=True)
    shape = geometry.measure_geometry(model, context_length, num_draft_tokens)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    return CostEstimate(
        shape=shape,
        expert_layers=[
            *map(_llama4_experts, llama4_modules),
            *(_expert_layer(module, k) for module, k in chosen.items()),
        ],
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_looked_up=0 if table.weight is head.weight else table.weight.numel(),
        num_heads=internals.decoder_text_config(config).num_attention_heads,
    )


def _llama4_experts(module: Any) -> ExpertDimensions:
    """Return Llama 4's experts, which bypass transformers' interface."""
    number, row_size, width = module.experts.gate_up_proj.shape
    return ExpertDimensions(number, module.top_k, width // 2, 2, row_size, (), as_stored=True)


def _expert_layer(module: torch.nn.Module, chosen: int) -> ExpertDimensions:
    experts = ExpertsModule(module)
    number, inner_size, num_matrices, row_size = experts.matrices()[0].shape
    fused = () if experts.swiglu() is None else ("gqa",)
    return ExpertDimensions(number, chosen, inner_size, num_matrices, row_size, fused)


def _format_gigabytes(size: int) -> str:
    return f"{size / 1e9:.4g} GB"
