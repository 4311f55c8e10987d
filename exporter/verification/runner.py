"""Runner of exported graphs over one set of caches, bound in place, as in a host."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import onnxruntime as ort
import torch

from specedge.attention_kernels import batch_invariant_attention
from specedge.bundle.graph_variants import cache_dtype
from specedge.errors import ExportError

from ..checkpoint.placeholders import BufferPool
from ..graph.external_data import FILE, LazyWeights
from ..graph.graphs import GraphFile
from ..libraries import translate_errors
from ..progress import Advance
from ..tracing.geometry import Geometry
from ..tracing.hidden_states import HIDDEN_STATES
from . import partition
from .fused_states import FusedStates
from .partition import RepresentativeParts, find_representatives
from .source_states import SourceStates
from .subgraph import SubgraphSession, Values, open_session, unpacked_options

WHOLE_BYTES = 100_000_000  # weights; larger models are partitioned


@dataclass(frozen=True)
class PassAction:
    """One pass over the caches: [T] tokens at `past_length` -> [T, V], or None without logits.

    The decoder returns rows from `logits_from` on: [T - logits_from, V]. Sessions of a partitioned
    model prepack weights only for `packed` passes, which needs a copy of them and is not bitwise
    equal. `then` maps the logits to the result; `on_outputs` is called with each subgraph's
    outputs. `source` [N] are the tokens of an encoder-decoder's source, by default the runner's, or
    the text whose hidden states a draft reads.
    """

    name: str
    tokens: np.ndarray
    past_length: int
    logits_from: int = 0
    packed: bool = False
    then: Callable[[np.ndarray], Any] | None = None
    on_outputs: Callable[[Values], None] | None = None
    source: np.ndarray | None = None

    def inputs(self) -> Values:
        """Return the inputs of the graph, without its caches."""
        return {
            "input_ids": self.tokens[None].astype(np.int64),
            "past_length": np.array([self.past_length], np.int64),
            "logits_from": np.array([self.logits_from], np.int64),
        }


@dataclass(frozen=True)
class FillCaches:
    """Write `history(i)`, [H, n, D] or [B, H, n, D], to the first rows of cache i."""

    history: Callable[[int], np.ndarray]


@dataclass(frozen=True)
class FillNoise:
    """Write noise to rows that are unused or rolled back."""

    start: int
    end: int


@dataclass(frozen=True)
class RepeatRows:
    """Repeat the caches' first `length` rows after themselves up to row `end`."""

    length: int
    end: int


@dataclass(frozen=True)
class ReadRows:
    """Copy rows of the caches, [H, end - start, D] each, or [B, H, end - start, D] of several.

    `then` maps the name and the rows of a cache to the result.
    """

    start: int
    end: int
    then: Callable[[str, np.ndarray], Any] = lambda name, rows: rows


@dataclass(frozen=True)
class ReadHiddenStates:
    """Copy the hidden states that the previous pass returned, [T, F].

    `then` maps them to the result.
    """

    then: Callable[[np.ndarray], Any] = lambda states: states


Action = PassAction | FillCaches | FillNoise | RepeatRows | ReadRows | ReadHiddenStates


