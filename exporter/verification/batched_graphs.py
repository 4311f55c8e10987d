"""Batched graphs of a model, compared with its decoder by one pass over several sequences."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnxruntime as ort

from specedge.bundle.batched_signature import BATCHED, BATCHED_INPUTS
from specedge.bundle.graph_variants import cache_dtype
from specedge.bundle.manifest import ModelEntry
from specedge.bundle.precision import OLDEST_ONNXRUNTIME, QUANTIZED_DTYPES
from specedge.errors import ExportError, ParityError

from ..graph import batched
from ..libraries import translate_errors
from ..progress import Progress
from .subgraph import SubgraphSession, Values, can_prepack, open_session, unpacked_options

SEQUENCES = ((5, 3), (4, 0), (0, 1))  # cache rows and tokens of each
LONGEST = max(past + length for past, length in SEQUENCES)


def add_batched_graphs(
    role: str, model: ModelEntry, folder: Path, progress: Progress
) -> ModelEntry:
    """Write the batched graphs of a model next to its decoders, and verify them.

    Rows are compared with a tolerance: sessions that do not pack weights round differently for some
    numbers of rows. The runtime tests at load whether passes are exact.

    Args:
        role: Role of the model, for notes.
        model: Its entry.
        folder: Folder of the bundle.
        progress: Receives notes and the duration of the step.

    Returns:
        The entry with the graphs, if its context has room for the compared passes.

    Raises:
        ParityError: A batched graph differs from the decoder.
        ExportError: ONNX Runtime cannot load or run a graph.
    """
    oldest = OLDEST_ONNXRUNTIME[BATCHED]
    if model.context_length < LONGEST:
        return model
    if _numbers(ort.__version__) < _numbers(oldest):
        progress.note(
            f"{role}: no batched graphs, because ONNX Runtime {ort.__version__} cannot run them; "
            f"they need {oldest}"
        )
        return model
    with progress.step(f"Writing the {role}'s batched graphs"):
        changed = batched.add_batched_graphs(model, folder)
        for ops in [graph.ops for graph in changed.graphs if graph.name == BATCHED]:
            error, bound = measure_error(changed, folder, ops), changed.bound(ops)
            if not error <= bound:
                raise ParityError(
                    f"{role} ({ops}): the batched graph differs from the decoder by {error:.1e} of "
                    f"the largest value, the limit is {bound:.1e}"
                )
    return changed


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")[:2]]


def measure_error(model: ModelEntry, folder: Path, ops: str) -> float:
    """Return the largest difference of a value, relative to the largest of its tensor."""
    random = np.random.default_rng(0)
    texts = [random.integers(model.vocab_size, size=LONGEST) for _ in SEQUENCES]
    decoder = _open(model, folder, "decoder", ops, 1)
    alone = []
    for (past, length), text in zip(SEQUENCES, texts, strict=True):
        logits = np.zeros((0, model.padded_vocab_size), np.float32)
        if length:
            # A pass of one token may use another kernel than longer ones.
            tokens, start = text[None, : past + max(2, length)], np.zeros(1, np.int64)
            inputs = {"input_ids": tokens, "past_length": start, "logits_from": start + past}
            logits = decoder.run("decoder", False, inputs)["logits"][0, :length]
        else:
            decoder.fill_noise(0, past)
        alone.append((logits, decoder.rows(0, past + length)))
    del decoder
    several = _open(model, folder, BATCHED, ops, len(SEQUENCES))
    for i, (past, _) in enumerate(SEQUENCES):
        for name, rows in alone[i][1].items():
            several.caches[name][i, :, :past] = rows[:, :past]
    logits = several.run(BATCHED, False, _packed_inputs(texts))["logits"]
    errors, first = [0.0], 0
    for i, (past, length) in enumerate(SEQUENCES):
        expected, caches = alone[i]
        errors.append(_relative(logits[0, first : first + length], expected))
        first += length
        for name, rows in caches.items():
            errors.append(_relative(several.caches[name][i, :, : past + length], rows))
    return math.inf if np.isnan(errors).any() else max(errors)


def _open(model: ModelEntry, folder: Path, name: str, ops: str, batch: int) -> SubgraphSession:
    """Return a session of a graph with caches of `batch` sequences.

    Quantized weights are prepacked if memory is available, without which their products are slow.
    """
    is_quantized = model.weights_dtype in QUANTIZED_DTYPES
    is_packed = is_quantized and can_prepack((folder / model.weights).stat().st_size)
    options = ort.SessionOptions() if is_packed else unpacked_options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    file = model.graph(name, ops).file

    def open_(*_: object) -> ort.InferenceSession:
        with translate_errors(ExportError, f"ONNX Runtime cannot load {file}: "):
            return open_session(folder / file, options)

    states = {f"past_key_values.{state.name}": state for state in model.states}
    shapes = {name: state.sizes(model.capacity, batch) for name, state in states.items()}
    return SubgraphSession(shapes, cache_dtype(ops), open_)


def _packed_inputs(texts: list[np.ndarray]) -> Values:
    """Return the inputs of the batched graph."""
    block_length = 1 + max(length for _, length in SEQUENCES)
    block = np.zeros((len(SEQUENCES), block_length), np.int64)
    tokens, positions, packed = list[int](), list[int](), list[int]()
    for i, ((past, length), text) in enumerate(zip(SEQUENCES, texts, strict=True)):
        if length:
            rows = range(len(tokens), len(tokens) + length)
            block[i, : length + 1] = [*rows, rows[-1]]
            tokens += text[past : past + length].tolist()
            positions += range(past, past + length)
            packed += range(i * block_length, i * block_length + length)
    inputs = {
        "input_ids": [tokens],
        "positions": [positions],
        "block_rows": block,
        "packed_rows": packed,
        "logits_rows": range(len(tokens)),
        "last_positions": [past + length if length else 0 for past, length in SEQUENCES],
        "query_lengths": [length + 1 if length else 0 for _, length in SEQUENCES],
    }
    return {port.name: np.array(inputs[port.name], port.dtype) for port in BATCHED_INPUTS}


def _relative(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference relative to the largest value."""
    expected = expected.astype(np.float64)
    largest = max(np.abs(expected).max(initial=0), 1e-30)
    return float(np.abs(actual - expected).max(initial=0) / largest)
