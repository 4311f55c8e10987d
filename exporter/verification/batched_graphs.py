"""Batched graphs of a model, compared with its decoder by one pass over several sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort

from specedge.bundle.batched_signature import BATCHED, BATCHED_INPUTS
from specedge.bundle.manifest import ModelEntry
from specedge.bundle.precision import OLDEST_ONNXRUNTIME, QUANTIZED_DTYPES
from specedge.errors import ParityError

from ..graph import batched
from ..graph.graphs import GraphFile
from ..progress import Progress
from ..tracing.geometry import Geometry
from .runner import (
    Action,
    FillCaches,
    FillNoise,
    PassAction,
    ReadHiddenStates,
    ReadRows,
    Runner,
)
from .subgraph import Values

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
    texts = random.integers(model.vocab_size, size=(len(SEQUENCES), LONGEST))
    is_packed = model.weights_dtype in QUANTIZED_DTYPES  # products are slow without it
    actions: list[Action] = []
    hidden = [] if model.hidden is None else [ReadHiddenStates()]
    for (past, length), text in zip(SEQUENCES, texts, strict=True):
        # A pass of one token may use another kernel than longer ones.
        tokens = text[: past + max(2, length)]
        alone = PassAction("decoder", tokens, 0, logits_from=past, packed=is_packed)
        rows = ReadRows(0, past + length)
        actions += [alone if length else FillNoise(0, past), rows, *hidden]
    results = _runner(model, folder, "decoder", ops, 1).run(actions)
    step = 2 + len(hidden)
    logits, caches = results[::step], results[1::step]

    def history(i: int) -> np.ndarray:
        """Return the rows of cache i before the pass, [B, H, LONGEST, D]."""
        rows = [
            sequence[i][:, :past] for sequence, (past, _) in zip(caches, SEQUENCES, strict=True)
        ]
        return np.stack([np.pad(x, ((0, 0), (0, LONGEST - x.shape[1]), (0, 0))) for x in rows])

    several = BatchedPass(BATCHED, texts, 0, packed=is_packed)
    runner = _runner(model, folder, BATCHED, ops, len(SEQUENCES))
    _, batched_logits, batched_caches, *batched_hidden = runner.run(
        [FillCaches(history), several, ReadRows(0, LONGEST), *hidden]
    )
    errors, first = [0.0], 0
    for i, (past, length) in enumerate(SEQUENCES):
        if length:
            errors.append(_relative(batched_logits[first : first + length], logits[i][:length]))
        for states in batched_hidden if length else []:
            expected = results[step * i + 2][past : past + length]
            errors.append(_relative(states[first : first + length], expected))
        first += length
        for rows, expected in zip(batched_caches, caches[i], strict=True):
            errors.append(_relative(rows[i, :, : past + length], expected))
    return math.inf if np.isnan(errors).any() else max(errors)


@dataclass(frozen=True)
class BatchedPass(PassAction):
    """Pass of a batched graph over the `tokens` of all sequences, [B, LONGEST]."""

    def inputs(self) -> Values:
        """Return the inputs of the graph, without its caches."""
        return _packed_inputs(self.tokens)


def _runner(model: ModelEntry, folder: Path, name: str, ops: str, batch: int) -> Runner:
    """Return a runner of a graph with caches of `batch` sequences."""
    path = folder / model.graph(name, ops).file
    files = [GraphFile(name, None, prefix=path.name.partition(name)[0])]
    sizes = model.context_length, model.capacity, model.padded_vocab_size
    return Runner(path.parent, files, Geometry(*sizes, model.layers), ops, batch=batch)


def _packed_inputs(texts: np.ndarray) -> Values:
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
