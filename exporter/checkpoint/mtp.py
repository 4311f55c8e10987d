"""Multi-token prediction (MTP) layers of a checkpoint, as draft models of its own model.

DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2. A checkpoint of L layers has a
further one, `model.layers.L`, that reads the last hidden state of a token and the embedding of the
token after it, and predicts the next one: `enorm` and `hnorm` normalize both, `eh_proj` [H, 2 H]
joins them, and `shared_head.norm` precedes the LM head, which is the model's, as is the embedding.
The forward pass is that of transformers' `MtpModel`. With one MTP layer, its own hidden state takes
the place of the model's for further tokens.

H channels of hidden states, V vocabulary entries.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from specedge.bundle.manifest import HiddenStates
from specedge.errors import CheckpointError

from .. import internals
from .draft_heads import DraftHeadModule

NAME = "mtp"
MODEL_TYPES = ("deepseek_v3", "glm4_moe")  # with the tensors above
_NORMS, _PROJECTION = ("enorm", "hnorm"), "eh_proj"
_HEAD_NORM = "shared_head.norm"
# Copies of the model's own embedding and LM head
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
_SHARED = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class MtpConfig:
    """Config of an MTP layer.

    Attributes:
        layers: Config of transformers for a decoder of this layer alone.
        index: Index of the layer in the checkpoint: L, the number of the model's layers.

    As in transformers, it reads hidden states after the final norms, the model's and its own.
    """

    layers: Any
    index: int

    is_encoder_decoder = False

    @property
    def model_type(self) -> str:
        """Model type of transformers."""
        return str(self.layers.model_type)

    def get_text_config(self, **options: object) -> Any:
        """Return the config of the layer."""
        return self.layers

    def describe(self) -> str:
        """Describe the draft."""
        return "the draft is the target's MTP layer, which reads hidden states after its final norm"

    @property
    def hidden(self) -> HiddenStates:
        """Hidden states of the manifest."""
        size = int(self.layers.hidden_size)
        return HiddenStates((self.index + 1,), size, size)


def read_config(where: str, config: Any) -> MtpConfig:
    """Return the config of a target's MTP layer.

    Args:
        where: Role and name of the target.
        config: Config of its text decoder.

    Raises:
        CheckpointError: It has none, more than one, or layers of another kind.
    """
    text = internals.decoder_text_config(config)
    count = getattr(text, "num_mtp_layers", None)
    if config.model_type not in MODEL_TYPES:
        raise CheckpointError(
            f"{where}: MTP layers of the model type '{config.model_type}' are not supported, only "
            f"those of {' and '.join(MODEL_TYPES)}; specify another --draft"
        )
    if type(count) is not int or count != 1:
        raise CheckpointError(
            f"{where}: its config states {count or 'no'} MTP layers, and one is supported; specify "
            "another --draft"
        )
    layers = text.get_mtp_config()
    layers.architectures = text.architectures
    return MtpConfig(layers, int(text.num_hidden_layers))


def split_tensors(
    where: str, config: MtpConfig, tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Split the tensors of a checkpoint for an MTP layer.

    Args:
        where: Role and name of the target.
        config: Config of the layer.
        tensors: Tensors of the checkpoint by name.

    Returns:
        The tensors of a decoder of this layer alone, and those of `MtpDraft`, both by name.

    Raises:
        CheckpointError: Tensors are missing, or have other sizes.
    """
    prefix = f"model.layers.{config.index}."
    names = {name: name.removeprefix(prefix) for name in tensors if name.startswith(prefix)}
    size = int(config.layers.hidden_size)
    sizes: dict[str, tuple[int, ...]]
    sizes = {f"{name}.weight": (size,) for name in (*_NORMS, _HEAD_NORM)}
    sizes[f"{_PROJECTION}.weight"] = (size, 2 * size)
    if not names:
        raise CheckpointError(
            f"{where}: its files have no MTP layer, which would be {prefix}*; specify another "
            "--draft, or download the checkpoint that its config describes"
        )
    own: dict[str, torch.Tensor] = {}
    decoder = {name: tensors[name] for name in _SHARED if name in tensors}
    for name, inner in names.items():
        if inner in sizes:
            own[inner] = tensors[name]
        elif inner not in _COPIES:
            decoder[f"model.layers.0.{inner}"] = tensors[name]
    for name, expected in sizes.items():
        if name not in own:
            raise CheckpointError(f"{where} lacks weights, such as {prefix}{name}")
        if own[name].shape != expected:
            raise CheckpointError(
                f"{where}: {prefix}{name} is {list(own[name].shape)} in its files and "
                f"{list(expected)} by its config; use files and config of the same model"
            )
    decoder["model.norm.weight"] = own.pop(f"{_HEAD_NORM}.weight")
    return decoder, own


class MtpDraft(DraftHeadModule):
    """MTP layer with the interface of a decoder, whose passes read the target's hidden states.

    Args:
        config: Config of the layer.
        decoder: Decoder of this layer alone, whose final norm is that of the shared head.
    """

    has_fuse = False

    def __init__(self, config: MtpConfig, decoder: Any) -> None:
        super().__init__(config.hidden, decoder.model, decoder.lm_head, returns_normalized=True)
        norm, size = self.model.norm, self.hidden.size
        self.enorm, self.hnorm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)

    def join(self, embedding: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        joined = torch.cat((self.enorm(embedding), self.hnorm(hidden)), -1)
        projected: torch.Tensor = self.eh_proj(joined)
        return projected


def build_draft(config: MtpConfig) -> MtpDraft:
    """Build the draft of an MTP layer on the meta device."""
    decoder = internals.build_decoder(config.layers)
    with torch.device("meta"):
        return MtpDraft(config, decoder).eval()
