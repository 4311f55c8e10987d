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

from specedge.bundle.op_sets import cache_dtype
from specedge.errors import ExportError

from ..checkpoint.lazy_weights import Memory
from ..graph.graphs import Length
from ..graph.weights import FILE
from ..progress import Advance
from ..quiet import explained
from ..tracing.geometry import Geometry
from . import partition
from .shorter import Shorter, shorten
from .stage import Stage, Values, open_session, unpacked

WHOLE_BYTES = 100_000_000  # of weights; larger models are run part by part


@dataclass(frozen=True)
class Pass:
    """One pass over the caches: [T] tokens at `past_length` -> [T, V], or None without logits.

    The decoder gives those from row `logits_from` on: [T - logits_from, V]. Of a model in parts
    only a `packed` pass has its weights packed, as a host's session would have them: that costs a
    copy of them and gives other last bits. `then` takes the logits and gives what is kept of them;
    `told` takes all values that each stage makes.
    """

    name: str
    tokens: np.ndarray
    past_length: int
    logits_from: int = 0
    packed: bool = False
    then: Callable[[np.ndarray], Any] | None = None
    told: Callable[[Values], None] | None = None


@dataclass(frozen=True)
class Fill:
    """Put `past(i)`, [H, n, D], into the first rows of cache i."""

    history: Callable[[int], np.ndarray]


@dataclass(frozen=True)
class FillNoise:
    """Write noise to rows that hold nothing, or that a rollback left behind."""

    start: int
    end: int


@dataclass(frozen=True)
class Repeat:
    """Write the caches' first `length` rows behind themselves, again and again, up to row `end`."""

    length: int
    end: int


@dataclass(frozen=True)
class Rows:
    """A copy of the caches' rows, each [H, end - start, D]; the list is `into` if that is given."""

    start: int
    end: int
    into: list[np.ndarray] | None = None


Action = Pass | Fill | FillNoise | Repeat | Rows


