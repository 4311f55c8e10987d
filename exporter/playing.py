"""Run exported graphs over one set of caches, bound in place, as a host would."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from specedge.errors import ExportError

from . import parts
from .geometry import Geometry
from .graphs import Length
from .progress import Advance
from .quiet import one_line
from .shorter import Shorter, shorten
from .sources import Memory
from .weights import FILE

WHOLE_BYTES = 100_000_000  # of weights; larger models are played part by part
NOISE = 4.0
_OFFSETS = 1000  # where in one stretch of numbers a stretch of noise may begin
Values = dict[str, np.ndarray]


@dataclass(frozen=True)
class Pass:
    """One pass over the caches: [T] tokens at `past_length` -> [T, V], or None without logits.

    Of a model in parts only a `packed` pass has its weights packed, as a host's session would have
    them: that costs a copy of them and gives other last bits. `then` takes the logits and gives
    what is kept of them.
    """

    name: str
    tokens: np.ndarray
    past_length: int
    packed: bool = False
    then: Callable[[np.ndarray], Any] | None = None


@dataclass(frozen=True)
class Fill:
    """Put `past(i)`, [H, n, D], into the first rows of cache i."""

    past: Callable[[int], np.ndarray]


@dataclass(frozen=True)
class Spoil:
    """Write noise to rows that hold nothing, or that a rollback left behind."""

    start: int
    end: int


@dataclass(frozen=True)
class Rows:
    """A copy of the caches' rows: a list of [H, end - start, D]."""

    start: int
    end: int


Action = Pass | Fill | Spoil | Rows


class Player:
    """One op set of a model over caches [1, H, S, D]; a play begins by filling them.

    `caches` are the places of the played ones among the model's.
    """

    def __init__(
        self, folder: Path, lengths: list[Length], geometry: Geometry, ops: str = "onnx"
    ) -> None:
        self.folder, self.geometry, self.ops = folder, geometry, ops
        self.lengths = {length.name: length for length in lengths}
        self.in_parts = (folder / FILE).stat().st_size > WHOLE_BYTES
        self._shapes = dict(zip(geometry.cache_names(), geometry.cache_shapes(), strict=True))
        self.caches = list(range(len(self._shapes)))
        self._splits: dict[str, parts.Split] = {}
        self._left_out: Shorter | None = None
        if self.in_parts:
            first = parts.Split(self._path("decoder"))
            others = (name for name in self.lengths if name != "decoder")
            self._splits = {"decoder": first} | {
                name: parts.Split(self._path(name), first.first) for name in others
            }
        else:
            self._whole = _Stage(self._shapes, lambda name, packed: self._open(name))

    @property
    def cache_names(self) -> list[str]:
        """The names of the played caches."""
        names = list(self._shapes)
        return [names[i] for i in self.caches]

    @property
    def num_stages(self) -> int:
        """How many parts a play loads, one after another."""
        return len(self._indexes()) if self.in_parts else 1

    @functools.cached_property
    def shorter(self) -> Player | None:
        """The same files with one layer of each form, if that leaves some out."""
        left_out = shorten(self._splits) if self.in_parts else None
        if left_out is None:
            return None
        player = copy.copy(self)
        player._left_out = left_out
        decoder = self._splits["decoder"]
        played = {name for i in player._indexes() for name in decoder.parts[i].inputs}
        player.caches = [i for i, name in enumerate(self._shapes) if name in played]
        return player

    def _path(self, name: str) -> Path:
        return self.folder / self.lengths[name].file(self.ops)

    def play(
        self, actions: list[Action], advance: Advance = lambda amount: None
    ) -> list[np.ndarray | list[np.ndarray] | None]:
        """What each action gives, in order; `advance` is told of each stage."""
        passes = {i: _inputs(a) for i, a in enumerate(actions) if isinstance(a, Pass)}
        results: list[Any] = [[] if isinstance(a, Rows) else None for a in actions]
        index = {name: i for i, name in enumerate(self.cache_names)}
        with contextlib.closing(self._stages()) as stages:
            for stage in stages:
                for i in stage.order(actions):
                    action = actions[i]
                    if isinstance(action, Pass):
                        made = stage.run(action, passes[i])
                        standing = self._left_out.names[action.name] if self._left_out else {}
                        made |= {name: made[x] for name, x in standing.items() if x in made}
                        passes[i] |= made
                        if (logits := passes[i].pop("logits", None)) is None:
                            continue
                        results[i] = action.then(logits[0]) if action.then else logits[0]
                    elif isinstance(action, Rows):
                        # Stages take the caches in order.
                        results[i] += stage.rows(action.start, action.end)
                    elif isinstance(action, Spoil):
                        stage.spoil(action.start, action.end)
                    else:
                        stage.fill({name: action.past(index[name]) for name in stage.caches})
                advance(1)
        return results

    def check_files(self) -> None:
        """Load every file as it is, without copies of its weights."""
        for name in self.lengths:
            options = _unpacked()
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
            self._load(name, self._path(name), options)

    def _indexes(self) -> list[int]:
        """The parts that are played."""
        indexes = list(range(len(self._splits["decoder"].parts)))
        if self._left_out:
            del indexes[self._left_out.end : self._left_out.start]
        return indexes

    def _stages(self) -> Generator[_Stage, None, None]:
        if not self.in_parts:
            yield self._whole
            return
        decoder, memory = self._splits["decoder"], Memory()
        for i in self._indexes():
            inputs = decoder.parts[i].inputs
            caches = {n: shape for n, shape in self._shapes.items() if n in inputs}
            with decoder.computed(i, memory) as given:
                values = {n: ort.OrtValue.ortvalue_from_numpy(v) for n, v in given.items()}
                stage = _Stage(caches, functools.partial(self._open_part, i, values))
                try:
                    yield stage
                finally:
                    stage.close()

    def _open(self, name: str) -> ort.InferenceSession:
        return self._load(name, self._path(name), ort.SessionOptions())

    def _open_part(
        self, index: int, given: dict[str, ort.OrtValue], name: str, packed: bool
    ) -> ort.InferenceSession | None:
        split = self._splits[name]
        if index >= len(split.parts):
            return None
        options = ort.SessionOptions() if packed else _unpacked()
        options.enable_cpu_mem_arena = False  # it takes up to twice what it gives
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(self.folder)
        )
        for constant in given.keys() & set(split.parts[index].constants):
            options.add_initializer(constant, given[constant])
        return self._load(name, split.model(index), options)

    def _load(
        self, name: str, model: Path | bytes, options: ort.SessionOptions
    ) -> ort.InferenceSession:
        try:
            return open_session(model, options)
        except Exception as error:
            file = self._path(name).name
            raise ExportError(f"ONNX Runtime cannot load {file}: {one_line(error)}") from error


