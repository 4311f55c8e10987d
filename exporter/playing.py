"""Run exported graphs over one set of caches, bound in place, as a host would."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort

from specedge.errors import ExportError

from .geometry import Geometry
from .graphs import Length
from .quiet import one_line
from .weights import FILE

# Each session packs its own copy of the weights: of a larger model only one is held at a time.
SHARED_BYTES = 500_000_000
NOISE = 4.0


class Player:
    """One op set of a model, each graph loaded when first used, over caches [1, H, S, D]."""

    def __init__(
        self, folder: Path, lengths: list[Length], geometry: Geometry, ops: str = "onnx"
    ) -> None:
        self.folder, self.geometry, self.ops = folder, geometry, ops
        self.lengths = {length.name: length for length in lengths}
        self.caches = [np.zeros(shape, np.float32) for shape in geometry.cache_shapes()]
        self._bound = [ort.OrtValue.ortvalue_from_numpy(cache) for cache in self.caches]
        self.one_at_a_time = (folder / FILE).stat().st_size > SHARED_BYTES
        self._sessions: dict[str, ort.InferenceSession] = {}
        self._random = np.random.default_rng(0)

    def run(self, name: str, tokens: np.ndarray, past_length: int) -> np.ndarray | None:
        """One pass over the caches. [T] -> [T, V], or None where the graph has no logits"""
        session = self._session(name)
        binding = session.io_binding()
        binding.bind_cpu_input("input_ids", tokens[None].astype(np.int64))
        binding.bind_cpu_input("past_length", np.array([past_length], np.int64))
        for cache, value in zip(self.geometry.cache_names(), self._bound, strict=True):
            binding.bind_ortvalue_input(cache, value)
            binding.bind_ortvalue_output(cache.replace("past_key_values", "present"), value)
        logits = None
        if self.lengths[name].logits:
            logits = np.empty((1, len(tokens), self.geometry.padded_vocab_size), np.float32)
            binding.bind_ortvalue_output("logits", ort.OrtValue.ortvalue_from_numpy(logits))
        try:
            session.run_with_iobinding(binding)
        except Exception as error:
            file = self.lengths[name].file(self.ops)
            raise ExportError(f"ONNX Runtime cannot run {file}: {one_line(error)}") from error
        return None if logits is None else logits[0]

    def fill(self, rows: list[np.ndarray]) -> None:
        """Put [H, n, D] rows into the caches, and noise into all rows behind them."""
        for cache, part in zip(self.caches, rows, strict=True):
            cache[0, :, : part.shape[1]] = part
        self.spoil(rows[0].shape[1], self.geometry.capacity)

    def spoil(self, start: int, end: int) -> None:
        """Write noise to rows that hold nothing, or that a rollback left behind."""
        for cache in self.caches:
            rows = cache[:, :, start:end]
            rows[:] = NOISE * self._random.standard_normal(rows.shape, np.float32)

    def rows(self, start: int, end: int) -> list[np.ndarray]:
        """A copy of the caches' rows. [H, end - start, D] each"""
        return [cache[0, :, start:end].copy() for cache in self.caches]

    def _session(self, name: str) -> ort.InferenceSession:
        if name not in self._sessions:
            if self.one_at_a_time:
                self._sessions.clear()
            file = self.lengths[name].file(self.ops)
            try:
                self._sessions[name] = open_session(self.folder / file, ort.SessionOptions())
            except Exception as error:
                raise ExportError(f"ONNX Runtime cannot load {file}: {one_line(error)}") from error
        return self._sessions[name]


def open_session(path: Path, options: ort.SessionOptions) -> ort.InferenceSession:
    """A session on the CPU, whether or not the process has a thread pool for all of them."""
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    providers = ["CPUExecutionProvider"]
    try:
        return ort.InferenceSession(path, options, providers=providers, enable_fallback=False)
    except Exception as error:
        if "per_session_threads" not in str(error):
            raise
    # Beside a shared pool no session has one of its own.
    options.use_per_session_threads = False
    return ort.InferenceSession(path, options, providers=providers, enable_fallback=False)
