"""A language model on ONNX Runtime: passes over a cache in place, rollback by length."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress

import numpy as np

from specedge.bundle import Bundle
from specedge.errors import DeviceError
from specedge.manifest import UNROLLED, Model, chunk_length
from specedge.op_sets import is_typed
from specedge.precision import QUANTISED

from ..sampling.scores import Scores
from .buffers import Array
from .device_scores import DeviceScores
from .model_session import ModelSession, Pass
from .sessions import Device
from .unrolled import Unrolled


class OrtModel:
    """One model of a bundle, with a cache of its own."""

    def __init__(
        self,
        bundle: Bundle,
        model: Model,
        device: Device,
        ops: str = "auto",
        graph: str = "decoder",
        session: ModelSession | None = None,
    ) -> None:
        """Open one of the model's graphs, or take one that is open; one of a fixed shape takes
        passes of its length alone.
        """
        self._session = session or ModelSession(bundle, model, device, ops, graph)
        self.ops = self._session.ops
        self.vocab_size = model.vocab_size
        ids = bundle.ids_of(model)
        self._ids = None if ids is None else np.array(ids, np.intp)
        parity = model.parity[self.ops]
        self.row_independent_lengths = parity.row_independent_lengths if device.is_cpu else ()
        self.float32_error = parity.logits_error
        self.num_experts = model.num_experts
        bits = model.weights_dtype
        self.rounds_inputs = bits in QUANTISED and not is_typed(self.ops)
        # MatMulNBits of 8 bits widens the whole matrix on CUDA beyond 5 rows.
        narrow = not device.is_cpu and bits in ("int8", "int8-block")
        self.fast_length = 5 if narrow else sys.maxsize
        self._chunk_length = chunk_length(model.cache.capacity)
        self._num_columns = model.num_columns
        self._longest = bundle.num_draft_tokens + 1
        self._forget_all()

    def _forget_all(self) -> None:
        self.cache = self._session.cache()
        self._passes: dict[int, Pass] = {}
        self._unrolled: Unrolled | None = None

    @property
    def length(self) -> int:
        return self.cache.length

    def forward(self, tokens: Sequence[int]) -> Scores:
        length = len(tokens)
        if length not in self._passes:
            captured = length <= self._longest
            self._passes[length] = self._session.bind(self.cache, length, length, captured)
        bound = self._passes[length]
        self._session.run(bound, tokens)
        return self._scores(bound, length)

    def _scores(self, bound: Pass, length: int) -> Scores:
        """What a pass gives of its first `length` rows."""
        fetch, arrays = self._session.buffers.fetch, bound.arrays
        if "best" not in arrays:
            return Scores(fetch(arrays["logits"])[0, :length, : self._num_columns], self._ids)
        return DeviceScores(
            lambda: fetch(arrays["logits"])[0, :, : self._num_columns],
            lambda: fetch(arrays["best"])[0],
            self._num_columns,
            self._ids,
        )

    def warm_up(self, lengths: Iterable[int]) -> None:
        """Run passes of T once, for a GPU to capture; the cache is then empty."""
        for length in lengths:
            self.truncate(0)
            self.forward([0] * length)
        self.truncate(0)

    def unroll(self, bundle: Bundle, model: Model, device: Device) -> None:
        """Let it draft greedily in one call where the bundle has a graph for that, memory for its
        own copy of the weights is left, it drafts what passes draft, and faster, as is measured;
        the cache is then empty.
        """
        if not model.has(UNROLLED, self.ops):
            return
        with suppress(DeviceError):
            session = ModelSession(bundle, model, device, self.ops, UNROLLED)
            unrolled = Unrolled(session, self.cache)
            unrolled.measure(lambda: self.forward([0])[-1].largest(1))
            count = unrolled.num_steps
            is_right = unrolled.draft([0], count) == self._drafted(count)
            self._unrolled = unrolled if is_right and unrolled.least <= count else None

    def unroll_as(self, other: OrtModel) -> None:
        """Draft as another model of the same weights does; the cache is then empty."""
        if other._unrolled is not None:
            self._unrolled = other._unrolled.over(self.cache)
            self._unrolled.warm_up()

    def _drafted(self, count: int) -> list[int]:
        """The likeliest tokens after token 0, by passes; the cache is then empty."""
        self.truncate(0)
        found = [0]
        for _ in range(count):
            found.append(int(self.forward(found[-1:])[-1].largest(1)[0][0]))
        self.truncate(0)
        return found[1:]

    def draft_greedily(self, tokens: Sequence[int], count: int) -> list[int] | None:
        """The `count` likeliest tokens after these, which are read, too; None where passes are
        faster.
        """
        if self._unrolled is None or count < self._unrolled.least:
            return None
        return self._unrolled.draft(tokens, count)

    def prefill(self, tokens: Sequence[int]) -> None:
        for start in range(0, len(tokens), self._chunk_length):
            chunk = tokens[start : start + self._chunk_length]
            # One row of logits, which nobody reads: of none ONNX Runtime 1.28 makes no products.
            self._session.run(self._session.bind(self.cache, len(chunk), 1), chunk)

    def shared(self, tokens: Sequence[int]) -> int:
        return self.cache.shared(tokens)

    def reuse(self, tokens: Sequence[int]) -> int:
        return self.cache.reuse(tokens)

    def truncate(self, length: int) -> None:
        self.cache.truncate(length)

    def cache_rows(self, start: int, end: int) -> list[Array]:
        """A copy of rows of every cache buffer. -> [H, end - start, D] each"""
        return self.cache.rows(start, end)

    def twin(self) -> OrtModel:
        """The same model with a cache of its own; the weights are shared."""
        twin = copy.copy(self)
        twin._forget_all()
        return twin

    def close(self) -> None:
        """Give back the memory of its caches and, with its last twin, of its weights."""
        del self.cache, self._passes, self._unrolled, self._session
