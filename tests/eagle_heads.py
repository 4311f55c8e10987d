"""Tiny EAGLE-3 heads with random weights, in the three published formats.

They are written with the published names of tensors and keys of config.json. Nothing here uses the
exporter, so that `tools/eagle_vectors.py` computes its vectors for the same heads.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

SAFEAILAB, NVIDIA, SPECULATORS = FORMATS = ("safeailab", "nvidia", "speculators")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class HeadSpec:
    """A head; `layer_ids` are those of its config, None to omit them.

    It has the embedding of its target, unless `has_embedding`, and a full head, unless `columns` is
    below `vocab_size`.
    """

    format: str = SPECULATORS
    layer_type: str = "llama"
    num_layers: int = 1
    hidden: int = 32
    target_hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 8
    inner: int = 48
    vocab_size: int = 96
    columns: int = 40
    layer_ids: tuple[int, ...] | None = None
    has_embedding: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @property
    def num_states(self) -> int:
        return len(self.layer_ids) if self.layer_ids else 3

    @property
    def flags(self) -> dict[str, bool]:
        names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        return {name: getattr(self, name) for name in names}


# The variants of which `tools/eagle_vectors.py` has vectors.
VARIANTS = {
    "plain": HeadSpec(),
    "norm_before_residual": HeadSpec(norm_before_residual=True),
    "norm_before_fc": HeadSpec(norm_before_fc=True),
    "fc_norm": HeadSpec(fc_norm=True, norm_output=True, layer_ids=(2, 4, 6, 8)),
    "qwen3": HeadSpec(layer_type="qwen3", num_layers=2, has_embedding=True, columns=96),
}


def head_tensors(spec: HeadSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors of a head, by the names of its format."""
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        values = random.standard_normal((rows, columns)) / np.sqrt(columns)
        return torch.from_numpy(1.5 * values).float()

    def norm(size: int) -> torch.Tensor:
        return torch.from_numpy(1 + 0.2 * random.standard_normal(size)).float()

    hidden, q_size = spec.hidden, spec.heads * spec.head_size
    tensors: dict[str, torch.Tensor] = {
        "fc.weight": matrix(hidden, spec.num_states * spec.target_hidden)
    }
    if spec.norm_before_fc:
        tensors["input_norm.weight"] = norm(spec.num_states * spec.target_hidden)
    for i in range(spec.num_states if spec.fc_norm else 0):
        tensors[f"fc_norm.{i}.weight"] = norm(spec.target_hidden)
    for i in range(spec.num_layers):
        prefix = layer_name(spec, i)
        read = hidden if i else 2 * hidden
        layer = {
            "self_attn.q_proj": matrix(q_size, read),
            "self_attn.k_proj": matrix(spec.kv_heads * spec.head_size, read),
            "self_attn.v_proj": matrix(spec.kv_heads * spec.head_size, read),
            "self_attn.o_proj": matrix(hidden, q_size),
            "mlp.gate_proj": matrix(spec.inner, hidden),
            "mlp.up_proj": matrix(spec.inner, hidden),
            "mlp.down_proj": matrix(hidden, spec.inner),
            "input_layernorm": norm(hidden),
            "post_attention_layernorm": norm(hidden),
        }
        if not i:
            layer["hidden_norm"] = norm(hidden)
        elif spec.format == NVIDIA:
            layer["hidden_norm"] = layer.pop("input_layernorm")
        if spec.layer_type == "qwen3":
            layer |= {
                "self_attn.q_norm": norm(spec.head_size),
                "self_attn.k_norm": norm(spec.head_size),
            }
        tensors |= {f"{prefix}.{name}.weight": tensor for name, tensor in layer.items()}
    tensors["norm.weight"] = norm(hidden)
    tensors["lm_head.weight"] = matrix(spec.columns, hidden)
    if spec.columns < spec.vocab_size:
        # Not ascending: the columns of no published head are sorted by agreement, only by habit.
        tokens = random.permutation(spec.vocab_size)[: spec.columns]
        tensors["d2t"] = torch.from_numpy(tokens - np.arange(spec.columns))
        tensors["t2d"] = torch.from_numpy(np.isin(np.arange(spec.vocab_size), tokens))
    if spec.has_embedding:
        tensors["embed_tokens.weight"] = matrix(spec.vocab_size, hidden) * np.sqrt(hidden)
    return tensors


def layer_name(spec: HeadSpec, index: int) -> str:
    """Beginning of the names of a layer's tensors."""
    if spec.format == SPECULATORS:
        return f"layers.{index}"
    return "midlayer" if spec.num_layers == 1 else f"midlayer.{index}"


def head_config(spec: HeadSpec) -> dict[str, Any]:
    """The config.json of a head in its format."""
    layers = {
        "model_type": spec.layer_type,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.inner,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_size,
        "num_hidden_layers": spec.num_layers,
        "vocab_size": spec.vocab_size,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    ids = {} if spec.layer_ids is None else {LAYER_IDS: list(spec.layer_ids)}
    size = {} if spec.target_hidden == spec.hidden else {"target_hidden_size": spec.target_hidden}
    common = {"draft_vocab_size": spec.columns, **size}
    if spec.format == SPECULATORS:
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": layers,
            "speculators_config": {
                "algorithm": "eagle3",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "default_proposal_method": "greedy",
                "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
            },
            **common, **spec.flags, **ids,
        }  # fmt: skip
    flags = {name: True for name, value in spec.flags.items() if value}
    if spec.format == NVIDIA:
        nested = {"use_aux_hidden_state": True, **ids}
        architectures = ["LlamaForCausalLMEagle3"]
        return {**layers, **common, **flags, "architectures": architectures, "eagle_config": nested}
    return {**layers, **common, **flags, **ids, "architectures": ["LlamaForCausalLM"]}


def write_head(
    folder: Path, spec: HeadSpec, tensors: dict[str, torch.Tensor] | None = None
) -> Path:
    """Write a head; `tensors` replace its random ones."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(head_config(spec)), "utf-8")
    values = head_tensors(spec) if tensors is None else tensors
    if spec.format == SAFEAILAB:
        torch.save(values, folder / "pytorch_model.bin")
    else:
        save_file(values, folder / "model.safetensors")
    return folder


def embedding(spec: HeadSpec) -> torch.Tensor:
    """The embedding that a head shares with its target. [V, H]"""
    return torch.from_numpy(
        np.random.default_rng(7).standard_normal((spec.vocab_size, spec.hidden))
    ).float()


def example(spec: HeadSpec, length: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [1, T] and hidden states [1, T, F] of a target."""
    random = np.random.default_rng(3)
    tokens = random.integers(0, spec.vocab_size, (1, length))
    states = 3 * random.standard_normal((1, length, spec.num_states * spec.target_hidden))
    return torch.from_numpy(tokens), torch.from_numpy(states)