class Runner:
    """Runner of one graph variant of a model over caches [B, H, S, D].

    A batched graph, whose passes have several sequences, takes the decoder's place. `lazy` are
    weights by offset, which a large model's weights file may lack. `source` is that of passes of an
    encoder-decoder that have none, and `open_source` computes others. `fused` are the hidden states
    that passes of a draft read, by position.
    """

    def __init__(
        self,
        folder: Path,
        files: list[GraphFile],
        geometry: Geometry,
        ops: str = "onnx",
        lazy: LazyWeights | None = None,
        batch: int = 1,
        source: SourceStates | None = None,
        open_source: Callable[[np.ndarray], SourceStates] | None = None,
        fused: FusedStates | None = None,
    ) -> None:
        self.folder, self.geometry, self.ops = folder, geometry, ops
        self.lazy, self.fused = lazy, fused
        self.source, self._open_source = source, open_source
        self.files = {file.name: file for file in files}
        self._main = "decoder" if "decoder" in self.files else files[0].name
        self.in_parts = (folder / FILE).stat().st_size > WHOLE_BYTES
        self._dtype = cache_dtype(ops)
        shapes = (state.sizes(geometry.capacity, batch) for state in geometry.states)
        self._shapes = dict(zip(geometry.cache_names(), shapes, strict=True))
        self._splits: dict[str, partition.PartitionedGraph] = {}
        self._last_sessions: dict[str, SubgraphSession] = {}
        self.num_stages = 1
        if self.in_parts:
            # ONNX Runtime adds casts around operators without 16-bit CPU kernels.
            passes_constants = self._dtype == "float32"
            first = partition.PartitionedGraph(
                self.path(self._main), passes_constants=passes_constants, lazy=lazy
            )
            names = (name for name in self.files if name != self._main)
            self._splits = {self._main: first} | {
                name: partition.PartitionedGraph(
                    self.path(name), first.first, passes_constants, lazy
                )
                for name in names
            }
            self.num_stages = len(first.parts)
        else:
            self._whole = SubgraphSession(
                self._shapes, self._dtype, lambda name, _: self._load(name)
            )

    @functools.cached_property
    def representatives(self) -> RepresentativeParts | None:
        """Selection of subgraphs that represent all forms of a large model."""
        return find_representatives(self._splits) if self.in_parts else None

    def path(self, name: str) -> Path:
        """Return the path of a graph's file."""
        return self.folder / self.files[name].file_name(self.ops)

    def run(
        self,
        actions: Sequence[Action],
        advance: Advance = lambda amount: None,
        only_representative: bool = False,
    ) -> list[Any]:
        """Run actions and return their results in order.

        Args:
            actions: Passes, and changes and copies of cache rows.
            advance: Called after each subgraph.
            only_representative: Run representative subgraphs only, and the caches that they read.

        Raises:
            ExportError: ONNX Runtime cannot load or run a graph.
        """
        passes = {
            i: a.inputs() | self._constants(a)
            for i, a in enumerate(actions)
            if isinstance(a, PassAction)
        }
        results: list[Any] = [[] if isinstance(action, ReadRows) else None for action in actions]
        index = {name: i for i, name in enumerate(self._shapes)}
        chosen = self.representatives if only_representative else None
        with contextlib.closing(self._stages(chosen)) as sessions:
            for number, session in sessions:
                for i in _order_actions(actions, bool(session.caches)):
                    action = actions[i]
                    if isinstance(action, PassAction):
                        is_packed = action.packed and self.in_parts
                        outputs = session.run(action.name, is_packed, passes[i])
                        if action.on_outputs:
                            action.on_outputs(outputs)
                        names = chosen.names[action.name] if chosen else {}
                        outputs |= {new: outputs[x] for new, x in names.items() if x in outputs}
                        passes[i] = self._readable(action.name, number, passes[i] | outputs)
                        if (logits := outputs.get("logits")) is None:
                            continue
                        results[i] = action.then(logits[0]) if action.then else logits[0]
                    elif isinstance(action, ReadRows):
                        rows = session.rows(action.start, action.end)
                        results[i] += map(action.then, rows.keys(), rows.values())
                    elif isinstance(action, FillNoise):
                        session.fill_noise(action.start, action.end)
                    elif isinstance(action, RepeatRows):
                        session.repeat(action.length, action.end)
                    elif isinstance(action, FillCaches):
                        session.fill({n: action.history(index[n]) for n in session.caches})
                advance(1)
        last = 0
        for i, action in enumerate(actions):
            if isinstance(action, PassAction):
                last = i
            elif isinstance(action, ReadHiddenStates):
                name = cast(PassAction, actions[last]).name
                results[i] = action.then(self._hidden_states(name, passes[last])[0])
        return results

    def _hidden_states(self, file: str, values: Values) -> np.ndarray:
        """Return the hidden states of a pass from the values that are read after it. [1, T, F]"""
        if not self.in_parts:
            return values[self.geometry.hidden_output]
        split = self._splits[file]

        def open_(name: str, _: bool) -> ort.InferenceSession:
            return self._load(name, part=split.serialize(split.last))

        if file not in self._last_sessions:
            self._last_sessions[file] = SubgraphSession({}, self._dtype, open_)
        return self._last_sessions[file].run(file, False, values)[self.geometry.hidden_output]

    def _constants(self, action: PassAction) -> Values:
        if self.fused is not None:
            rows = self.fused.rows(action.past_length, len(action.tokens), action.source)
            return {HIDDEN_STATES: rows}
        source = self.source
        if action.source is not None and self._open_source is not None:
            source = self._open_source(action.source)
        return {} if source is None else source.inputs(self.geometry, self._dtype)

    def _readable(self, file: str, number: int, values: Values) -> Values:
        """Select the values that are read after subgraph `number`, or after a whole graph."""
        parts = self._splits[file].parts if self.in_parts else []
        later = parts[min(number, len(parts) - 1)].later if parts else {self.geometry.hidden_output}
        return {name: value for name, value in values.items() if name in later}

    def check_files(self) -> None:
        """Load every file without optimizations or copies of its weights. Raises ExportError."""
        for name in self.files:
            self._check_file(name)

    def can_run(self) -> bool:
        """Load every file; return False if ONNX Runtime has no kernels for one on this machine.

        Raises ExportError if a file cannot be loaded for another reason.
        """
        has_kernels = True
        for name in self.files:
            try:
                self._check_file(name)
            except ExportError as error:
                if type(error.__cause__).__name__ != "NotImplemented":
                    raise
                has_kernels = False
        return has_kernels

    def _check_file(self, name: str) -> None:
        options = unpacked_options()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._load(name, options)

    def _stages(
        self, chosen: RepresentativeParts | None
    ) -> Generator[tuple[int, SubgraphSession], None, None]:
        if not self.in_parts:
            yield 0, self._whole
            return
        decoder, memory = self._splits[self._main], BufferPool()
        for i, part in enumerate(decoder.parts):
            if chosen and i in chosen.skipped:
                continue
            caches = {n: shape for n, shape in self._shapes.items() if n in part.inputs}
            with decoder.computed(i, memory) as constants:
                values = {name: _ort_value(value) for name, value in constants.items()}
                open_ = functools.partial(self._open_part, i, values)
                session = SubgraphSession(caches, self._dtype, open_)
                try:
                    yield i, session
                finally:
                    session.close()

    def _open_part(
        self, index: int, constants: dict[str, ort.OrtValue], name: str, packed: bool
    ) -> ort.InferenceSession | None:
        split = self._splits[name]
        if index >= len(split.parts):
            return None
        options = ort.SessionOptions() if packed else unpacked_options()
        options.enable_cpu_mem_arena = False  # the arena allocates up to twice the memory
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(self.folder)
        )
        for constant in constants.keys() & set(split.parts[index].constants):
            options.add_initializer(constant, constants[constant])
        return self._load(name, options, split.model(index))

    def _load(
        self, name: str, options: ort.SessionOptions | None = None, part: bytes | None = None
    ) -> ort.InferenceSession:
        prefix = f"ONNX Runtime cannot load {self.path(name).name}: "
        states = self.geometry.states
        with translate_errors(ExportError, prefix), batch_invariant_attention(states):
            return open_session(part or self.path(name), options)


def _ort_value(tensor: torch.Tensor) -> ort.OrtValue:
    """Return a value of a session that shares the memory of a tensor."""
    if tensor.dtype != torch.bfloat16:
        return ort.OrtValue.ortvalue_from_numpy(tensor.numpy())
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(
        tensor.view(torch.uint16).numpy(), onnx.TensorProto.BFLOAT16
    )


def _order_actions(actions: Sequence[Action], has_caches: bool) -> list[int]:
    """Return the order of actions; passes without caches are independent and grouped by session.

    Passes of the decoder come first, because others are compared with them.
    """
    if has_caches:
        return list(range(len(actions)))
    passes = [
        (a.name != "decoder", a.name, a.packed, i)
        for i, a in enumerate(actions)
        if isinstance(a, PassAction)
    ]
    return [i for *_, i in sorted(passes)]
