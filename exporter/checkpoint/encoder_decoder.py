"""Encoder-decoder models, whose decoder is exported as a decoder with constant states.

N hidden states of the encoder, of size F; G key-value heads of size D.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from .. import internals
from .lazy_tensors import materialize
from .placeholders import WeightSources

NUM_SAMPLE_TOKENS = 2  # source of a model that is measured
NUM_HASHED = 1 << 24  # elements that are cast and hashed at a time


def as_decoder(model: Any) -> Any:
    """Return a model with the interface of a decoder."""
    return SourceConditionedDecoder(model) if model.config.is_encoder_decoder else model


class SourceConditionedDecoder(torch.nn.Module):
    """Decoder and LM head of an encoder-decoder model, with the interface of a decoder alone.

    Its cross-attention reads the keys and values in `constants`, two for each layer, or those of
    the source `sample_source` of a model that is measured. [B, G, N, D]
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.config = model.get_decoder().config.get_text_config(decoder=True)
        self.constants: Sequence[torch.Tensor] = ()

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        use_cache: bool = True,
        cache: Any = None,
        constants: Sequence[torch.Tensor] = (),
    ) -> Any:
        """Run a pass over tokens of the text. [B, T] -> logits [B, T, V], self-attention cache"""
        constants = constants or self.constants or self.open(self.encode(self.sample_source()))
        if len(constants[0]) < len(input_ids):
            constants = [tensor.expand(len(input_ids), -1, -1, -1) for tensor in constants]
        layers = zip(constants[::2], constants[1::2], strict=True)
        whole = EncoderDecoderCache(
            DynamicCache() if cache is None else cache,
            internals.Cache(layers=[internals.ConstantCacheLayer(*pair) for pair in layers]),
        )
        # Models read only the shape of hidden states whose keys and values are in the cache.
        hidden = constants[0].new_zeros(len(input_ids), constants[0].shape[2], 1)
        output = self._decode(input_ids, hidden, whole, position_ids)
        kept = getattr(output, internals.cache_name(self.model)).self_attention_cache
        return SimpleNamespace(logits=output.logits, cache=kept)

    def _decode(
        self,
        input_ids: torch.Tensor,
        hidden: torch.Tensor,
        cache: Any,
        position_ids: torch.Tensor | None = None,
    ) -> Any:
        options: dict[str, Any] = {internals.cache_name(self.model): cache}
        if internals.has_parameter(self.model.forward, "decoder_position_ids"):
            options["decoder_position_ids"] = position_ids
        return self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=hidden),
            decoder_input_ids=input_ids,
            use_cache=True,
            **options,
        )

    def encode(self, source: torch.Tensor) -> torch.Tensor:
        """Return the encoder's hidden states of a source. [B, N] or [B, M, frames] -> [B, N, F]"""
        hidden: torch.Tensor = self.encoder(source).last_hidden_state
        return hidden

    def open(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """Return the keys and values of each layer's cross-attention. [B, N, F] -> [B, G, N, D]"""
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        start = torch.zeros(len(hidden), 1, dtype=torch.long, device=hidden.device)
        output = self._decode(start, hidden, cache, start)
        layers = getattr(output, internals.cache_name(self.model)).cross_attention_cache.layers
        return [tensor for layer in layers for tensor in (layer.keys, layer.values)]

    @property
    def encoder(self) -> Any:
        """The encoder."""
        return self.model.get_encoder()

    def weights_digest(self, sources: WeightSources) -> str:
        """Return the SHA-256 of the encoder's weights in float32."""
        digest = hashlib.sha256()
        for name, tensor in (*self.encoder.named_parameters(), *self.encoder.named_buffers()):
            matrix = sources.stored_matrix(tensor)
            digest.update(name.encode())
            values = materialize(tensor.detach() if matrix is None else matrix)
            for rows in values.reshape(-1).split(NUM_HASHED):
                digest.update(rows.float().contiguous().numpy())
        return digest.hexdigest()

    @property
    def padding_token(self) -> int | None:
        """Token that has no position in the text, of which later ones depend on it (M2M-100)."""
        modules = (m for m in self.model.modules() if "M2M100Sinusoidal" in type(m).__name__)
        return next((module.padding_idx for module in modules), None)

    @property
    def num_mel_bins(self) -> int | None:
        """Mel bins of the spectrograms that the encoder reads; None if it reads tokens."""
        return getattr(self.model.config, "num_mel_bins", None)

    @property
    def max_source_length(self) -> int | None:
        """Longest source that the config states: positions, or frames of spectrograms."""
        if self.num_mel_bins is not None:
            return 2 * int(self.model.config.max_source_positions)
        positions = getattr(self.encoder.config, "max_position_embeddings", None)
        return positions if isinstance(positions, int) else None

    def sample_source(self, length: int = NUM_SAMPLE_TOKENS) -> torch.Tensor:
        """Return a source of tokens 0 ... or of silence, for a model that is measured."""
        device = next(self.model.parameters()).device
        if self.num_mel_bins is None:
            return torch.zeros(1, length, dtype=torch.long, device=device)
        return torch.zeros(1, self.num_mel_bins, self.max_source_length, device=device)

    def get_input_embeddings(self) -> Any:
        """Return the embedding."""
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        """Return the LM head."""
        return self.model.get_output_embeddings()
