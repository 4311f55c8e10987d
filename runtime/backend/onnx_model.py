"""Language model on ONNX Runtime: passes that update a cache in place, and rollback."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np

from specedge.attention_kernels import pass_boundaries
from specedge.bundle import Bundle
from specedge.bundle.gpu_signatures import ONE_CALL, UNROLLED
from specedge.bundle.graph_variants import has_compute_type
from specedge.bundle.manifest import FUSE, OPEN, ModelEntry, chunk_length
from specedge.bundle.precision import QUANTIZED_DTYPES
from specedge.errors import SpecEdgeError
from specedge.sampling_options import Sampling

from ..decoding.observed_states import ObservedStates
from ..decoding.protocols import Feed
from ..decoding.verification import Draft, DraftRequest, draw_draft
from ..sampling.distribution import Floats
from ..sampling.history import History
from ..sampling.logits import Logits, Row
from ..sampling.source import Source
from .batched_model import OrtBatchedModel
from .buffers import Array
from .cuda.device_logits import DeviceLogits
from .cuda.draft_graphs import DraftGraph, GreedyDraftGraph, SampledDraftGraph
from .kv_cache import KeyValueCache
from .model_session import BoundPass, ModelSession
from .sessions import Device
from .source_encoder import SourceEncoder, synthetic_hidden

_HALF = np.array([0.5])


class OrtModel:
    """Model of a bundle with a separate cache."""

    def __init__(
        self,
        bundle: Bundle,
        model: ModelEntry,
        device: Device,
        ops: str = "auto",
        graph: str = "decoder",
        session: ModelSession | None = None,
        cache: KeyValueCache | None = None,
        encoder: SourceEncoder | None = None,
    ) -> None:
        """Open one of the model's graphs, or use `session`, and create a cache or use `cache`.

        A fixed-shape graph runs passes of its length only. An encoder-decoder opens its encoder,
        or uses `encoder`.
        """
        self._session = session or ModelSession(bundle, model, device, ops, graph)
        self._encoder, self._opener = encoder, None
        if model.encoder is not None:
            self._encoder = encoder or SourceEncoder(bundle, model, device, ops)
            self._opener = ModelSession(bundle, model, device, self._session.ops, OPEN)
        self.ops = self._session.ops
        self._fuser = None
        if model.has(FUSE, self.ops):
            self._fuser = ModelSession(bundle, model, device, self.ops, FUSE)
        self.vocab_size = model.vocab_size
        ids = bundle.ids_of(model)
        self.ids = None if ids is None else np.array(ids, np.intp)
        parity = model.parity[self.ops]
        self.invariant_lengths = parity.invariant_lengths if device.is_cpu else ()
        self._boundaries = pass_boundaries(model.states, self.ops) if device.is_cpu else ()
        self.float32_error = parity.logits_error
        self.num_experts = model.num_experts
        dtype = model.weights_dtype
        self.rounds_inputs = dtype in QUANTIZED_DTYPES and not has_compute_type(self.ops)
        # On CUDA, 8-bit MatMulNBits dequantizes the whole matrix for more than 5 rows.
        is_limited = not device.is_cpu and dtype in ("int8", "int8-block")
        self.fast_length = 5 if is_limited else sys.maxsize
        self.chunk_length = chunk_length(model.capacity)
        self._num_columns = model.num_columns
        k = bundle.num_draft_tokens
        self.mask_token = model.mask_token
        self._longest = k + 1 if model.mask_token is None else 2 * k
        self._reset(self._session.cache() if cache is None else cache)

    def _reset(self, cache: KeyValueCache) -> None:
        self.cache = cache
        self.batch: OrtBatchedModel | None = None
        # By pass length and number of rows of logits
        self._passes: dict[tuple[int, int], BoundPass] = {}
        self._last_pass: tuple[BoundPass, int] | Array | None = None
        self.observed: ObservedStates | None = None
        states = self._session.model.hidden
        if states is not None and states.draft_size is not None:
            self.observed = ObservedStates(states.size)
        self._draft_graphs: list[DraftGraph] = []
        if (encoder := self._session.model.encoder) is not None:
            # Self-tests and measurements need constant states that differ by row.
            self._open(None, synthetic_hidden(encoder))

    @property
    def source(self) -> Source | None:
        """Source of the constant states of an encoder-decoder."""
        return self.cache.source

    def open(self, source: Source) -> None:
        """Set the constant states to those of a source; empty the cache if it was another one."""
        if source != self.source and self._encoder is not None:
            self._open(source, self._encoder.hidden(source))

    def forget(self) -> None:
        """Compute the constant states again when a source is opened next."""
        self.cache.source = None
        if self._encoder is not None:
            self._encoder.forget()

    def _open(self, source: Source | None, hidden: Array) -> None:
        assert self._opener is not None
        self.cache.open(hidden.shape[1])
        self._opener.map(hidden, self.cache.arrays)
        self.cache.source = source

    @property
    def hidden(self) -> Array:
        """Hidden states that the last pass returned, valid until the next pass. [T, F or H]"""
        assert self._last_pass is not None
        if not isinstance(self._last_pass, tuple):
            return self._last_pass
        bound, length = self._last_pass
        name = "hidden" if self.observed is None else "next_hidden"
        states: Array = self._session.buffers.fetch(bound.arrays[name])
        return states[0, :length]

    def set_hidden(self, states: Array) -> None:
        """Set the hidden states of a pass that the model shared with others. [T, F]"""
        self._last_pass = states

    def fuse(self, hidden: Array) -> Array:
        """Return the states that a draft head reads, for those of the target. [n, F] -> [n, H]"""
        if self._fuser is None:
            return hidden
        states = self._session.model.hidden
        assert states is not None
        buffers = self._fuser.buffers
        fused = buffers.zeros((1, len(hidden), states.draft_size or states.size), "float32")
        self._fuser.map(hidden[np.newaxis], {"hidden": fused})
        result: Array = buffers.fetch(fused)[0]
        return result

    @property
    def length(self) -> int:
        return self.cache.length

    @property
    def has_draft_graphs(self) -> bool:
        """True if it drafts by a multi-step graph for some requests."""
        return bool(self._draft_graphs)

    @property
    def min_length(self) -> int:
        """Shortest pass that is run; shorter ones are padded."""
        return self._session.min_length

    def forward(
        self, tokens: Sequence[int], num_rows: int | None = None, hidden: Array | None = None
    ) -> Logits:
        length = len(tokens)
        num_logits = length if num_rows is None else num_rows
        if self.longest_pass(length) < length:
            return Logits(self._run_parts(tokens, num_logits, hidden), self.ids)
        padded, rows = (max(n, self._session.min_length) for n in (length, num_logits))
        is_short = padded <= self._longest
        if is_short and self.observed is None and self.mask_token is None:
            rows = padded  # one binding for each length; others read most rows without logits
        bound = self._passes.get((padded, rows))
        if bound is None:
            bound = self._session.bind(self.cache, padded, rows, captured=is_short)
            if is_short or num_logits == length:  # not the end of a prompt
                self._passes[padded, rows] = bound
        self._run_pass(self._session, bound, tokens, hidden)
        end = length - (padded - rows)
        return self._scores(bound, end - num_logits, end)

    def longest_pass(self, length: int) -> int:
        """Return the length of the next pass over up to `length` tokens, until a boundary.

        Rows of a pass that crossed it would not be bitwise equal to those of shorter passes.
        """
        return min([length, *(end - self.length for end in self._ends if end > self.length)])

    def can_share(self, length: int) -> bool:
        """Return True if the next tokens may be in a pass that slots share, which is not padded."""
        is_padded = length < self.min_length
        return self.longest_pass(length) == length and not (is_padded and self.length in self._ends)

    @property
    def _ends(self) -> list[int]:
        """Cache lengths at which passes end; the row that pads a single token counts."""
        return [end - (self.min_length - 1) for end in self._boundaries]

    def _run_parts(self, tokens: Sequence[int], num_rows: int, hidden: Array | None) -> Array:
        """Run a pass in two parts, the first until a boundary; return logits of the last rows."""
        end, rows, states = self.longest_pass(len(tokens)), [], []
        num_left = len(tokens) - end
        for part, count in (
            (slice(end), num_rows - num_left),
            (slice(end, None), min(num_rows, num_left)),
        ):
            part_hidden = None if hidden is None else hidden[part]
            logits = Feed(self, tokens[part], max(0, count), part_hidden).run()
            if logits is not None:
                rows.append(logits.array().copy())
            if self._returns_hidden:
                states.append(self.hidden.copy())
        if states:
            self.set_hidden(np.concatenate(states))
        return np.concatenate(rows) if rows else np.zeros((0, self._num_columns), np.float32)

    @property
    def _returns_hidden(self) -> bool:
        return self._session.model.hidden is not None

    def _run_pass(
        self,
        session: ModelSession,
        bound: BoundPass,
        tokens: Sequence[int],
        hidden: Array | None = None,
    ) -> None:
        """Run a pass, of a draft head with a hidden state for each token, by default zeros."""
        inputs = None
        if self.observed is not None:
            states = np.zeros(bound.arrays["hidden"].shape, np.float32)
            if hidden is not None:
                states[0, : len(hidden)] = hidden
            inputs = {"hidden": states}
        session.run(bound, tokens, inputs)
        self._last_pass = bound, len(tokens)

    def _scores(self, bound: BoundPass, start: int, end: int) -> Logits:
        """Return some rows of a pass's logits."""
        fetch, arrays = self._session.buffers.fetch, bound.arrays
        if "best" not in arrays:
            return Logits(fetch(arrays["logits"])[0, start:end, : self._num_columns], self.ids)
        return DeviceLogits(
            lambda: fetch(arrays["logits"])[0, start:end, : self._num_columns],
            lambda: fetch(arrays["best"])[0, start:end],
            self._num_columns,
            self.ids,
        )

    def pad_single_tokens(self) -> None:
        """Run single tokens in passes of two rows, the second of which is discarded.

        Models with the same session share the setting. On CPUs without VNNI, 4-bit MatMulNBits has
        a separate kernel for one row, which rounds differently (onnxruntime issue 29853); a pass of
        two rows takes 1.1 to 1.2 times as long as a pass of one.
        """
        self._session.min_length = 2

    def warm_up(self, lengths: Iterable[int]) -> None:
        """Run a pass of each length as drafters do, for a GPU to capture; empties the cache."""
        num_rows = 1 if self.observed else None
        if self.mask_token is not None:
            num_rows = self._longest // 2
        for length in lengths:
            self.truncate(0)
            self.forward([0] * length, num_rows)
        self.truncate(0)

    def read_longest(self) -> None:
        """Allocate the memory of long prompts before other sessions do; empties the cache."""
        self.truncate(0)
        self.prefill([0] * min(self.chunk_length, self._session.model.context_length))
        self.truncate(0)

    def unroll(self, bundle: Bundle, model: ModelEntry, device: Device) -> str | None:
        """Enable multi-step draft graphs that are correct and faster, as measured.

        They need memory for further copies of the weights. Empties the cache.

        Returns:
            A note if a graph cannot be run.
        """
        try:
            for name in filter(lambda graph: model.has(graph, self.ops), ONE_CALL):
                session = ModelSession(bundle, model, device, self.ops, name)
                call = self._call(session, name)
                step = partial(self._drafted, _HALF)
                if call.measure(step, self._example) and self._drafts_equal_tokens(call):
                    self._draft_graphs.append(call)
        except SpecEdgeError as error:
            self.truncate(0)
            action = "samples drafts" if self._draft_graphs else "drafts"
            return f"{model.source.id} {action} by passes; its draft graph fails: {error}"
        return None

    def _call(self, session: ModelSession, name: str) -> DraftGraph:
        if name == UNROLLED:
            return GreedyDraftGraph(session, self.cache)
        return SampledDraftGraph(session, self.cache, self.ids)

    def _drafts_equal_tokens(self, call: DraftGraph) -> bool:
        """Return True if a draft graph gives the same tokens as passes; empties the cache."""
        numbers = np.linspace(0.05, 0.95, call.num_steps)
        for sampling in call.examples:
            request = DraftRequest(History([0]), len(numbers), sampling, numbers)
            draft = call.draft([0], request, self._example)
            self.truncate(0)
            if draft is None or draft.tokens != self._drafted(numbers, sampling):
                return False
        return True

    def unroll_as(self, other: OrtModel) -> None:
        """Enable the draft graphs of another model with the same weights; empties the cache."""
        self._draft_graphs = [call.over(self.cache) for call in other._draft_graphs]
        for call in self._draft_graphs:
            call.warm_up()

    @property
    def _example(self) -> Array | None:
        """Hidden state that a draft head reads in self-tests; None for other models. [1, H]"""
        states = self._session.model.hidden
        if states is None or states.draft_size is None:
            return None
        return np.linspace(-1, 1, states.draft_size, dtype=np.float32)[np.newaxis]

    def _drafted(self, uniforms: Floats, sampling: Sampling) -> list[int]:
        """Return the draft tokens after token 0, by passes; empties the cache."""
        self.truncate(0)

        def next_row(drafted: list[int]) -> Row:
            hidden = self._example
            if hidden is not None and drafted:
                hidden = self.hidden[-1:].copy()
            return self.forward(drafted[-1:] or [0], 1, hidden)[-1]

        draft = draw_draft(next_row, DraftRequest(History([0]), len(uniforms), sampling, uniforms))
        self.truncate(0)
        return draft.tokens

    def draft(
        self, tokens: Sequence[int], request: DraftRequest, hidden: Array | None = None
    ) -> Draft | None:
        """Draft by a multi-step graph; None if passes are faster or no graph applies."""
        history, sampling = request.history, request.sampling
        for call in self._draft_graphs:
            if call.supports(history, sampling) and call.is_faster(request.max_tokens, sampling):
                return call.draft(tokens, request, hidden)
        return None

    def prefill(self, tokens: Sequence[int], hidden: Array | None = None) -> None:
        for start in range(0, len(tokens), self.chunk_length):
            part = slice(start, start + self.chunk_length)
            chunk, states = tokens[part], None if hidden is None else hidden[part]
            if self.longest_pass(len(chunk)) < len(chunk):
                self._run_parts(chunk, 0, states)
                continue
            length = max(len(chunk), self._session.min_length)
            # One row of unused logits: ONNX Runtime 1.28 cannot multiply an empty matrix.
            bound = self._session.bind(self.cache, length, 1)
            self._run_pass(self._session, bound, chunk, states)

    def shared(self, tokens: Sequence[int], source: Source | None = None) -> int:
        return self.cache.shared(tokens, source)

    def reuse(self, tokens: Sequence[int]) -> int:
        return self.cache.reuse(tokens)

    def truncate(self, length: int) -> None:
        self.cache.truncate(length)

    def cache_rows(self, start: int, end: int) -> list[Array]:
        """Copy a range of cache rows, as `KeyValueCache.rows`."""
        return self.cache.rows(start, end)

    def with_new_cache(self) -> OrtModel:
        """Return a model with the same weights and a new cache."""
        model = copy.copy(self)
        model._reset(self._session.cache())
        return model

    def close(self) -> None:
        """Free the cache and, if no other model shares them, the weights."""
        with self._session.buffers.release():
            self._drop()

    def _drop(self) -> None:
        del self.cache, self.batch, self._passes, self._draft_graphs, self._session
        del self._encoder, self._opener, self._fuser, self._last_pass, self.observed
