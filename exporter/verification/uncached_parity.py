"""Verification of graphs without caches against PyTorch.

B sequences of a batch; N tokens of a source, F channels of the target's hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from ..checkpoint.draft_heads import DraftHeadModule
from ..checkpoint.encoder_decoder import SourceConditionedDecoder
from ..checkpoint.placeholders import WeightSources
from ..tracing.geometry import Geometry
from ..tracing.uncached_graphs import UncachedGraph, uncached_graphs_of
from .exact_graph import ExactGraph
from .exact_model import ROUNDINGS, eager_passes
from .fused_states import random_states
from .row_errors import STRUCTURE, ErrorCheck, float32_error_bounds, row_errors
from .source_states import NUM_TOKENS, random_source
from .subgraph import Values, open_session

NUM_COMPARED = 32  # rows of `fuse` that are compared


def verify_uncached(
    role: str,
    model: torch.nn.Module,
    sources: WeightSources,
    geometry: Geometry,
    num_tokens: int,
    paths: Mapping[str, Path],
    tolerance: float | None = None,
) -> None:
    """Compare outputs of the graphs without caches with PyTorch, in float64 and in float32.

    The longest source of an encoder is compared in float32 only.

    Args:
        role: "target" or "draft".
        model: Model, whose large matrices may be placeholders.
        sources: Their values.
        geometry: Sizes of the model.
        num_tokens: Number of token ids to sample from.
        paths: Files of the graphs by name; without an encoder the model reads another's.
        tolerance: Maximum float32 error relative to the largest value of an output, if any.

    Raises:
        ParityError: A graph differs from the model.
    """
    graphs = uncached_graphs_of(model, geometry)
    exact_graphs = {name: ExactGraph(path) for name, path in paths.items()}
    sessions = {name: open_session(path) for name, path in paths.items()}
    structure = ErrorCheck(role, "the PyTorch model's, both in float64,", multiple=STRUCTURE)
    float32 = ErrorCheck(role, "PyTorch's", tolerance)

    def run_exact(graph: UncachedGraph, value: np.ndarray) -> Values:
        return dict(exact_graphs[graph.name].run(lambda name: value))

    def run_float32(graph: UncachedGraph, value: np.ndarray) -> Values:
        if value.dtype == np.float64:
            value = value.astype(np.float32)
        results = sessions[graph.name].run(graph.outputs, {graph.input_name: value})
        return dict(zip(graph.outputs, results, strict=True))

    def compare(
        check: ErrorCheck,
        run: Callable[[UncachedGraph, np.ndarray], Values],
        value: np.ndarray,
        expected: Values,
        bounds: Values,
    ) -> None:
        for graph in graphs:
            if graph.name in paths:
                outputs = run(graph, value)
                for name in graph.outputs:
                    rows = outputs[name][0][..., : expected[name].shape[-2], :]
                    check.compare(name, name, rows, expected[name], bounds[name])
            else:
                outputs = {name: expected[name][None] for name in graph.outputs}
            value = outputs[graph.outputs[0]]

    for value, is_exact in _inputs(model, geometry, num_tokens):
        repeated = value.expand(ROUNDINGS, *value.shape[1:])
        rounded = _run(model, sources, graphs, repeated, exact=False)
        if value.is_floating_point():
            value = value.double()
        results = _run(model, sources, graphs, value, exact=True) if is_exact else rounded
        expected = {name: values[0].astype(np.float64) for name, values in results.items()}
        bounds = {
            name: float32_error_bounds(row_errors(rounded[name], values).max(0), values)
            for name, values in expected.items()
        }
        if is_exact:
            compare(structure, run_exact, value.numpy(), expected, bounds)
        compare(float32, run_float32, value.numpy(), expected, bounds)


def _inputs(
    model: torch.nn.Module, geometry: Geometry, num_tokens: int
) -> Iterator[tuple[torch.Tensor, bool]]:
    """Yield inputs of the first graph, and True if they are compared in float64.

    [1, T, F], [1, N] or [1, M, frames]
    """
    if isinstance(model, DraftHeadModule):
        yield torch.from_numpy(random_states(model.hidden, NUM_COMPARED)), True
    elif isinstance(model, SourceConditionedDecoder):
        entry = geometry.encoder
        assert entry is not None
        lengths = dict.fromkeys((1, min(NUM_TOKENS, entry.max_length), entry.max_length))
        if entry.num_mel_bins is not None:
            lengths = {entry.max_length: None}
        for seed, length in enumerate(lengths):
            is_exact = length <= NUM_TOKENS or entry.num_mel_bins is not None
            yield random_source(model, length, num_tokens, seed), is_exact


def _run(
    model: torch.nn.Module,
    sources: WeightSources,
    graphs: Sequence[UncachedGraph],
    value: torch.Tensor,
    exact: bool,
) -> Values:
    """Run PyTorch, exactly or with random rounding, and return outputs without rows of zeros.

    [B, T, F] -> [B, T, H]; [B, N] or [B, M, frames] -> [B, N, F] and [B, H, N, D] each
    """
    results: dict[str, torch.Tensor] = {}
    with eager_passes(model, sources, exact):
        for graph in graphs:
            results |= zip(graph.outputs, outputs := graph.function(value), strict=True)
            value = outputs[0]
    num_rows = results[graphs[0].outputs[0]].shape[1]
    return {name: tensor[..., :num_rows, :].numpy() for name, tensor in results.items()}
