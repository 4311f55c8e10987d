"""Small checkpoints with an MTP layer under the names of published ones."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, Glm4MoeConfig

VOCAB_SIZE, SIZE, NUM_LAYERS = 64, 32, 2
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": SIZE,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": NUM_LAYERS + 1,
    "num_attention_heads": 4,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1,
}
CONFIGS = {
    "deepseek_v3": lambda sizes: DeepseekV3Config(
        **sizes, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=8,
    ),
    "glm4_moe": lambda sizes: Glm4MoeConfig(
        **sizes, num_key_value_heads=2, head_dim=8, use_qk_norm=True, attention_bias=True
    ),
}  # fmt: skip


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
    path = folder / "model.safetensors"
    tensors = load_file(path)
    prefix = f"model.layers.{NUM_LAYERS}."
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{prefix}{name}.weight"] = 1 + 0.3 * torch.randn(SIZE)
    tensors[f"{prefix}eh_proj.weight"] = 0.2 * torch.randn(SIZE, 2 * SIZE)
    tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path, {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    raw["num_hidden_layers"] = NUM_LAYERS
    (folder / "config.json").write_text(json.dumps(raw))
    return folder
