"""Run exported graphs over one set of caches, bound in place, as a host would."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
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
    """A copy of the caches' rows, each [H, end - start, D]; the list is `into` if that is given."""

    start: int
    end: int
    into: list[np.ndarray] | None = None


Action = Pass | Fill | Spoil | Rows


class Player:
    """One op set of a model over caches [1, H, S, D]; a play begins by filling them."""

    def __init__(
        self, folder: Path, lengths: list[Length], geometry: Geometry, ops: str = "onnx"
    ) -> None:
        self.folder, self.geometry, self.ops = folder, geometry, ops
        self.lengths = {length.name: length for length in lengths}
        self.in_parts = (folder / FILE).stat().st_size > WHOLE_BYTES
        self._shapes = dict(zip(geometry.cache_names(), geometry.cache_shapes(), strict=True))
        self._splits: dict[str, parts.Split] = {}
        self.num_stages = 1
        if self.in_parts:
            first = parts.Split(self._path("decoder"))
            others = (name for name in self.lengths if name != "decoder")
            self._splits = {"decoder": first} | {
                name: parts.Split(self._path(name), first.first) for name in others
            }
            self.num_stages = len(first.parts)
        else:
            self._whole = _Stage(self._shapes, lambda name, packed: self._open(name))

    @functools.cached_property
    def left_out(self) -> Shorter | None:
        """The parts of a large model that have the forms of others."""
        return shorten(self._splits) if self.in_parts else None

    @functools.cached_property
    def kept(self) -> list[int]:
        """The places, among the model's caches, of those that the parts not left out have."""
        names = list(self._shapes)
        if self.left_out is None:
            return list(range(len(names)))
        decoder = self._splits["decoder"].parts
        kept = [*decoder[: self.left_out.end], *decoder[self.left_out.start :]]
        return [i for i, name in enumerate(names) if any(name in part.inputs for part in kept)]

    def _path(self, name: str) -> Path:
        return self.folder / self.lengths[name].file(self.ops)

    def play(
        self,
        actions: list[Action],
        advance: Advance = lambda amount: None,
        through: Sequence[Action] = (),
    ) -> list[Any]:
        """What each action gives, in order; `advance` is told of each stage.

        First come those that go `through` all parts; the others skip those that are left out, and
        have the caches that are kept.
        """
        num_through = len(through)
        actions = [*through, *actions]
        passes = {i: _inputs(a) for i, a in enumerate(actions) if isinstance(a, Pass)}
        results: list[Any] = [_begun(action) for action in actions]
        index = {name: i for i, name in enumerate(self._shapes)}
        kept = {at: i for i, at in enumerate(self.kept)}
        with contextlib.closing(self._stages()) as stages:
            for number, stage in enumerate(stages):
                left_out = self.left_out is not None and self.left_out.has(number)
                for i in stage.order(actions[:num_through] if left_out else actions):
                    action, shorter = actions[i], i >= num_through
                    if isinstance(action, Pass):
                        made = stage.run(action, passes[i])
                        if self.left_out is not None and shorter:
                            made |= self.left_out.standing_in(action.name, made)
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
                        at = {name: index[name] for name in stage.caches}
                        places = {n: kept[i] for n, i in at.items()} if shorter else at
                        stage.fill({name: action.past(place) for name, place in places.items()})
                advance(1)
        return results

    def check_files(self) -> None:
        """Load every file as it is, without copies of its weights."""
        for name in self.lengths:
            options = _unpacked()
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
            self._load(name, self._path(name), options)

    def _stages(self) -> Generator[_Stage, None, None]:
        if not self.in_parts:
            yield self._whole
            return
        decoder, memory = self._splits["decoder"], Memory()
        for i, part in enumerate(decoder.parts):
            caches = {n: shape for n, shape in self._shapes.items() if n in part.inputs}
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
        """Without caches passes are independent: those of one session come together.

        The decoder's come first, with which others are compared.
        """
        if self.caches:
            return list(range(len(actions)))
        passes = [
            (a.name != "decoder", a.name, a.packed, i)
            for i, a in enumerate(actions)
            if isinstance(a, Pass)
        ]
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


def _begun(action: Action) -> Any:
    if not isinstance(action, Rows):
        return None
    return [] if action.into is None else action.into


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
