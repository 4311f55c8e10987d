"""Multi-token prediction (MTP) layers of a checkpoint, as draft heads of its own model.

DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2. A checkpoint of L layers has a
further one, `model.layers.L`, that reads the last hidden state of a token and the embedding of the
token after it, and predicts the next one: `enorm` and `hnorm` normalize both, `eh_proj` [H, 2 H]
joins them, and `shared_head.norm` precedes the LM head, which is the model's, as is the embedding.
The forward pass is that of transformers' `MtpModel`. MiMo's layer is the same under other names,
and joins the hidden state and the embedding in this order (`modeling_mimo.py` of
XiaomiMiMo/MiMo-7B-RL, and vLLM's `mimo_mtp.py`).

Its own hidden state takes the place of the model's for further tokens. Of several layers, which
were trained to predict one token each, the first predicts all of them.

H channels of hidden states, V vocabulary entries.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from specedge.bundle.manifest import HiddenStates
from specedge.errors import CheckpointError

from .. import internals
from .draft_heads import DraftHeadConfig, DraftHeadModule

NAME = "mtp"
MTP_LAYERS = "model.mtp_layers."  # beginning of tensors that transformers' models do not have
# Copies of the model's own embedding and LM head
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
_SHARED = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class MtpNames:
    """Names of an MTP layer's tensors, and the order of its input.

    Attributes:
        prefix: Beginning of the names, with the number of the model's layers.
        modules: Modules of `MtpDraft` by their names in the checkpoint, and the norm before the LM
            head; all others are the decoder layer's.
        is_hidden_first: True if the projection reads the hidden state before the embedding.
    """

    prefix: str
    modules: Mapping[str, str]
    is_hidden_first: bool = False


_DEEPSEEK = MtpNames(
    "model.layers.{}.",
    {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "norm"},
)
_MIMO = MtpNames(
    f"{MTP_LAYERS}0.",
    {
        "token_layernorm": "enorm",
        "hidden_layernorm": "hnorm",
        "input_proj": "eh_proj",
        "final_layernorm": "norm",
    },
    is_hidden_first=True,
)
_NAMES = {"deepseek_v3": _DEEPSEEK, "glm4_moe": _DEEPSEEK, "mimo": _MIMO}  # by model type


@dataclass(frozen=True)
class MtpConfig(DraftHeadConfig):
    """Config of an MTP layer.

    Attributes:
        layers: Config of transformers for a decoder of this layer alone.
        index: Number of the model's layers, L.
        names: Names of its tensors.
        num_layers: Number of MTP layers of the checkpoint.
        reads_normalized: True if it reads hidden states after the model's final norm.
        returns_normalized: True if further tokens read hidden states after its own final norm.
    """

    layers: Any
    index: int
    names: MtpNames
    num_layers: int = 1
    reads_normalized: bool = True
    returns_normalized: bool = True

    def describe(self) -> str:
        layer = "MTP layer"
        if self.num_layers > 1:
            layer = f"first of {self.num_layers} MTP layers, which drafts all tokens"
        return f"the draft is the target's {layer}; it reads hidden states {self.convention}"

    @property
    def convention(self) -> str:
        target, own = (
            "after" if is_normalized else "before"
            for is_normalized in (self.reads_normalized, self.returns_normalized)
        )
        return f"{target} the target's final norm and {own} its own"

    @property
    def prefix(self) -> str:
        """Beginning of the names of its tensors."""
        return self.names.prefix.format(self.index)

    @property
    def hidden(self) -> HiddenStates:
        size = int(self.layers.hidden_size)
        return HiddenStates((self.index + self.reads_normalized,), size, size)

    @property
    def returned_layer(self) -> int:
        return 1 + self.returns_normalized

    @property
    def conventions(self) -> Sequence[MtpConfig]:
        # After both norms in transformers' `MtpModel`. vLLM long read DeepSeek-V3's own states
        # before the norm (its pull request 47448), and MLX the model's (mlx-lm's issue 990).
        pairs = itertools.product((True, False), repeat=2)
        return [replace(self, reads_normalized=a, returns_normalized=b) for a, b in pairs]

    def build(self) -> MtpDraft:
        decoder = internals.build_decoder(self.layers)
        with torch.device("meta"):
            return MtpDraft(self, decoder).eval()


def read_config(where: str, config: Any) -> MtpConfig:
    """Return the config of a target's MTP layer.

    Args:
        where: Role and name of the target.
        config: Config of its text decoder.

    Raises:
        CheckpointError: It has none, or layers of another kind.
    """
    text = copy.deepcopy(internals.decoder_text_config(config))
    names = _NAMES.get(config.model_type)
    if names is None:
        raise CheckpointError(
            f"{where}: MTP layers of the model type '{config.model_type}' are not supported, only "
            f"those of {', '.join(_NAMES)}; specify another --draft"
        )
    count = getattr(text, "num_mtp_layers", getattr(text, "num_nextn_predict_layers", None))
    if type(count) is not int or count < 1:
        raise CheckpointError(f"{where}: its config states no MTP layers; specify another --draft")
    text.num_mtp_layers = 1
    if getattr(text, "layer_types", None) and not hasattr(text, "mtp_layer_types"):
        text.mtp_layer_types = text.layer_types[:1]
    layers = text.get_mtp_config()
    layers.architectures = text.architectures
    return MtpConfig(layers, int(text.num_hidden_layers), names, count)


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
    prefix, modules = config.prefix, config.names.modules
    head_tensors: dict[str, torch.Tensor] = {}
    decoder = {name: tensors[name] for name in _SHARED if name in tensors}
    layer = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    if not layer:
        raise CheckpointError(
            f"{where}: its files have no MTP layer, which would be {prefix}*; specify another "
            "--draft, or download the checkpoint that its config describes"
        )
    for name, tensor in layer.items():
        inner = name.removeprefix(prefix)
        if (module := modules.get(inner.removesuffix(".weight"))) is not None:
            head_tensors[f"{module}.weight"] = tensor
        elif inner not in _COPIES:
            decoder[f"model.layers.0.{inner}"] = tensor
    size = int(config.layers.hidden_size)
    for name, module in modules.items():
        stored = head_tensors.get(f"{module}.weight")
        expected = [size, 2 * size] if module == "eh_proj" else [size]
        if stored is None:
            raise CheckpointError(f"{where} lacks weights, such as {prefix}{name}.weight")
        if list(stored.shape) != expected:
            raise CheckpointError(
                f"{where}: {prefix}{name}.weight is {list(stored.shape)} in its files and "
                f"{expected} by its config; use files and config of the same model"
            )
    decoder["model.norm.weight"] = head_tensors.pop("norm.weight")
    return decoder, head_tensors


class MtpDraft(DraftHeadModule):
    """MTP layer with the interface of a decoder, whose passes read the target's hidden states.

    Args:
        config: Config of the layer.
        decoder: Decoder of this layer alone, whose final norm is that of the shared head.
    """

    has_fuse = False

    def __init__(self, config: MtpConfig, decoder: Any) -> None:
        super().__init__(config, decoder.model, decoder.lm_head)
        norm, size = self.model.norm, self.hidden.size
        self.enorm, self.hnorm = copy.deepcopy(norm), copy.deepcopy(norm)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self._is_hidden_first = config.names.is_hidden_first

    def join(self, embedding: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        parts = [self.enorm(embedding), self.hnorm(hidden)]
        if self._is_hidden_first:
            parts.reverse()
        projected: torch.Tensor = self.eh_proj(torch.cat(parts, -1))
        return projected
