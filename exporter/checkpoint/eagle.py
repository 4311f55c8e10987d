"""EAGLE-3 heads (Li et al. 2025): draft models that read hidden states of their target.

A head has one decoder layer or a few, of which the first reads the embedding of a token beside a
hidden state. Published heads have three formats: that of SafeAILab and AngelSlim, with the tensors
`midlayer.*`; that of NVIDIA, with `eagle_config`, and `midlayer.N.*` for more than one layer; and
that of speculators, with `layers.N.*`.
The forward pass is that of SafeAILab/EAGLE, `eagle/model/cnets.py`, with the variants of
speculators 0.9, `models/eagle3/core.py`.

F channels of the target's concatenated hidden states, H of the head's.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModel

from specedge.bundle.manifest import HiddenStates
from specedge.errors import CheckpointError, PairError

from .. import internals
from ..libraries import first_line, quiet
from .draft_heads import DraftHeadConfig, DraftHeadModule

MODEL_TYPE = "eagle3"
_LAYER_TYPES = ("llama", "qwen3")
_FORMAT, _SPECULATORS = "eagle_config", "speculators_model_type"
# Keys of the layers whose hidden states are read: the usual one, of NeMo-RL, and of verl-SpeCo
LAYER_IDS = (
    "eagle_aux_hidden_state_layer_ids",
    "aux_hidden_state_layer_ids",
    "target_hidden_layer_ids",
    "target_layer_ids",
)
_NUM_STATES = 3  # hidden states of the target, unless the config lists their layers
# Fields of a checkpoint that do not belong to the config of the head's layers.
_OTHER_FIELDS = ("architectures", "auto_map", "model_type", "transformers_version")
# Tensors that inference does not read, by the end of their names.
_UNUSED = ("verifier_norm.weight", "verifier_lm_head.weight", "inv_freq")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Drafters of other kinds that are published for a target, by a mark of their configs.
_UNSUPPORTED = {
    "dflash_config": "a DFlash drafter, which drafts a block of tokens in one pass",
    "medusa_num_heads": "a set of Medusa heads, which need tree attention to be fast",
}
_UNSUPPORTED_VALUES = {
    ("use_aux_hidden_state", False): "a head that reads the target's last hidden states only "
    "(use_aux_hidden_state)",
    ("next_layer_regular", False): "a head whose later layers read embeddings (next_layer_regular)",
    ("parallel_drafting", True): "a P-EAGLE head, which drafts all tokens in one pass",
}
_ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")


@dataclass(frozen=True)
class EagleConfig(DraftHeadConfig):
    """Config of an EAGLE-3 head.

    Attributes:
        layers: Config of its decoder layers, of transformers.
        columns: Number of columns of its LM head.
        target_size: Hidden size of the target.
        layer_ids: Layers of the target that its config states; None for the default of EAGLE-3.
        aux_layers: Layers of the target whose inputs the head reads, as in `HiddenStates.layers`,
            by each convention of `layer_ids`; empty before it is paired with its target.
        norm_before_residual: True if the residual stream begins with the normalized hidden state.
        norm_before_fc: True if the concatenated hidden states are normalized.
        fc_norm: True if each of them is normalized.
        norm_output: True if further draft tokens read normalized hidden states.
        verifier: Name of the target that it was trained for.
    """

    layers: Any
    columns: int
    target_size: int
    layer_ids: tuple[int, ...] | None
    aux_layers: tuple[tuple[int, ...], ...]
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    verifier: str | None = None

    model_type = MODEL_TYPE

    @property
    def num_states(self) -> int:
        """Number of hidden states of the target that are concatenated."""
        return _NUM_STATES if self.layer_ids is None else len(self.layer_ids)

    @property
    def is_reduced(self) -> bool:
        """True if the LM head has a reduced vocabulary."""
        return self.columns != int(self.layers.vocab_size)

    def describe(self) -> str:
        count = self.layers.num_hidden_layers
        trained_for = "" if self.verifier is None else f", trained for {self.verifier}"
        return (
            f"the draft is an EAGLE-3 head of {count} layer{'s' if count > 1 else ''}, with "
            f"{self.columns} tokens{trained_for}; it reads hidden states {self.convention}"
        )

    @property
    def conventions(self) -> Sequence[EagleConfig]:
        return [replace(self, aux_layers=(layers,)) for layers in self.aux_layers]

    @property
    def convention(self) -> str:
        layers = ", ".join(map(str, self.hidden.layers))
        return f"at the inputs of the target's layers {layers}, counted from 0"

    @property
    def hidden(self) -> HiddenStates:
        size = self.num_states * self.target_size
        return HiddenStates(self.aux_layers[0], size, int(self.layers.hidden_size))

    @property
    def returned_layer(self) -> int:
        return int(self.layers.num_hidden_layers) + self.norm_output

    def build(self) -> EagleDraft:
        with torch.device("meta"), quiet():
            return EagleDraft(self).eval()


def is_head(raw: Mapping[str, Any]) -> bool:
    """Return True for the content of an EAGLE-3 head's config.json."""
    architectures = raw.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    return (
        raw.get(_SPECULATORS) == MODEL_TYPE
        or _FORMAT in raw
        or (_SPECULATORS not in raw and "draft_vocab_size" in raw)
        or any(isinstance(name, str) and "Eagle3" in name for name in names)
    )


