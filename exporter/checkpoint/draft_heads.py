"""Draft heads: draft models whose passes read hidden states of the target.

Their configs stand for configs of transformers, and their modules have the interface of a decoder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from specedge.bundle.manifest import HiddenStates

from .. import internals


class DraftHeadConfig(ABC):
    """Config of a draft head, in place of a config of transformers.

    Attributes:
        layers: Config of its decoder layers, of transformers.
    """

    layers: Any

    is_encoder_decoder = False

    @property
    def model_type(self) -> str:
        """Model type of transformers, or name of the kind of head."""
        return str(self.layers.model_type)

    def get_text_config(self, **options: object) -> Any:
        """Return the config of the layers."""
        return self.layers

    @property
    @abstractmethod
    def hidden(self) -> HiddenStates:
        """Hidden states of the manifest, of a head that is paired with its target."""

    @property
    @abstractmethod
    def returned_layer(self) -> int:
        """Layer of the head whose state further draft tokens read, as in `HiddenStates.layers`."""

    @property
    def conventions(self) -> Sequence[DraftHeadConfig]:
        """Configs with the hidden states that the head may have been trained for, the usual first.

        The export measures which of them has the highest acceptance rates.
        """
        return (self,)

    @property
    @abstractmethod
    def convention(self) -> str:
        """Description of the hidden states that it reads."""

    @abstractmethod
    def describe(self) -> str:
        """Describe a head that is paired with its target."""

    @abstractmethod
    def build(self) -> DraftHeadModule:
        """Build the head on the meta device."""


class DraftHeadModule(nn.Module, ABC):
    """Draft model of some layers that read an embedding and a hidden state.

    F channels of the target's concatenated hidden states, H of the states that passes read.

    Args:
        config: Config of the head, which is paired with its target.
        model: Decoder layers, with embedding and final norm, of transformers.
        lm_head: LM head.

    Attributes:
        has_fuse: False if passes read the target's hidden states as they are.
    """

    has_fuse = True

    def __init__(self, config: DraftHeadConfig, model: Any, lm_head: Any) -> None:
        super().__init__()
        self.hidden, self.returned_layer = config.hidden, config.returned_layer
        self.model, self.lm_head, self.config = model, lm_head, model.config

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
