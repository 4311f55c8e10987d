"""A language model on graphs of one length each, as devices want them that build an engine for one.

Passes between two lengths are padded. What padding writes lies behind the text, where nobody reads
it: a cache has K + 1 rows beyond the context, K being the bundle's number of draft tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from specedge.bundle import Bundle
from specedge.bundle.manifest import Model

from ..sampling.scores import Scores
from .model_session import ModelSession, Pass
from .onnx_model import OrtModel
from .sessions import Device

FIXED = ("step", "catchup", "verify", "prefill")  # the graphs, of which the last has no logits


class FixedLengthModel(OrtModel):
    """One model of a bundle whose passes have the lengths that its graphs have."""

    def __init__(self, bundle: Bundle, model: Model, device: Device, ops: str = "auto") -> None:
        self._sessions: dict[int, ModelSession] = {}
        for name in FIXED[:-1]:
            session = ModelSession(bundle, model, device, ops, name)
            assert session.length is not None
            self._sessions[session.length] = session
        self._prefill = ModelSession(bundle, model, device, ops, FIXED[-1])
        self._capacity = model.cache.capacity
        super().__init__(bundle, model, device, ops, session=self._sessions[1])

    def forward(self, tokens: Sequence[int], num_rows: int | None = None) -> Scores:
        """One pass, or several where no graph is so long."""
        longest = max(self._sessions)
        start = 0 if num_rows is None else len(tokens) - num_rows
        if len(tokens) <= longest:
            return self._scores(self._run(tokens), start, len(tokens))
        rows = [
            self._scores(self._run(part), 0, len(part)).array().copy()
            for part in (tokens[i : i + longest] for i in range(0, len(tokens), longest))
        ]
        return Scores(np.concatenate(rows)[start:], self._ids)

    def prefill(self, tokens: Sequence[int]) -> None:
        for part in self._parts(tokens):
            self._run(part, wants_logits=False)

    def _drop(self) -> None:
        super()._drop()
        del self._sessions, self._prefill

    def _parts(self, tokens: Sequence[int]) -> Iterator[Sequence[int]]:
        """A prompt in pieces that a pass reads; each has been read when the next is asked for."""
        start = 0
        while start < len(tokens):
            lengths = [*self._sessions]
            if self._fits_prefill():
                lengths.append(self._prefill_length)
            end = start + max(lengths)
            yield tokens[start:end]
            start = end

    @property
    def _prefill_length(self) -> int:
        assert self._prefill.length is not None
        return self._prefill.length

    def _fits_prefill(self) -> bool:
        """Whether its padded rows end within the cache."""
        return self.length + self._prefill_length <= self._capacity

    def _run(self, tokens: Sequence[int], wants_logits: bool = True) -> Pass:
        """Pass the tokens through the shortest graph that takes them."""
        fitting = {n: s for n, s in self._sessions.items() if n >= len(tokens)}
        if not fitting:
            assert not wants_logits
            fitting = {self._prefill_length: self._prefill}
        length = min(fitting)
        if length not in self._passes:
            self._passes[length] = fitting[length].bind(self.cache, length, length)
        fitting[length].run(self._passes[length], tokens)
        return self._passes[length]
