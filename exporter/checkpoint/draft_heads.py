"""Draft models with the interface of a decoder, whose passes read hidden states of the target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from specedge.bundle.manifest import HiddenStates

from .. import internals


class DraftHeadModule(nn.Module, ABC):
    """Draft model of some layers that read an embedding and a hidden state.

    F channels of the target's concatenated hidden states, H of the states that passes read.

    Args:
        hidden: Hidden states of the manifest.
        model: Decoder layers, with embedding and final norm, of transformers.
        lm_head: LM head.
        returns_normalized: True if further draft tokens read states after the final norm.

    Attributes:
        has_fuse: False if passes read the target's hidden states as they are.
    """

    has_fuse = True

    def __init__(
        self, hidden: HiddenStates, model: Any, lm_head: Any, returns_normalized: bool
    ) -> None:
        super().__init__()
        self.hidden, self.model, self.lm_head = hidden, model, lm_head
        self.config = model.config
        self.returned_layer = self.config.num_hidden_layers + returns_normalized

    @abstractmethod
    def join(self, embedding: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the input of the first layer. [B, T, H], [B, T, H] -> [B, T, ...]"""

    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what a pass reads of the target's hidden states. [B, T, F] -> [B, T, H]"""
        return hidden

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        use_cache: bool = True,
        cache: Any = None,
        hidden: torch.Tensor | None = None,
    ) -> Any:
        """Run a pass. [B, T], [B, T, H] -> logits [B, T, V], cache

        Row i of a text reads the hidden state of token i and the embedding of token i + 1, and is
        at position i. Without hidden states, they are zeros. Further draft tokens read those of
        `returned_layer`, counted as in `HiddenStates.layers`.
        """
        embedding = self.model.embed_tokens(input_ids)
        hidden = torch.zeros_like(embedding) if hidden is None else hidden
        name = internals.cache_name(self.model)
        output = self.model(
            inputs_embeds=self.join(embedding, hidden),
            position_ids=position_ids,
            use_cache=True,
            **{name: cache},
        )
        logits = self.lm_head(output.last_hidden_state)
        return SimpleNamespace(logits=logits, cache=getattr(output, name))

    def get_input_embeddings(self) -> Any:
        """Return the embedding."""
        return self.model.embed_tokens

    def get_output_embeddings(self) -> Any:
        """Return the LM head."""
        return self.lm_head

    def set_output_embeddings(self, lm_head: Any) -> None:
        """Replace the LM head."""
        self.lm_head = lm_head
