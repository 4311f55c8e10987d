"""Language model on fixed-shape graphs, for devices that build an engine for each shape.

Passes are padded to the next length. Padding writes rows after the text, which are never read; a
cache has K + 1 rows beyond the context, where K is the bundle's number of draft tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from specedge.bundle import Bundle
from specedge.bundle.manifest import ModelEntry

from ...sampling.logits import Logits
from ..model_session import BoundPass, ModelSession
from ..onnx_model import OrtModel
from ..sessions import Device

FIXED_SHAPES = ("step", "catchup", "verify", "prefill")  # graph names; the last has no logits


class FixedShapeModel(OrtModel):
    """Model of a bundle whose passes have the lengths of its fixed-shape graphs."""

    def __init__(
        self, bundle: Bundle, model: ModelEntry, device: Device, ops: str = "auto"
    ) -> None:
        self._sessions: dict[int, ModelSession] = {}
        for name in FIXED_SHAPES[:-1]:
            session = ModelSession(bundle, model, device, ops, name)
            assert session.length is not None
            self._sessions[session.length] = session
        self._prefill = ModelSession(bundle, model, device, ops, FIXED_SHAPES[-1])
        self._capacity = model.capacity
        super().__init__(bundle, model, device, ops, session=self._sessions[1])

    def forward(self, tokens: Sequence[int], num_rows: int | None = None) -> Logits:
        """Run one pass, or several if no graph is long enough."""
        longest = max(self._sessions)
        start = 0 if num_rows is None else len(tokens) - num_rows
        if len(tokens) <= longest:
            return self._scores(self._run(tokens), start, len(tokens))
        rows = [
            self._scores(self._run(part), 0, len(part)).array().copy()
            for part in (tokens[i : i + longest] for i in range(0, len(tokens), longest))
        ]
        return Logits(np.concatenate(rows)[start:], self._ids)

    def prefill(self, tokens: Sequence[int]) -> None:
        for part in self._parts(tokens):
            self._run(part, wants_logits=False)

    def _drop(self) -> None:
        super()._drop()
        del self._sessions, self._prefill

    def _parts(self, tokens: Sequence[int]) -> Iterator[Sequence[int]]:
        """Split a prompt into passes, lazily: the next pass depends on the cache length."""
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
        """Return True if a padded prefill pass ends within the cache."""
        return self.length + self._prefill_length <= self._capacity

    def _run(self, tokens: Sequence[int], wants_logits: bool = True) -> BoundPass:
        """Run the shortest graph that fits all tokens."""
        candidates = {n: s for n, s in self._sessions.items() if n >= len(tokens)}
        if not candidates:
            assert not wants_logits
            candidates = {self._prefill_length: self._prefill}
        length = min(candidates)
        if length not in self._passes:
            self._passes[length] = candidates[length].bind(self.cache, length, length)
        candidates[length].run(self._passes[length], tokens)
        return self._passes[length]
