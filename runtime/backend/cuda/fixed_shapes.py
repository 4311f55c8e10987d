"""Language model on fixed-shape graphs, for devices that build an engine for each shape.

Passes are padded to the next length. Padding writes rows after the text, which are never read; a
cache has K + 1 rows beyond the context, where K is the bundle's number of draft tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specedge.bundle import Bundle
from specedge.bundle.manifest import ModelEntry

from ...sampling.logits import Logits
from ..buffers import Array
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

    def forward(
        self, tokens: Sequence[int], num_rows: int | None = None, hidden: Array | None = None
    ) -> Logits:
        """Run one pass, or several if no graph is long enough."""
        longest = max(self._sessions)
        start = 0 if num_rows is None else len(tokens) - num_rows
        if len(tokens) <= longest:
            return self._scores(self._run(tokens, hidden), start, len(tokens))
        rows, states = [], []
        for at in range(0, len(tokens), longest):
            part = slice(at, at + longest)
            bound = self._run(tokens[part], None if hidden is None else hidden[part])
            rows.append(self._scores(bound, 0, len(tokens[part])).array().copy())
            if self._returns_hidden:
                states.append(self.hidden.copy())
        if states:
            self.set_hidden(np.concatenate(states))
        return Logits(np.concatenate(rows)[start:], self.ids)

    def prefill(self, tokens: Sequence[int], hidden: Array | None = None) -> None:
        assert self._prefill.length is not None
        states, start = [], 0
        while start < len(tokens):
            longest = max(self._sessions)
            if self.length + self._prefill.length <= self._capacity:  # with its padding
                longest = max(longest, self._prefill.length)
            part = slice(start, start + longest)
            self._run(tokens[part], None if hidden is None else hidden[part])
            if self._returns_hidden:
                states.append(self.hidden.copy())
            start += longest
        if states:
            self.set_hidden(np.concatenate(states))

    def _drop(self) -> None:
        super()._drop()
        del self._sessions, self._prefill

    def _run(self, tokens: Sequence[int], hidden: Array | None = None) -> BoundPass:
        """Run the shortest graph that fits all tokens; only the longest has no logits."""
        candidates = [length for length in self._sessions if length >= len(tokens)]
        session = self._sessions[min(candidates)] if candidates else self._prefill
        assert session.length is not None
        key = session.length, session.length
        if key not in self._passes:
            self._passes[key] = session.bind(self.cache, *key)
        self._run_pass(session, self._passes[key], tokens, hidden)
        return self._passes[key]
