"""Predicted duration of a quantization."""

from __future__ import annotations

import time

import torch

from specedge.bundle.precision import GPTQ

from .calibration import ANSWER_TOKENS
from .experts import opened
from .matrices import groups
from .texts import Texts
from .written import Written

_SIZE = 1024  # of matrices whose product is timed
_PASSES = 4  # over the report's text: float, an op set, and two formats of llama.cpp
_BYTES_A_SECOND = 8e9  # of weights that an answer's token reads
_PASS_SPEED = 0.5  # of the timed product's operations a second, that passes reach,
_GPTQ_SPEED = 0.4  # and GPTQ's small steps


def seconds(model: Written, texts: Texts, rounding: str) -> float:
    """Predict the time for calibration, rounding and report, from a product that is timed now."""
    graph = opened(model.decoder(model.ops[0])).graph
    calibrated, compared = (sum(map(len, part)) for part in (texts.calibration, texts.report))
    passes = hessians = rounded = weights = 0.0
    for group in groups(graph):
        shapes = [matrix.stored.numbers().shape for matrix in group.matrices]
        size, width = float(shapes[0][-2]), float(sum(shape[-1] for shape in shapes))
        weights += size * width
        passes += 2 * size * width * (calibrated + _PASSES * compared)
        hessians += 2 * size * size * calibrated
        rounded += 2 * size * size * (width + size)
    speed = _operations_a_second()
    if rounding != GPTQ:
        return passes / _PASS_SPEED / speed
    answers = 4 * weights * ANSWER_TOKENS * len(texts.prompts) / _BYTES_A_SECOND
    work = passes / _PASS_SPEED + hessians + rounded / _GPTQ_SPEED
    return work / speed + answers


def _operations_a_second() -> float:
    x = torch.ones(_SIZE, _SIZE)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        x @ x
        best = min(best, time.perf_counter() - start)
    return 2 * _SIZE**3 / best