def check_kind(where: str, raw: Mapping[str, Any]) -> None:
    """Reject drafters of a target that are not EAGLE-3 heads by name. Raises CheckpointError."""
    reason = next((text for key, text in _UNSUPPORTED.items() if key in raw), None)
    architectures = raw.get("architectures")
    if isinstance(architectures, list) and "DFlashDraftModel" in architectures:
        reason = _UNSUPPORTED["dflash_config"]
    if raw.get("model_type") in _ASSISTANTS:
        reason = "a Gemma 4 assistant, which reads the key-value cache of its target"
    if raw.get(_SPECULATORS, MODEL_TYPE) != MODEL_TYPE:
        reason = f"a drafter of the kind '{str(raw[_SPECULATORS])[:40]}'"
    if reason is not None:
        raise CheckpointError(
            f"{where} is {reason}; supported drafts are smaller models, EAGLE-3 heads, mtp and "
            "self:N"
        )


def read_config(where: str, raw: Mapping[str, Any]) -> EagleConfig:
    """Read the config.json of an EAGLE-3 head. Raises CheckpointError."""
    nested = raw.get(_FORMAT) or {}
    of_layers = raw.get("transformer_layer_config", raw)
    if not isinstance(nested, dict) or not isinstance(of_layers, dict):
        raise CheckpointError(f"{where} has an invalid config.json; download it again")
    if "quantization_config" in raw:
        raise CheckpointError(f"{where} is a quantized EAGLE-3 head; specify one in 16 or 32 bits")
    fields = {**raw, **{key: value for key, value in nested.items() if value is not None}}
    for (key, value), reason in _UNSUPPORTED_VALUES.items():
        if fields.get(key) is value:
            raise CheckpointError(f"{where} is {reason}; specify another EAGLE-3 head")
    verifier: Any = raw
    for key in ("speculators_config", "verifier", "name_or_path"):
        verifier = verifier.get(key) if isinstance(verifier, dict) else None
    layers = _layers_config(where, of_layers)
    names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    flags = {name: _flag(where, name, fields) for name in names}
    flags["norm_output"] |= _flag(where, "return_hidden_post_norm", fields)  # TensorRT-LLM's name
    config = EagleConfig(
        layers,
        _positive(where, "draft_vocab_size", fields, int(layers.vocab_size)),
        _positive(where, "target_hidden_size", fields, int(layers.hidden_size)),
        _read_layer_ids(where, nested, raw),
        (),
        **flags,
        verifier=verifier if isinstance(verifier, str) else None,
    )
    if config.norm_before_fc and config.fc_norm:
        raise CheckpointError(f"{where} has both norm_before_fc and fc_norm; it has one of them")
    if config.columns > layers.vocab_size:
        raise CheckpointError(
            f"{where} has a draft_vocab_size of {config.columns} and a vocab_size of "
            f"{layers.vocab_size}; download it again"
        )
    return config


