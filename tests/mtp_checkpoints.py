"""Small checkpoints with an MTP layer under the names of published ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, Glm4MoeConfig, Qwen2Config

VOCAB_SIZE, SIZE, NUM_LAYERS = 64, 32, 2
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": SIZE,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS + 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
}
_MIXTURE = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
CONFIGS = {
    "deepseek_v3": lambda sizes: DeepseekV3Config(
        **sizes, **_MIXTURE, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16,
        qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8,
    ),
    "glm4_moe": lambda sizes: Glm4MoeConfig(
        **sizes, **_MIXTURE, num_key_value_heads=2, head_dim=8, use_qk_norm=True,
        attention_bias=True,
    ),
    "mimo": lambda sizes: Qwen2Config(**sizes, num_key_value_heads=2, rope_theta=640000.0),
}  # fmt: skip
_NAMES = ("enorm", "hnorm", "shared_head.norm", "eh_proj")
MIMO_NAMES = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_proj")


def layer_prefix(kind: str) -> str:
    """Beginning of the names of the MTP layer's tensors."""
    return "model.mtp_layers.0." if kind == "mimo" else f"model.layers.{NUM_LAYERS}."


def make_mtp_checkpoint(folder: Path, kind: str, vocab_size: int = VOCAB_SIZE) -> Path:
    """Write a model whose last layer is its MTP layer, and the other tensors of that layer."""
    config = CONFIGS[kind](_SIZES | {"vocab_size": vocab_size})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    path, prefix = folder / "model.safetensors", layer_prefix(kind)
    last = f"model.layers.{NUM_LAYERS}."
    tensors = {name.replace(last, prefix): x for name, x in load_file(path).items()}
    names = MIMO_NAMES if kind == "mimo" else _NAMES
    for name in names[:3]:
        tensors[f"{prefix}{name}.weight"] = 1 + 0.3 * torch.randn(SIZE)
    tensors[f"{prefix}{names[3]}.weight"] = 0.2 * torch.randn(SIZE, 2 * SIZE)
    if kind != "mimo":
        tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path, {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | _published_fields(kind)))
    return folder


def _published_fields(kind: str) -> dict[str, Any]:
    """Fields of a published config.json that differ from those that transformers writes."""
    fields: dict[str, Any] = {"num_hidden_layers": NUM_LAYERS}
    if kind == "mimo":  # XiaomiMiMo/MiMo-7B-RL
        fields |= {
            "architectures": ["MiMoForCausalLM"],
            "auto_map": {
                "AutoConfig": "configuration_mimo.MiMoConfig",
                "AutoModel": "modeling_mimo.MiMoModel",
                "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM",
            },
            "model_type": "mimo", "attention_bias": True, "layer_types": None,
            "max_window_layers": NUM_LAYERS, "sliding_window": 32768, "use_mrope": False,
            "use_sliding_window": False,
        }  # fmt: skip
    return fields
