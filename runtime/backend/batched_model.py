"""Slots of a model that share passes: one pass reads tokens of several sequences.

The caches of all slots are one buffer per tensor, [B, H, S, D], of which each slot has a slice. A
pass of one slot runs on the slice, and a pass of several on the whole buffers. B slots, T tokens of
all sequences together, N rows of the block that attention reads, R rows of logits.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from specedge.bundle import Bundle
from specedge.bundle.batched_signature import BATCHED, BATCHED_INPUTS
from specedge.bundle.manifest import ModelEntry

from ..sampling.distribution import Ids
from ..sampling.logits import Logits
from .buffers import Array
from .kv_cache import KeyValueCache, cache_arrays
from .model_session import BoundPass, ModelSession
from .sessions import Device


class BatchedSession(ModelSession):
    """Session of the batched graph; passes of one sequence are bound as with the decoder."""

    def __init__(self, bundle: Bundle, model: ModelEntry, device: Device, ops: str) -> None:
        super().__init__(bundle, model, device, ops, BATCHED)

    def _constant(self, role: str, length: int, num_logits: int) -> Sequence[Any] | None:
        values = {
            "block_rows": [[*range(length), length - 1]],
            "packed_rows": range(length),
            "logits_rows": range(length - num_logits, length),
            "query_lengths": [length + 1],
        }
        return values.get(role)

    def _write_positions(self, bound: BoundPass) -> None:
        start, end = bound.cache.length, bound.cache.length + bound.length
        self.buffers.write(bound.arrays["positions"], range(start, end))
        self.buffers.write(bound.arrays["last_positions"], [end])

    def bind_slots(self, arrays: Mapping[str, Array]) -> Any:
        """Return a binding of the buffers of all slots, by name."""
        with self.translated():
            binding = self._session.io_binding()
            inputs = {t.name: arrays[t.state] for t in self._signature.inputs if t.state}
            outputs = {t.name: arrays[t.state] for t in self._signature.outputs if t.state}
            self.buffers.bind(binding, inputs, outputs)
        return binding

    def run_slots(
        self, binding: Any, inputs: Mapping[str, Array], outputs: Mapping[str, Array]
    ) -> None:
        """Run a pass over the sequences of all slots.

        Args:
            binding: Binding of the buffers, and of the inputs of earlier passes.
            inputs: Inputs to bind again, by name.
            outputs: Arrays that receive the logits [1, R, V] and hidden states [1, T, F], by name.
        """
        with self.translated():
            self.buffers.bind(binding, inputs, outputs)
            self.buffers.run(self._session, binding, None)


class SlotModel(Protocol):
    """Model of one slot.

    Attributes:
        cache: Cache of the slot.
        ids: Tokens of the columns of logits; None for all tokens.
    """

    cache: KeyValueCache
    ids: Ids | None

    def can_share(self, length: int) -> bool:
        """Return True if the next `length` tokens may be in a pass that slots share."""

    def forward(self, tokens: Sequence[int], num_rows: int | None = None) -> Logits:
        """Run a pass of this slot alone."""

    def prefill(self, tokens: Sequence[int]) -> None:
        """Run a pass of this slot alone, without logits."""

    def set_hidden(self, states: Array) -> None:
        """Set the hidden states of the slot's tokens in a shared pass. [T, F]"""