def _layers_config(where: str, fields: Mapping[str, Any]) -> Any:
    """Return transformers' config of a head's decoder layers."""
    name = fields.get("model_type", "qwen3")  # the default of speculators
    if name not in _LAYER_TYPES:
        raise CheckpointError(
            f"{where} is an EAGLE-3 head with layers of the type '{str(name)[:40]}'; supported are "
            f"{' and '.join(_LAYER_TYPES)}"
        )
    known = {key: value for key, value in fields.items() if key not in _OTHER_FIELDS}
    with quiet():
        try:
            if isinstance(types := known.get("layer_types"), list):  # possibly the target's
                known["layer_types"] = types[: known.get("num_hidden_layers", len(types))]
            config = CONFIG_MAPPING[name](**known)
        except Exception as error:
            raise CheckpointError(
                f"{where}: config.json cannot be read: {first_line(error)}"
            ) from error
    if not isinstance(config.num_hidden_layers, int) or config.num_hidden_layers < 1:
        raise CheckpointError(f"{where}: its config.json says {config.num_hidden_layers} layers")
    types = known.get("layer_types") or getattr(config, "layer_types", None) or []
    if other := next((kind for kind in types if kind != "full_attention"), None):
        raise CheckpointError(
            f"{where} is an EAGLE-3 head with layers of the type '{str(other)[:40]}'; supported is "
            "full_attention"
        )
    return config


