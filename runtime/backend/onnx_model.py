"""A language model on ONNX Runtime: passes over a cache in place, rollback by length."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from specedge.bundle import MANIFEST, Bundle
from specedge.graph_file import check_graph
from specedge.manifest import PREFILL_LENGTH, Model
from specedge.precision import precision_of
from specedge.signature import Tensor

from ..sampling.scores import Scores
from .buffers import Array, Buffers
from .cache import Cache
from .contract import check_contract, choose_ops
from .memory import enough_memory
from .sessions import Device, onnxruntime, translated_errors


@dataclass
class Pass:
    """A binding for one number of tokens, with its own arrays by their roles."""

    binding: Any
    arrays: dict[str, Array] = field(default_factory=dict)


class OrtModel:
    """One model of a bundle, with a cache of its own: passes are bound to buffers on its device."""

    def __init__(
        self,
        bundle: Bundle,
        model: Model,
        device: Device,
        ops: str = "auto",
        graph: str = "decoder",
    ) -> None:
        """Open one of the model's graphs; one of a fixed shape takes passes of its length alone."""
        self.ops = choose_ops(model, ops)
        self.vocab_size, self.num_experts = model.vocab_size, model.num_experts
        parity = model.parity[self.ops]
        held = parity.row_independent_lengths if device.name == "cpu" else ()
        self.row_independent_lengths = held
        self.float32_error = parity.logits_error
        self._model, self._buffers = model, Buffers()
        where = f"{bundle.folder / MANIFEST}: {model.source.id}"
        precision_of(where, model.dtype, model.cache.dtype)
        entry = model.graph(graph, self.ops)
        self._signature = model.signatures[entry.signature]
        path = bundle.path(entry.file)
        check_graph(bundle, entry.file)
        with enough_memory(model):
            self._session = device.open(path)
        check_contract(self._session, entry, self._signature, path)
        self._without_logits = onnxruntime().RunOptions()
        self._without_logits.only_execute_path_to_fetches = True
        self._forget_all()

    def _forget_all(self) -> None:
        with enough_memory(self._model):
            self.cache = Cache(self._model, self._buffers)
        self._passes: dict[int, Pass] = {}

    @property
    def length(self) -> int:
        return self.cache.length

    def forward(self, tokens: Sequence[int]) -> Scores:
        length = len(tokens)
        if length not in self._passes:
            self._passes[length] = self._bind(length, logits=True)
        bound = self._passes[length]
        self._run(bound, tokens)
        logits = self._buffers.fetch(bound.arrays["logits"])
        return Scores(logits[0, :, : self.vocab_size])

    def prefill(self, tokens: Sequence[int]) -> None:
        for start in range(0, len(tokens), PREFILL_LENGTH):
            chunk = tokens[start : start + PREFILL_LENGTH]
            self._run(self._bind(len(chunk), logits=False), chunk)

    def reuse(self, tokens: Sequence[int]) -> int:
        return self.cache.reuse(tokens)

    def truncate(self, length: int) -> None:
        self.cache.truncate(length)

    def cache_rows(self, start: int, end: int) -> list[Array]:
        return self.cache.rows(start, end)

    def twin(self) -> OrtModel:
        """The same model with a cache of its own; the weights are shared."""
        twin = copy.copy(self)
        twin._forget_all()
        return twin

    def _bind(self, length: int, logits: bool) -> Pass:
        """A pass of `length` tokens, whose cache buffers are each input and output."""
        with self._translated():
            bound = Pass(self._session.io_binding())
            wanted = [t for t in self._signature.outputs if logits or t.role != "logits"]
            inputs = {t.name: self._array(t, bound, length) for t in self._signature.inputs}
            outputs = {t.name: self._array(t, bound, length) for t in wanted}
            self._buffers.bind(bound.binding, inputs, outputs)
        return bound

    def _array(self, tensor: Tensor, bound: Pass, length: int) -> Array:
        """A buffer of the cache, or an array of the pass's own."""
        if tensor.buffer is not None:
            return self.cache.arrays[tensor.buffer]
        array = self._buffers.zeros(tensor.at(1, length), tensor.dtype)
        bound.arrays[tensor.role] = array
        return array

    def _run(self, bound: Pass, tokens: Sequence[int]) -> None:
        """Read the tokens into the cache, and into the logits where the pass has any."""
        with self._translated():
            self._buffers.write(bound.arrays["tokens"], tokens)
            self._buffers.write(bound.arrays["past_length"], [self.length])
            options = None if "logits" in bound.arrays else self._without_logits
            self._session.run_with_iobinding(bound.binding, options)
            self.cache.extend(tokens)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn what ONNX Runtime raises in a pass, binding included, into our errors."""
        what = f"a pass of {self._model.source.id}"
        with enough_memory(self._model), translated_errors(what):
            yield