class Runner:
    """One op set of a model over caches [1, H, S, D]; a run begins by filling them."""

    def __init__(
        self, folder: Path, lengths: list[Length], geometry: Geometry, ops: str = "onnx"
    ) -> None:
        self.folder, self.geometry, self.ops = folder, geometry, ops
        self.lengths = {length.name: length for length in lengths}
        self.in_parts = (folder / FILE).stat().st_size > WHOLE_BYTES
        self._dtype = cache_dtype(ops)
        self._shapes = dict(zip(geometry.cache_names(), geometry.cache_shapes(), strict=True))
        self._splits: dict[str, partition.Split] = {}
        self.num_stages = 1
        if self.in_parts:
            # The CPU has few kernels of 16 bits: casts come around the others.
            given = self._dtype == "float32"
            first = partition.Split(self.path("decoder"), given=given)
            others = (name for name in self.lengths if name != "decoder")
            self._splits = {"decoder": first} | {
                name: partition.Split(self.path(name), first.first, given) for name in others
            }
            self.num_stages = len(first.parts)
        else:
            self._whole = Stage(
                self._shapes, self._dtype, lambda name, _: self._load(name, ort.SessionOptions())
            )

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

    def path(self, name: str) -> Path:
        return self.folder / self.lengths[name].file(self.ops)

    def run(
        self,
        actions: list[Action],
        advance: Advance = lambda amount: None,
        through: Sequence[Action] = (),
    ) -> list[Any]:
        """What each action gives, in order; `advance` is told of each stage.

        First come those that go `through` all parts; the others skip those that are left out, and
        have the caches that are kept.
        """
        actions = [*through, *actions]
        passes = {i: _inputs(a) for i, a in enumerate(actions) if isinstance(a, Pass)}
        results: list[Any] = [_begun(action) for action in actions]
        index = {name: i for i, name in enumerate(self._shapes)}
        kept = {at: i for i, at in enumerate(self.kept)}
        with contextlib.closing(self._stages()) as stages:
            for number, stage in enumerate(stages):
                left_out = self.left_out is not None and self.left_out.has(number)
                for i in _order(through if left_out else actions, bool(stage.caches)):
                    action, shorter = actions[i], i >= len(through)
                    if isinstance(action, Pass):
                        made = stage.run(action.name, action.packed, passes[i])
                        if action.told:
                            action.told(made)
                        if self.left_out is not None and shorter:
                            stands_for = self.left_out.names[action.name]
                            made |= {name: made[x] for name, x in stands_for.items() if x in made}
                        passes[i] |= made
                        if (logits := passes[i].pop("logits", None)) is None:
                            continue
                        results[i] = action.then(logits[0]) if action.then else logits[0]
                    elif isinstance(action, Rows):
                        # Stages take the caches in order.
                        results[i] += stage.rows(action.start, action.end)
                    elif isinstance(action, FillNoise):
                        stage.fill_noise(action.start, action.end)
                    elif isinstance(action, Repeat):
                        stage.repeat(action.length, action.end)
                    else:
                        at = {name: index[name] for name in stage.caches}
                        places = {n: kept[i] for n, i in at.items()} if shorter else at
                        stage.fill({name: action.history(place) for name, place in places.items()})
                advance(1)
        return results

    def check_files(self) -> None:
        """Load every file as it is, without copies of its weights."""
        for name in self.lengths:
            self._check_file(name)

    def can_run(self) -> bool:
        """Load every file, too; False where all that ONNX Runtime lacks is kernels."""
        found = True
        for name in self.lengths:
            try:
                self._check_file(name)
            except ExportError as error:
                if type(error.__cause__).__name__ != "NotImplemented":
                    raise
                found = False
        return found

    def _check_file(self, name: str) -> None:
        options = unpacked()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._load(name, options)

    def _stages(self) -> Generator[Stage, None, None]:
        if not self.in_parts:
            yield self._whole
            return
        decoder, memory = self._splits["decoder"], Memory()
        for i, part in enumerate(decoder.parts):
            caches = {n: shape for n, shape in self._shapes.items() if n in part.inputs}
            with decoder.computed(i, memory) as given:
                values = {n: ort.OrtValue.ortvalue_from_numpy(v) for n, v in given.items()}
                open_ = functools.partial(self._open_part, i, values)
                stage = Stage(caches, self._dtype, open_)
                try:
                    yield stage
                finally:
                    stage.close()

    def _open_part(
        self, index: int, given: dict[str, ort.OrtValue], name: str, packed: bool
    ) -> ort.InferenceSession | None:
        split = self._splits[name]
        if index >= len(split.parts):
            return None
        options = ort.SessionOptions() if packed else unpacked()
        options.enable_cpu_mem_arena = False  # it takes up to twice what it gives
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(self.folder)
        )
        for constant in given.keys() & set(split.parts[index].constants):
            options.add_initializer(constant, given[constant])
        return self._load(name, options, split.model(index))

    def _load(
        self, name: str, options: ort.SessionOptions, part: bytes | None = None
    ) -> ort.InferenceSession:
        with explained(ExportError, f"ONNX Runtime cannot load {self.path(name).name}: "):
            return open_session(part or self.path(name), options)


def _begun(action: Action) -> Any:
    if not isinstance(action, Rows):
        return None
    return [] if action.into is None else action.into


def _inputs(action: Pass) -> Values:
    return {
        "input_ids": action.tokens[None].astype(np.int64),
        "past_length": np.array([action.past_length], np.int64),
        "logits_from": np.array([action.logits_from], np.int64),
    }


def _order(actions: Sequence[Action], has_caches: bool) -> list[int]:
    """Without caches passes are independent: those of one session come together.

    The decoder's come first, with which others are compared.
    """
    if has_caches:
        return list(range(len(actions)))
    passes = [
        (a.name != "decoder", a.name, a.packed, i)
        for i, a in enumerate(actions)
        if isinstance(a, Pass)
    ]
    return [i for *_, i in sorted(passes)]