def _read_layer_ids(where: str, *sources: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the layers of the target that a config states by any of `LAYER_IDS`."""
    stated: dict[tuple[int, ...], str] = {}
    for key, source in itertools.product(LAYER_IDS, sources):
        if (ids := source.get(key)) is None:
            continue
        if not isinstance(ids, list) or not ids or any(type(i) is not int or i < 0 for i in ids):
            raise CheckpointError(f"{where}: {key} is {ids!r}, not a list of layers")
        stated.setdefault(tuple(ids), key)
    if len(stated) > 1:
        different = " and ".join(f"{key} {[*ids]}" for ids, key in stated.items())
        raise CheckpointError(
            f"{where} has {different}; remove the layers that it was not trained with"
        )
    return next(iter(stated), None)


def _flag(where: str, name: str, fields: Mapping[str, Any]) -> bool:
    value = fields.get(name)
    if value is not None and type(value) is not bool:
        raise CheckpointError(f"{where}: {name} is {value!r}, not true or false")
    return bool(value)


def _positive(where: str, name: str, fields: Mapping[str, Any], default: int) -> int:
    value = fields.get(name)
    if value is None:
        return default
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{where}: {name} is {value!r}, not a number of at least 1")
    return value


def pair_with(config: EagleConfig, head: str, target: str, target_config: Any) -> EagleConfig:
    """Return the config with the layers of a target, after comparing both.

    Ids of layers name their inputs. Ids that begin with 1 mostly name outputs, which are the inputs
    of the next layers (SGLang's pull request 25454), but vLLM reads them as inputs, too.

    Args:
        config: Config of the head.
        head: Name of the head.
        target: Name of the target.
        target_config: Config of the target's text decoder.

    Raises:
        PairError: The head does not fit the target.
    """
    if target_config.is_encoder_decoder:
        raise PairError(f"target {target} is an encoder-decoder, which has no EAGLE-3 heads")
    text = internals.decoder_text_config(target_config)
    num_layers = text.num_hidden_layers
    of_target = {"hidden size": text.hidden_size, "vocabulary": text.vocab_size}
    of_head = {"hidden size": config.target_size, "vocabulary": config.layers.vocab_size}
    for name, expected in of_target.items():
        if of_head[name] != expected:
            raise PairError(
                f"draft {head} was trained for a {name} of {of_head[name]}, target {target} has "
                f"{expected}; specify the head of this target"
            )
    ids = config.layer_ids or (2, num_layers // 2, num_layers - 3)
    conventions = [tuple(i + 1 for i in ids), ids] if ids[0] == 1 else [ids]
    fitting = tuple(x for x in conventions if all(0 <= layer <= num_layers for layer in x))
    if not fitting:
        raise PairError(
            f"draft {head} reads hidden states at the layers {', '.join(map(str, ids))}, target "
            f"{target} has {num_layers} layers; specify the head of this target"
        )
    return replace(config, aux_layers=fitting)


class EagleLayer(nn.Module):
    """First decoder layer, whose attention reads an embedding beside a hidden state.

    The modules are those of a layer of transformers; `hidden_norm` normalizes the hidden state.
    """

    def __init__(self, layer: Any, norm_before_residual: bool) -> None:
        super().__init__()
        attention = layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(attention, name)
            new = nn.Linear(2 * old.in_features, old.out_features, old.bias is not None)
            setattr(attention, name, new)
        self.self_attn, self.mlp = attention, layer.mlp
        self.input_layernorm = layer.input_layernorm
        self.hidden_norm = copy.deepcopy(layer.input_layernorm)
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.norm_before_residual = norm_before_residual

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        """Run the layer over embeddings and hidden states. [B, T, 2 H] -> [B, T, H]"""
        embedding, hidden = hidden_states.chunk(2, -1)
        normalized = self.hidden_norm(hidden)
        joined = torch.cat((self.input_layernorm(embedding), normalized), -1)
        attended, _ = self.self_attn(hidden_states=joined, **options)
        total = (normalized if self.norm_before_residual else hidden) + attended
        output: torch.Tensor = total + self.mlp(self.post_attention_layernorm(total))
        return output


class EagleDraft(DraftHeadModule):
    """EAGLE-3 head with the interface of a decoder."""

    def __init__(self, config: EagleConfig) -> None:
        model = AutoModel.from_config(copy.deepcopy(config.layers), dtype=torch.float32)
        head = nn.Linear(config.layers.hidden_size, config.columns, bias=False)
        super().__init__(config, model, head)
        self.model.layers[0] = EagleLayer(self.model.layers[0], config.norm_before_residual)
        norm_class, epsilon = type(self.model.norm), self.config.rms_norm_eps
        self.fc = nn.Linear(self.hidden.size, self.config.hidden_size, bias=False)
        self.input_norm = norm_class(self.hidden.size, epsilon) if config.norm_before_fc else None
        # Not a ModuleList, which could be taken for the list of layers.
        self.fc_norm = nn.ModuleDict(
            {
                str(i): norm_class(config.target_size, epsilon)
                for i in range(config.num_states if config.fc_norm else 0)
            }
        )

    def join(self, embedding: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat((embedding, hidden), -1)

    def fuse(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.input_norm is not None:
            hidden = self.input_norm(hidden)
        if self.fc_norm:
            parts = hidden.chunk(len(self.fc_norm), -1)
            norms = self.fc_norm.values()
            hidden = torch.cat([norm(x) for norm, x in zip(norms, parts, strict=True)], -1)
        fused: torch.Tensor = self.fc(hidden)
        return fused


def restore_rotary(model: EagleDraft) -> None:
    """Compute the rotary frequencies of a model that was built on the meta device."""
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)


def match_tensors(
    where: str,
    config: EagleConfig,
    tensors: Mapping[str, torch.Tensor],
    num_tokens: int,
    of_target: Callable[[str], torch.Tensor],
) -> tuple[EagleConfig, dict[str, torch.Tensor], tuple[int, ...] | None]:
    """Match the tensors of a checkpoint with the names of `EagleDraft`.

    Columns of a reduced vocabulary are sorted by token. Norms before `fc` are those that the
    checkpoint has, whether its config names them or not.

    Args:
        where: Role and name of the head.
        config: Its config.
        tensors: Tensors of its files by name.
        num_tokens: Number of the tokenizer's ids; columns of others are removed.
        of_target: Returns the target's "embedding" or "head", [V, H].

    Returns:
        The config, the tensors by name, and the tokens of the columns; None for all tokens.

    Raises:
        CheckpointError: Tensors are missing or unknown, or have other sizes.
    """
    state = {_model_name(name): tensor for name, tensor in tensors.items()}
    if len(state) < len(tensors):
        names = Counter(map(_model_name, tensors))
        name = names.most_common(1)[0][0]
        raise CheckpointError(f"{where} has two tensors for {name}; download it again")
    d2t, t2d = state.pop("d2t", None), state.pop("t2d", None)
    state = {name: tensor for name, tensor in state.items() if not name.endswith(_UNUSED)}
    config = replace(
        config,
        norm_before_fc=config.norm_before_fc or "input_norm.weight" in state,
        fc_norm=config.fc_norm or "fc_norm.0.weight" in state,
    )
    tokens = _read_tokens(where, config, d2t, t2d)
    shared = {_EMBEDDING: "embedding", _HEAD: "head"}
    shared = {name: part for name, part in shared.items() if name not in state}
    state |= {name: of_target(part) for name, part in shared.items()}
    if _HEAD in shared and tokens is not None:
        state[_HEAD] = state[_HEAD].index_select(0, tokens)
    _check_tensors(where, config, state, shared)
    if tokens is None:
        return config, state, None
    ids, columns = tokens.sort()
    columns = columns[ids < num_tokens]
    state[_HEAD] = state[_HEAD].index_select(0, columns)
    return replace(config, columns=len(columns)), state, tuple(tokens[columns].tolist())


def _model_name(name: str) -> str:
    """Return the name in `EagleDraft` of a tensor of any format.

    NVIDIA's layers are `midlayer.N`, or `midlayer` if there is one. Their later layers normalize
    their input by `hidden_norm` (`Eagle3DecoderLayer` of TensorRT-LLM, `modeling_speculative.py`).
    """
    name = name.removeprefix("model.")
    name = re.sub(r"^midlayer\.(?=\d)", "layers.", name)
    name = re.sub(r"^midlayer\.", "layers.0.", name)
    name = re.sub(r"^(layers\.[1-9]\d*)\.hidden_norm\.", r"\1.input_layernorm.", name)
    inner = name.startswith(("layers.", "embed_tokens.", "norm."))
    return f"model.{name}" if inner else name


def _read_tokens(
    where: str, config: EagleConfig, d2t: torch.Tensor | None, t2d: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the token of each column of a reduced vocabulary; None if it is not reduced."""
    if not config.is_reduced:
        return None
    if d2t is None or d2t.shape != (config.columns,):
        stated = "no d2t" if d2t is None else f"a d2t of {list(d2t.shape)}"
        raise CheckpointError(
            f"{where} has {stated}, and a draft vocabulary of {config.columns} tokens; download "
            "it again"
        )
    tokens = torch.arange(config.columns) + d2t.long()
    ids, size = tokens.sort().values, config.layers.vocab_size
    if bool((ids[1:] == ids[:-1]).any()) or ids[0] < 0 or ids[-1] >= size:
        raise CheckpointError(f"{where}: its d2t does not map to different tokens below {size}")
    if t2d is not None and not torch.equal(t2d.nonzero().flatten(), ids):
        raise CheckpointError(f"{where}: its d2t and t2d name different tokens; download it again")
    return tokens


def _check_tensors(
    where: str, config: EagleConfig, state: Mapping[str, torch.Tensor], shared: Container[str]
) -> None:
    """Check names and sizes of tensors, of which those in `shared` are the target's."""
    expected = config.build().state_dict()
    if missing := sorted(expected.keys() - state.keys()):
        raise CheckpointError(f"{where} lacks weights, such as {missing[0]}; download it again")
    if unknown := sorted(state.keys() - expected.keys()):
        raise CheckpointError(
            f"{where} has {unknown[0]}, which is no tensor of an EAGLE-3 head that specedge "
            "supports"
        )
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            source, advice = "its", "use files and config of the same head"
            if name in shared:
                source, advice = "the target's", "specify a head that has its own"
            raise CheckpointError(
                f"{where}: {name} is {list(tensor.shape)} in {source} files and "
                f"{list(expected[name].shape)} by its config; {advice}"
            )
