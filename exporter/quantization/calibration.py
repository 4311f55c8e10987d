"""Statistics of the inputs of matrices, collected while a float graph processes texts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes
import torch

from specedge.bundle.manifest import FUSE, OPEN

from ..graph.graphs import GraphFile
from ..tracing.hidden_states import HIDDEN_STATES
from ..verification.runner import Action, FillNoise, PassAction
from ..verification.subgraph import Values, open_session, unpacked_options
from .experts import ExcludedWeights, expert_layers
from .float_model import FloatModel
from .matrices import MatrixGroup, matrix_groups

NUM_SAMPLE_ROWS = 48  # rows of the texts used to measure errors
_NUM_STRIPS, _MIN_STRIP = 8, 256  # strips of a Hessian, and their minimum width
_FILE = GraphFile("calibration", None)  # the decoder without the LM head


@dataclass(frozen=True)
class InputStatistics:
    """Statistics of a group's input.

    Attributes:
        maximum: Largest absolute value by channel, [K].
        mean_square: Mean square by channel, [K].
        rows: Sample of rows, [n, K].
        hessian: Upper triangle of x^T x of all rows, the Hessian of the products' squared errors,
            [K, K]. Some elements below the diagonal are missing.
    """

    maximum: np.ndarray
    mean_square: np.ndarray
    rows: np.ndarray
    hessian: torch.Tensor | None = None

    @classmethod
    def from_values(cls, x: np.ndarray, num_rows: int = NUM_SAMPLE_ROWS) -> InputStatistics:
        """Compute statistics of the values of one pass, [T, K]."""
        return cls(np.abs(x).max(0), np.square(x).mean(0), x[:: max(1, len(x) // num_rows)].copy())

    @classmethod
    def combine(cls, parts: Sequence[InputStatistics]) -> InputStatistics:
        """Combine statistics of passes with about equal numbers of tokens."""
        return cls(
            np.max([part.maximum for part in parts], axis=0),
            np.mean([part.mean_square for part in parts], axis=0),
            np.concatenate([part.rows for part in parts]),
        )


Visit = Callable[[tuple[int, ...], InputStatistics], None]


def visit_inputs(
    float_model: FloatModel,
    ops: str,
    texts: Sequence[np.ndarray],
    visit: Visit,
    excluded: ExcludedWeights,
    hessians: bool,
    keys_to_visit: Container[tuple[int, ...]],
    first_actions: Sequence[Action],
) -> list[Any]:
    """Run a graph over independent texts, [T] each, and visit the statistics of each group's input.

    Groups are visited as soon as their subgraph of a large model has run, so that only its Hessians
    are in memory. Expert layers are visited as well; groups that read a cache are not.

    Args:
        float_model: The model.
        ops: Graph variant.
        texts: Tokens, [T] each.
        visit: Called with the key and the statistics of each group.
        excluded: Weights that are in no group.
        hessians: Compute Hessians.
        keys_to_visit: Keys of the groups to visit.
        first_actions: Actions of the decoder that run before the texts.

    Returns:
        The results of the first actions.
    """
    model = float_model.load(ops, excluded)
    keys: defaultdict[str | None, list[tuple[int, ...]]] = defaultdict(list)
    all_groups = matrix_groups(model.graph, excluded.offsets)
    with_hessian = {group.key for group in all_groups if hessians}
    readers = {group.key: group.value for group in all_groups}
    readers |= {layer.experts.key: layer.x for layer in expert_layers(model.graph, excluded)}
    for key, value in readers.items():
        if key not in keys_to_visit:
            continue
        keys[value.name].append(key)
        value.dtype = ir.DataType.FLOAT
        if not value.is_graph_output():
            model.graph.outputs.append(value)
    model.graph.outputs.remove(next(v for v in model.graph.outputs if v.name == "logits"))
    passes.RemoveUnusedNodesPass()(model)  # the LM head
    path = float_model.folder / _FILE.file_name(ops)
    ir.save(model, path)
    parts: defaultdict[tuple[int, ...], list[InputStatistics]] = defaultdict(list)
    sums: dict[str, torch.Tensor] = {}
    num_rows = max(1, NUM_SAMPLE_ROWS // len(texts))

    def accumulate(values: Values) -> None:
        for name in values.keys() & keys.keys():
            x = values[name].reshape(-1, values[name].shape[-1])
            statistics = InputStatistics.from_values(x, num_rows)
            for key in keys[name]:
                parts[key].append(statistics)
            if with_hessian.intersection(keys[name]):
                if name not in sums:
                    sums[name] = torch.zeros(x.shape[1], x.shape[1])
                _add_upper_product(sums[name], torch.from_numpy(x))

    def finish_part(stages: int) -> None:
        for name, group_keys in keys.items():
            for key in group_keys:
                if key in parts:
                    hessian = sums.get(name or "") if key in with_hessian else None
                    visit(key, replace(InputStatistics.combine(parts.pop(key)), hessian=hessian))
            sums.pop(name or "", None)

    try:
        runner = float_model.decoder_runner(ops, [_FILE])
        actions = [
            PassAction(_FILE.name, text, 0, on_outputs=accumulate, source=text) for text in texts
        ]
        noise = FillNoise(0, runner.geometry.capacity)
        results = runner.run([*first_actions, noise, *actions], finish_part)
        return results[: len(first_actions)]
    finally:
        path.unlink()


def visit_other_inputs(
    float_model: FloatModel,
    texts: Sequence[np.ndarray],
    visit: Callable[[str, MatrixGroup, InputStatistics], None],
) -> None:
    """Visit the statistics of groups in the graphs without caches, without Hessians.

    Args:
        float_model: Encoder-decoder, or draft that reads hidden states.
        texts: Tokens, [T] each, whose sources are read.
        visit: Called with the name of the graph, each group and the statistics of its input.
    """
    folder = float_model.other_folder
    for file in float_model.other_files:
        model, all_feeds = float_model.load_other(file), _feeds(float_model, file.name, texts)
        num_rows = max(1, NUM_SAMPLE_ROWS // len(all_feeds))
        groups = matrix_groups(model.graph)
        values = {str(group.value.name): group.value for group in groups}
        for value in values.values():
            value.dtype = ir.DataType.FLOAT
            if not value.is_graph_output() and not value.is_graph_input():
                model.graph.outputs.append(value)
        names = [name for name, value in values.items() if value.is_graph_output()]
        path = folder / _FILE.file_name(file.name)
        ir.save(model, path)
        parts: defaultdict[str, list[InputStatistics]] = defaultdict(list)
        try:
            session = open_session(path, unpacked_options())
            for feeds in all_feeds:
                outputs = {**feeds}
                if names:  # not if all products read the input
                    outputs |= zip(names, session.run(names, feeds), strict=True)
                for name in values:
                    x = outputs[name].reshape(-1, outputs[name].shape[-1])
                    parts[name].append(InputStatistics.from_values(x, num_rows))
        finally:
            path.unlink()
        for group in groups:
            visit(file.name, group, InputStatistics.combine(parts[str(group.value.name)]))


def _feeds(
    float_model: FloatModel, graph: str, texts: Sequence[np.ndarray]
) -> list[dict[str, np.ndarray]]:
    """Return inputs of a graph without caches, for a sample of texts."""
    if graph == FUSE:
        return [{HIDDEN_STATES: float_model.sampled_states()[None]}]
    encoder = float_model.model.encoder
    if encoder is not None and encoder.reads_speech:
        texts = texts[:1]  # all have the same source
    sources = list(map(float_model.source, texts))
    if graph == OPEN:
        return [{"hidden": float_model.sources.hidden(source)} for source in sources]
    return [{"source": source[None]} for source in sources]


def _add_upper_product(total: torch.Tensor, x: torch.Tensor) -> None:
    """Add the upper triangle of x^T x in strips, which takes little more than half of the time.

    [K, K], [n, K]
    """
    width = max(_MIN_STRIP, -(-len(total) // _NUM_STRIPS))
    for start in range(0, len(total), width):
        end = start + width
        total[:end, start:end].addmm_(x[:, :end].T, x[:, start:end])
