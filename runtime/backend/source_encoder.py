"""Encoder of a bundle, with the hidden states of the last source."""

from __future__ import annotations

from functools import cached_property, partial

import numpy as np

from specedge.bundle import Bundle
from specedge.bundle.manifest import ENCODER, EncoderEntry, ModelEntry

from ..sampling.source import Source
from .buffers import Array
from .model_session import ModelSession
from .sessions import Device


class SourceEncoder:
    """Session of an encoder, shared by all slots and by models without an encoder graph.

    It runs at the source's true length. The hidden states of the last source are kept, since
    target and draft, or several requests, often read the same one.
    """

    def __init__(self, bundle: Bundle, model: ModelEntry, device: Device, ops: str) -> None:
        """Choose the encoder graph of a model or, if it has none, of the target."""
        owner = encoder_owner(bundle, model)
        assert owner.encoder is not None
        self._encoder = owner.encoder
        self._open = partial(ModelSession, bundle, owner, device, ops, ENCODER)
        self._source: Source | None = None
        self._hidden = np.zeros(0, np.float32)

    def hidden(self, source: Source) -> Array:
        """Return the hidden states of a source. -> [1, N, F]"""
        if source != self._source:
            self._source = None
            buffers, encoder = self._session.buffers, self._encoder
            rows = source.length if source.tokens else encoder.capacity
            hidden = buffers.zeros((1, rows, encoder.hidden_size), "float32")
            self._session.map(np.asarray(source.values)[None], {"hidden": hidden})
            self._source, self._hidden = source, buffers.fetch(hidden).copy()
        return self._hidden

    @cached_property
    def _session(self) -> ModelSession:
        return self._open()

    def load(self) -> None:
        """Open the session, which `hidden` needs."""
        _ = self._session

    def forget(self) -> None:
        """Forget the last source, for measurements."""
        self._source = None


def encoder_owner(bundle: Bundle, model: ModelEntry) -> ModelEntry:
    """Return the model whose encoder graph a model uses: itself or the target."""
    return model if model.has_graph(ENCODER) else bundle.target


def synthetic_hidden(encoder: EncoderEntry) -> Array:
    """Return hidden states for passes without a source, of the greatest length. -> [1, E, F]"""
    shape = (1, encoder.capacity, encoder.hidden_size)
    return np.sin(np.arange(np.prod(shape), dtype=np.float32)).reshape(shape)
