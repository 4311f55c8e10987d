"""Sessions of a subgraph: some of a model's layers with their caches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from specedge import int8_products
from specedge.attention_kernels import batch_invariant_attention
from specedge.constant_folding import FOLDING_LIMIT
from specedge.cpu_count import default_threads
from specedge.errors import ExportError

from ..libraries import translate_errors
from ..mapped_memory import system_memory

NOISE = 4.0  # standard deviation
_MEMORY_FACTOR = 3  # memory of a session that copies its weights, per size of the weights
_OFFSETS = 1000  # number of offsets in the random numbers at which noise may begin
Values = dict[str, np.ndarray]


class SubgraphSession:
    """Loaded subgraph: caches of some layers, and sessions of these layers by file."""

    def __init__(
        self,
        shapes: dict[str, tuple[int, ...]],
        dtype: str,
        open_: Callable[[str, bool], ort.InferenceSession | None],
    ) -> None:
        self.caches = {name: np.zeros(shape, dtype) for name, shape in shapes.items()}
        self._open = open_
        self._sessions: dict[tuple[str, bool], ort.InferenceSession | None] = {}
        self._random = np.random.default_rng(0)

    @functools.cached_property
    def _bound(self) -> dict[str, ort.OrtValue]:
        return {n: ort.OrtValue.ortvalue_from_numpy(c) for n, c in self.caches.items()}

    def close(self) -> None:
        """Release the sessions, which map files and borrow buffers."""
        self._sessions.clear()

    def run(self, file: str, packed: bool, values: Values) -> Values:
        """Run a pass through these layers and return its outputs by name."""
        session = self._session(file, packed)
        if session is None:
            return {}
        binding = session.io_binding()
        for name in (value.name for value in session.get_inputs()):
            if name in self._bound:
                binding.bind_ortvalue_input(name, self._bound[name])
            else:
                binding.bind_cpu_input(name, values[name])
        names = [value.name for value in session.get_outputs()]
        caches = {n: self._bound.get(n.replace("present", "past_key_values")) for n in names}
        for name, cache in caches.items():
            if cache is not None:
                binding.bind_ortvalue_output(name, cache)
            else:
                binding.bind_output(name, "cpu")
        with translate_errors(ExportError, f"ONNX Runtime cannot run {file}: "):
            session.run_with_iobinding(binding)
        outputs = zip(names, binding.get_outputs(), strict=True)
        return {name: output.numpy() for name, output in outputs if caches[name] is None}

    def fill(self, rows: Values) -> None:
        """Write [H, n, D] rows to the caches, or [B, H, n, D]."""
        for name, part in rows.items():
            self.caches[name][..., : part.shape[-2], :] = part

    def fill_noise(self, start: int, end: int) -> None:
        """Write noise to the caches' rows."""
        for cache in self.caches.values():
            noise, rows = _noise(cache.size), cache[:, :, start:end]
            at = self._random.integers(_OFFSETS)
            rows[:] = noise[at : at + rows.size].reshape(rows.shape)

    def repeat(self, length: int, end: int) -> None:
        """Repeat the first rows after themselves up to row `end`."""
        for cache in self.caches.values():
            rows = np.arange(length, end)
            cache[:, :, length:end] = cache[:, :, rows % length]

    def rows(self, start: int, end: int) -> Values:
        """Copy the caches' rows, in the order of the caches: [H, n, D], or [B, H, n, D]."""
        rows = {name: cache[:, :, start:end].copy() for name, cache in self.caches.items()}
        return {name: part[0] if len(part) == 1 else part for name, part in rows.items()}

    def _session(self, name: str, packed: bool) -> ort.InferenceSession | None:
        key = (name, packed)
        if key not in self._sessions:
            if not self.caches:
                self._sessions.clear()
            elif packed and name != "decoder":  # each has a copy of the weights
                self._sessions = {k: s for k, s in self._sessions.items() if k[0] == "decoder"}
            self._sessions[key] = self._open(name, packed)
        return self._sessions[key]


@functools.lru_cache(maxsize=2)  # sizes of caches of local and of global attention
def _noise(size: int) -> np.ndarray:
    """Return at least `size` random numbers, shared by the subgraphs of a model."""
    return NOISE * np.random.default_rng(0).standard_normal(size + _OFFSETS, np.float32)


def can_prepack(num_bytes: int) -> bool:
    """Return True if memory is available for a session that copies quantized weights."""
    return _MEMORY_FACTOR * num_bytes <= system_memory().available


def unpacked_options() -> ort.SessionOptions:
    """Return options of a session that does not copy its memory-mapped weights."""
    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_prepacking", "1")
    return options


def open_session(
    model: Path | bytes, options: ort.SessionOptions | None = None, disabled: Sequence[str] = ()
) -> ort.InferenceSession:
    """Open a CPU session, with or without a global thread pool, and with exact int8 products.

    Optimizers named in `disabled` do not run.
    """
    options = options or ort.SessionOptions()
    if not _products_are_right():
        options.add_session_config_entry(int8_products.UNSIGNED_OPTION, "1")
    with batch_invariant_attention():
        return _open(model, options, disabled)


@functools.cache
def _products_are_right() -> bool:
    session = _open(int8_products.PRODUCT_GRAPH, ort.SessionOptions())
    return int8_products.are_exact(lambda x: session.run(None, {"x": x})[0])


def _open(
    model: Path | bytes, options: ort.SessionOptions, disabled: Sequence[str] = ()
) -> ort.InferenceSession:
    options.log_severity_level = 4
    options.add_session_config_entry(*FOLDING_LIMIT)
    options.intra_op_num_threads = default_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    arguments: dict[str, Any] = {"providers": ["CPUExecutionProvider"], "enable_fallback": False}
    if disabled:
        arguments["disabled_optimizers"] = list(disabled)
    try:
        return ort.InferenceSession(model, options, **arguments)
    except Exception as error:
        if "per_session_threads" not in str(error):
            raise
    # With a global thread pool sessions cannot have their own.
    options.use_per_session_threads = False
    return ort.InferenceSession(model, options, **arguments)
