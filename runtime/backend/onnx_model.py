"""A language model on ONNX Runtime: bound buffers, caches updated in place, rollback by length."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from specedge.bundle import MANIFEST, Bundle
from specedge.errors import BundleError
from specedge.graph_file import check_graph
from specedge.manifest import CURE, OPS, Model

from ..sampling.distribution import Floats
from .memory import enough_memory
from .sessions import onnxruntime, open_session, translated_errors

PREFILL_LENGTH = 64
CACHE_TYPES = ("float32",)


class OrtModel:
    """One model of a bundle. Rows past `length` in the caches are stale and never read."""

    def __init__(
        self,
        bundle: Bundle,
        model: Model,
        device: str,
        threads: int | None,
        share_threads: bool,
        ops: str = "auto",
        graph: str = "decoder",
    ) -> None:
        """Open one of the model's graphs; one of a fixed shape takes passes of its length alone."""
        self.ops = choose_ops(model, ops)
        _check_cache_type(bundle, model)
        self.vocab_size = model.vocab_size
        parity = model.parity[self.ops]
        self.row_independent_lengths = parity.row_independent_lengths if device == "cpu" else ()
        self.float32_error = parity.logits_error
        self.num_experts = model.num_experts
        self._name = model.source.id
        entry = model.graph(graph, self.ops)
        path = bundle.path(entry.file)
        check_graph(bundle, entry.file)
        with enough_memory(model):
            self._session = open_session(path, device, threads, share_threads)
            _check_contract(self._session, model, path, entry.logits)
            self._padded_vocab_size = model.padded_vocab_size
            self._forget_all(model)
        self._without_logits = onnxruntime().RunOptions()
        self._without_logits.only_execute_path_to_fetches = True

    def _forget_all(self, model: Model) -> None:
        """Begin with buffers of our own."""
        self.length = 0
        self._model = model
        self._past_length = np.zeros(1, np.int64)
        self._caches = _allocate(model)
        self._passes: dict[int, _Pass] = {}

    def forward(self, tokens: Sequence[int]) -> Floats:
        """Append T tokens to the cache; their logits, valid until the next call. [T] -> [T, V]"""
        length = len(tokens)
        with self._translated():
            if length not in self._passes:
                self._passes[length] = self._bind(length, logits=True)
            bound = self._passes[length]
            self._run(bound, tokens, None)
        assert bound.logits is not None
        return bound.logits[0, :, : self.vocab_size]

    def prefill(self, tokens: Sequence[int]) -> None:
        """Append any number of tokens to the cache without computing logits."""
        for start in range(0, len(tokens), PREFILL_LENGTH):
            chunk = tokens[start : start + PREFILL_LENGTH]
            with self._translated():
                self._run(self._bind(len(chunk), logits=False), chunk, self._without_logits)

    def truncate(self, length: int) -> None:
        """Forget every cached token past `length`."""
        assert 0 <= length <= self.length
        self.length = length

    def cache_rows(self, start: int, end: int) -> list[Floats]:
        """A copy of rows of every cache buffer. -> [H, end - start, D] each"""
        return [cache[0, :, start:end].copy() for cache in self._caches.values()]

    def twin(self) -> OrtModel:
        """The same model with caches of its own; the weights are shared."""
        twin = copy.copy(self)
        twin._forget_all(self._model)
        return twin

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn what ONNX Runtime raises in a pass, binding included, into our errors."""
        with enough_memory(self._model), translated_errors(f"a pass of {self._name}"):
            yield

    def _run(self, bound: _Pass, tokens: Sequence[int], options: Any) -> None:
        bound.input_ids[0] = tokens
        self._past_length[0] = self.length
        self._session.run_with_iobinding(bound.binding, options)
        self.length += len(tokens)

    def _bind(self, length: int, logits: bool) -> _Pass:
        """Bind a pass of `length` tokens to our buffers, each cache as input and output."""
        bound = _Pass(self._session.io_binding(), np.zeros((1, length), np.int64))
        _bind_input(bound.binding, "input_ids", bound.input_ids)
        _bind_input(bound.binding, "past_length", self._past_length)
        for name, cache in self._caches.items():
            _bind_input(bound.binding, f"past_key_values.{name}", cache)
            _bind_output(bound.binding, f"present.{name}", cache)
        if logits:
            bound.logits = np.zeros((1, length, self._padded_vocab_size), np.float32)
            _bind_output(bound.binding, "logits", bound.logits)
        return bound


def choose_ops(model: Model, ops: str = "auto") -> str:
    """The op set to run. On the CPU `gqa` is the faster one: it reads no more of the cache than is
    filled. It is left out where `onnx` gives the same bits for more pass lengths.
    """
    if ops not in ("auto", *OPS):
        raise ValueError(f"ops must be auto, onnx or gqa, got {ops!r}")
    if ops == "auto":
        held = {name: {*found.row_independent_lengths} for name, found in model.parity.items()}
        return "gqa" if "gqa" in held and held["gqa"] >= held.get("onnx", set()) else "onnx"
    if ops not in model.parity:
        raise BundleError(
            f"{model.source.id} has no graphs in the op set '{ops}', only in "
            f"{', '.join(model.parity)}; leave --ops out, or export the pair with --ops {ops}"
        )
    return ops


def _check_cache_type(bundle: Bundle, model: Model) -> None:
    """Refuse caches of a type that the format knows and this runtime cannot hold yet."""
    if model.cache.dtype not in CACHE_TYPES:
        raise BundleError(
            f"{bundle.folder / MANIFEST}: the cache of {model.source.id} is {model.cache.dtype}, "
            f"this specedge runs {' and '.join(CACHE_TYPES)}; use a specedge that runs it, or "
            "export the pair again"
        )


class _Pass:
    """A binding for one number of tokens, with the arrays it points into."""

    def __init__(self, binding: Any, input_ids: np.ndarray[Any, Any]) -> None:
        self.binding = binding
        self.input_ids = input_ids
        self.logits: Floats | None = None


def _check_contract(session: Any, model: Model, path: Path, logits: bool) -> None:
    """Refuse a graph whose inputs or outputs are not those that the manifest promises."""
    wanted: dict[str, tuple[str, Any]] = {
        "input_ids": ("tensor(int64)", 1),
        "past_length": ("tensor(int64)", 1),
    }
    if logits:
        wanted["logits"] = ("tensor(float)", model.padded_vocab_size)
    for i, layer in enumerate(model.cache.layers):
        for name, size in (("key", layer.key_size), ("value", layer.value_size)):
            rows = ("tensor(float)", [1, layer.heads, model.cache.capacity, size])
            wanted |= {f"past_key_values.{i}.{name}": rows, f"present.{i}.{name}": rows}
    found = {v.name: (v.type, v.shape) for v in (*session.get_inputs(), *session.get_outputs())}
    for name in sorted(wanted.keys() | found.keys()):
        kind, shape = found.get(name, ("missing", []))
        expected = wanted.get(name, ("missing", []))
        if name in ("input_ids", "past_length"):
            shape = shape[0] if shape else None
        elif name == "logits":
            shape = shape[-1] if shape else None
        if (kind, shape) != expected:
            raise BundleError(
                f"{path}: {name} is {kind} {shape}, {MANIFEST} wants {expected[0]} {expected[1]}; "
                f"{CURE}"
            )


def _allocate(model: Model) -> dict[str, Floats]:
    """Key and value buffers [1, H, S, D] of every layer, by the end of their graph names."""
    caches: dict[str, Floats] = {}
    for i, layer in enumerate(model.cache.layers):
        for name, size in (("key", layer.key_size), ("value", layer.value_size)):
            shape = (1, layer.heads, model.cache.capacity, size)
            caches[f"{i}.{name}"] = np.zeros(shape, model.cache.dtype)
    return caches


def _bind_input(binding: Any, name: str, array: np.ndarray[Any, Any]) -> None:
    binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


def _bind_output(binding: Any, name: str, array: np.ndarray[Any, Any]) -> None:
    binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