class _Stage:
    """What is loaded at a time: some of the layers' caches, and sessions that run those layers."""

    def __init__(
        self,
        shapes: dict[str, tuple[int, int, int, int]],
        open_: Callable[[str, bool], ort.InferenceSession | None],
    ) -> None:
        self.caches = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        self._bound = {n: ort.OrtValue.ortvalue_from_numpy(c) for n, c in self.caches.items()}
        self._open = open_
        self._sessions: dict[tuple[str, bool], ort.InferenceSession | None] = {}
        self._random = np.random.default_rng(0)
        size = max((cache.size for cache in self.caches.values()), default=0) + _OFFSETS
        self._noise = NOISE * self._random.standard_normal(size, np.float32)

    def close(self) -> None:
        """Unload the sessions, which map files and use memory that is used again."""
        self._sessions.clear()

    def order(self, actions: list[Action]) -> list[int]:
        """Without caches passes are independent, and those of one session come together."""
        if self.caches:
            return list(range(len(actions)))
        passes = [(a.name, a.packed, i) for i, a in enumerate(actions) if isinstance(a, Pass)]
        return [i for *_, i in sorted(passes)]

    def run(self, action: Pass, values: Values) -> Values:
        """A pass through these layers; returns what they make of `values`, by name."""
        session = self._session(action.name, action.packed)
        if session is None:
            return {}
        binding = session.io_binding()
        for name in (value.name for value in session.get_inputs()):
            if name in self._bound:
                binding.bind_ortvalue_input(name, self._bound[name])
            else:
                binding.bind_cpu_input(name, values[name])
        made = []
        for name in (value.name for value in session.get_outputs()):
            if (cache := name.replace("present", "past_key_values")) in self._bound:
                binding.bind_ortvalue_output(name, self._bound[cache])
            else:
                binding.bind_output(name, "cpu")
                made.append(name)
        try:
            session.run_with_iobinding(binding)
        except Exception as error:
            raise ExportError(
                f"ONNX Runtime cannot run {action.name}: {one_line(error)}"
            ) from error
        outputs = zip(session.get_outputs(), binding.get_outputs(), strict=True)
        return {value.name: made_.numpy() for value, made_ in outputs if value.name in made}

    def fill(self, rows: Values) -> None:
        """Put [H, n, D] rows into the caches."""
        for name, part in rows.items():
            self.caches[name][0, :, : part.shape[1]] = part

    def spoil(self, start: int, end: int) -> None:
        """Write noise to rows."""
        for cache in self.caches.values():
            rows = cache[:, :, start:end]
            at = self._random.integers(_OFFSETS)
            rows[:] = self._noise[at : at + rows.size].reshape(rows.shape)

    def rows(self, start: int, end: int) -> list[np.ndarray]:
        """A copy of the caches' rows."""
        return [cache[0, :, start:end].copy() for cache in self.caches.values()]

    def _session(self, name: str, packed: bool) -> ort.InferenceSession | None:
        key = (name, packed)
        if key not in self._sessions:
            if not self.caches:
                self._sessions.clear()
            self._sessions[key] = self._open(name, packed)
        return self._sessions[key]


def _inputs(action: Pass) -> Values:
    return {
        "input_ids": action.tokens[None].astype(np.int64),
        "past_length": np.array([action.past_length], np.int64),
    }


def _unpacked() -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_prepacking", "1")
    return options


def open_session(model: Path | bytes, options: ort.SessionOptions) -> ort.InferenceSession:
    """A session on the CPU, whether or not the process has a thread pool for all of them."""
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    providers = ["CPUExecutionProvider"]
    try:
        return ort.InferenceSession(model, options, providers=providers, enable_fallback=False)
    except Exception as error:
        if "per_session_threads" not in str(error):
            raise
    # Beside a shared pool no session has one of its own.
    options.use_per_session_threads = False
    return ort.InferenceSession(model, options, providers=providers, enable_fallback=False)