class OrtBatchedModel:
    """Passes over several slots of a model at once.

    Attributes:
        caches: Caches of the slots.
        capacity: Rows of each cache.
        max_rows: Most rows of one pass for which every sequence's rows were bitwise equal to those
            of the sequence alone, on this machine; 0 if they were not, or are not tested.
        max_logits: Most rows of logits of such a pass.
    """

    def __init__(self, session: BatchedSession, num_slots: int) -> None:
        model, buffers = session.model, session.buffers
        with session.translated():
            arrays = cache_arrays(model, session.ops, _allocate, num_slots)
        slices = [{n: x[i : i + 1] for n, x in arrays.items()} for i in range(num_slots)]
        self.caches = tuple(KeyValueCache(arrays, buffers) for arrays in slices)
        self.max_rows = self.max_logits = 0
        self._session = session
        self._slot_of = {cache: i for i, cache in enumerate(self.caches)}
        self.capacity = model.capacity
        self._binding = session.bind_slots(arrays)
        self._unbind_inputs()

    def forward(self, feeds: Sequence[tuple[SlotModel, Sequence[int], int]]) -> list[Logits | None]:
        """Append tokens to the caches of several slots in one pass.

        A slot whose context is almost full runs a pass of its own if it is beside a longer feed,
        since attention needs room for a block of equally many rows per sequence. So does one whose
        pass has to be split.

        Args:
            feeds: Models of different slots, each with its new tokens, and the number of trailing
                rows whose logits are needed, 0 for a chunk of a prompt.

        Returns:
            The logits of each feed, None for 0 rows. They stay valid, since outputs are new arrays.
        """
        block_length = 1 + max(len(tokens) for _, tokens, _ in feeds)
        last = self.capacity - block_length
        together = [
            i
            for i, (model, tokens, _) in enumerate(feeds)
            if model.cache.length <= last and model.can_share(len(tokens))
        ]
        if len(together) < 2:
            together = []
        shared = self._run([feeds[i] for i in together], block_length) if together else []
        rows = dict(zip(together, shared, strict=True))
        results: list[Logits | None] = []
        for i, (model, tokens, num_rows) in enumerate(feeds):
            if i in rows:
                results.append(Logits(rows[i], model.ids) if num_rows else None)
            elif num_rows:
                results.append(model.forward(tokens, num_rows))
            else:
                model.prefill(tokens)
                results.append(None)
        return results

    def _run(
        self, feeds: Sequence[tuple[SlotModel, Sequence[int], int]], block_length: int
    ) -> list[Array]:
        """Run one pass; return the rows of logits of each feed."""
        num_slots = len(self.caches)
        ids: list[int] = []
        positions: list[int] = []
        packed: list[int] = []
        with_logits: list[int] = []
        block = np.zeros((num_slots, block_length), np.int64)
        last_positions, query_lengths = [0] * num_slots, [0] * num_slots
        for model, tokens, num_rows in feeds:
            slot, past = self._slot_of[model.cache], model.cache.length
            start, length = len(ids), len(tokens)
            end = start + length
            ids += tokens
            positions += range(past, past + length)
            packed += range(slot * block_length, slot * block_length + length)
            with_logits += range(end - num_rows, end)
            block[slot, : length + 1] = [*range(start, end), end - 1]
            last_positions[slot], query_lengths[slot] = past + length, length + 1
        with_logits = with_logits or [0]  # ONNX Runtime 1.28 cannot multiply an empty matrix
        inputs = {
            "input_ids": [ids],
            "positions": [positions],
            "block_rows": block,
            "packed_rows": packed,
            "logits_rows": with_logits,
            "last_positions": last_positions,
            "query_lengths": query_lengths,
        }
        width, padded = self._session.model.num_columns, self._session.model.padded_vocab_size
        logits = np.empty((1, len(with_logits), padded), np.float32)
        outputs, hidden = {"logits": logits}, self._session.model.hidden
        if hidden is not None:
            outputs["hidden"] = np.empty((1, len(ids), hidden.size), np.float32)
        try:
            self._session.run_slots(self._binding, self._stage(inputs), outputs)
        except BaseException:  # perhaps an interrupt, before arrays were bound
            self._unbind_inputs()
            raise
        rows, end, start = [], 0, 0
        for model, tokens, num_rows in feeds:
            model.cache.extend(tokens)
            if hidden is not None:
                model.set_hidden(outputs["hidden"][0, start : start + len(tokens)])
                start += len(tokens)
            rows.append(logits[0, end : end + num_rows, :width])
            end += num_rows
        return rows

    def _unbind_inputs(self) -> None:
        """Let the next pass bind all inputs."""
        self._inputs = {port.name: np.zeros(0, port.dtype) for port in BATCHED_INPUTS}

    def _stage(self, inputs: Mapping[str, Any]) -> dict[str, Array]:
        """Write the inputs of a pass; return those whose arrays are new."""
        new: dict[str, Array] = {}
        for name, values in inputs.items():
            array = np.asarray(values, self._inputs[name].dtype)
            if array.shape == self._inputs[name].shape:
                self._inputs[name][...] = array
            else:
                self._inputs[name] = new[name] = array
        return new


def _allocate(shape: Sequence[int], dtype: str) -> Array:
    """Allocate zeros that take memory by the page, from its first write on.

    NumPy uses huge pages for arrays from 4 MB on, of which short texts would fill all.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    options = {}
    if sys.platform != "win32":
        options["flags"] = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        memory = mmap.mmap(-1, size, **options)
    except OSError as error:
        raise MemoryError from error
    return np.frombuffer(memory, dtype).reshape(shape)
