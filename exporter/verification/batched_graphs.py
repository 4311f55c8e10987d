"""Batched graphs of a model, compared with its decoder by one pass over several sequences."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort

from specedge.bundle.batched_signature import BATCHED
from specedge.bundle.manifest import ModelEntry
from specedge.bundle.precision import OLDEST_ONNXRUNTIME, QUANTIZED_DTYPES
from specedge.errors import ExportError, ParityError

from ..graph import batched
from ..libraries import translate_errors
from ..progress import Progress
from .subgraph import Values, can_prepack, open_session, unpacked_options

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
    decoder = _Session(model, folder, "decoder", ops, 1)
    alone = []
    for (past, length), text in zip(SEQUENCES, texts, strict=True):
        if length:
            # A pass of one token may use another kernel than longer ones.
            end = past + max(2, length)
            inputs = {"input_ids": [text[:end]], "past_length": [0], "logits_from": [past]}
            logits = decoder.run(inputs)[0, :length]
        else:
            end, logits = past, np.zeros((0, model.padded_vocab_size), np.float32)
            for cache in decoder.caches.values():
                cache[0, :, :end] = random.standard_normal(cache[0, :, :end].shape)
        alone.append((logits, {name: x[0, :, :end].copy() for name, x in decoder.caches.items()}))
    del decoder
    several = _Session(model, folder, BATCHED, ops, len(SEQUENCES))
    for i, (past, _) in enumerate(SEQUENCES):
        for name, rows in alone[i][1].items():
            several.caches[name][i, :, :past] = rows[:, :past]
    logits = several.run(_packed_inputs(texts))
    errors, first = [0.0], 0
    for i, (past, length) in enumerate(SEQUENCES):
        expected, caches = alone[i]
        errors.append(_relative(logits[0, first : first + length], expected))
        first += length
        for name, rows in caches.items():
            end = past + length
            errors.append(_relative(several.caches[name][i, :, :end], rows[:, :end]))
    return math.inf if np.isnan(errors).any() else max(errors)


def _packed_inputs(texts: list[np.ndarray]) -> Mapping[str, object]:
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
    return {
        "input_ids": [tokens],
        "positions": [positions],
        "block_rows": block,
        "packed_rows": packed,
        "logits_rows": range(len(tokens)),
        "last_positions": [past + length if length else 0 for past, length in SEQUENCES],
        "query_lengths": [length + 1 if length else 0 for _, length in SEQUENCES],
    }


def _relative(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference relative to the largest value."""
    if not expected.size or np.array_equal(actual, expected):
        return 0.0
    difference = np.abs(actual.astype(np.float64) - expected).max()
    return float(difference / max(np.abs(expected.astype(np.float64)).max(), 1e-30))


class _Session:
    """Session of a graph, and caches whose unused rows take no memory.

    Quantized weights are prepacked if memory is available, without which their products are slow.
    """

    def __init__(self, model: ModelEntry, folder: Path, name: str, ops: str, batch: int) -> None:
        graph = model.graph(name, ops)
        self._signature = model.signatures[graph.signature]
        is_quantized = model.weights_dtype in QUANTIZED_DTYPES
        is_packed = is_quantized and can_prepack((folder / model.weights).stat().st_size)
        options = ort.SessionOptions() if is_packed else unpacked_options()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        with translate_errors(ExportError, f"ONNX Runtime cannot load {graph.file}: "):
            self._session = open_session(folder / graph.file, options)
        self.caches: Values = {}
        for port in self._signature.inputs:
            if port.state is not None:
                shape = port.at(batch, 0, 0)
                memory = mmap.mmap(-1, math.prod(shape) * np.dtype(port.dtype).itemsize)
                self.caches[port.state] = np.frombuffer(memory, port.dtype).reshape(shape)

    def run(self, inputs: Mapping[str, object]) -> np.ndarray:
        """Run a pass that updates the caches; return its logits. [1, R, V]"""
        binding, bound = self._session.io_binding(), {}
        for port in self._signature.inputs:
            if port.state is None:
                array = np.array(inputs[port.name], port.dtype)
            else:
                array = self.caches[port.state]
            bound[port.name] = ort.OrtValue.ortvalue_from_numpy(array)
            binding.bind_ortvalue_input(port.name, bound[port.name])
            if port.state is not None:
                binding.bind_ortvalue_output(f"present.{port.state}", bound[port.name])
        binding.bind_output("logits", "cpu")
        with translate_errors(ExportError, "ONNX Runtime cannot run a batched graph: "):
            self._session.run_with_iobinding(binding)
        return binding.get_outputs()[-1].numpy()
