"""Verification that a model in another basis computes the same function."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specedge.bundle.precision import FLOAT32

from ..tracing.geometry import Geometry
from ..verification.exact_graph import ExactGraph
from ..verification.row_errors import ErrorCheck, float32_error_bounds, row_errors
from ..verification.runner import Action, FillNoise, PassAction, ReadRows
from .float_model import FloatModel

NUM_TOKENS = 24


def check_equivalence(before: FloatModel, after: FloatModel) -> None:
    """Compare two models in float64, and in float32 relative to float32's own error.

    In float64 only the rounding of the changed weights remains, which reveals structural errors.

    Raises:
        ParityError: The models differ.
    """
    model = before.model
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, NUM_TOKENS)
    tokens = tokens[: model.context_length]
    ops, geometry = before.ops[0], before.geometry
    exact = _float64_outputs(before.decoder(ops), geometry, tokens)
    float32 = _float32_outputs(before, ops, tokens)
    check = ErrorCheck(before.role, "the model's in the original basis", multiple=FLOAT32.multiple)
    rotated = _float64_outputs(after.decoder(ops), geometry, tokens)
    float32_outputs = [_float32_outputs(after, ops_name, tokens) for ops_name in after.ops]
    for name, expected in exact.items():
        float32_error = float32_error_bounds(row_errors(float32[name], expected), expected)
        # A rotated stream spreads the error of the largest channel over all of them, and the error
        # of a single row varies by chance, so the worst row of an output bounds all of them.
        worst = np.full_like(float32_error, float32_error.max())
        for outputs in (rotated, *float32_outputs):
            check.compare("basis", name, outputs[name], expected, worst)


def _float64_outputs(path: Path, geometry: Geometry, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Return logits [T, V] and caches [H, T, D] of a graph in float64."""
    shapes = dict(zip(geometry.cache_names(), geometry.cache_shapes(), strict=True))
    inputs = {"input_ids": tokens[None], "past_length": np.zeros(1), "logits_from": np.zeros(1)}

    def graph_input(name: str) -> np.ndarray:
        if name in shapes:
            return np.zeros(shapes[name])
        return inputs[name].astype(np.int64)

    outputs = {}
    for name, value in ExactGraph(path).run(graph_input):
        outputs[name] = value[0] if name == "logits" else value[0][:, : len(tokens)]
    return outputs


def _float32_outputs(model: FloatModel, ops: str, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Return logits [T, V] and caches [H, T, D] of a graph in ONNX Runtime."""
    actions: list[Action] = [
        FillNoise(0, model.geometry.capacity),
        PassAction("decoder", tokens, 0),
        ReadRows(0, len(tokens)),
    ]
    _, logits, rows = model.decoder_runner(ops).run([], through=actions)
    names = [name.replace("past_key_values", "present") for name in model.geometry.cache_names()]
    return {"logits": logits, **dict(zip(names, rows, strict=True))}
