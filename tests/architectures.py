"""Small configs of every tested model family, with its distinguishing features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from transformers import PreTrainedConfig

from checkpoints import VOCAB_SIZE

CONTEXT = 256
WINDOW = 24
_ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    **_ENDS,
}
_GPT2_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": CONTEXT,
    "initializer_range": 0.2,
    **_ENDS,
}
_MULTI_HEAD = {name: size for name, size in _SIZES.items() if name != "num_key_value_heads"}
_ALTERNATING = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
    "head_dim": 16,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0 + i / 4 for i in range(8)],
}
_MLA = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def _config(kind: str, sizes: dict[str, Any], **options: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: getattr(transformers, f"{kind}Config")(**{**sizes, **options})


# Name: peculiarity and config.
ARCHITECTURES: dict[str, tuple[str, Callable[[], PreTrainedConfig]]] = {
    "gpt2": ("Conv1D, tanh GELU, tied", _config("GPT2", _GPT2_SIZES)),
    "gpt_bigcode": ("multi-query", _config("GPTBigCode", _GPT2_SIZES)),
    "opt": (
        "positions from 2",
        _config(
            "OPT", _MULTI_HEAD, ffn_dim=128, word_embed_proj_dim=64, init_std=0.2, pad_token_id=1
        ),
    ),
    "gpt_neox": ("partial rotary, parallel", _config("GPTNeoX", _MULTI_HEAD)),
    "llama": ("grouped heads", _config("Llama", _SIZES)),
    "mistral": (f"window {WINDOW}", _config("Mistral", _SIZES, sliding_window=WINDOW)),
    "qwen2": ("biases", _config("Qwen2", _SIZES)),
    "qwen3": ("QK norms", _config("Qwen3", _SIZES, head_dim=16)),
    "phi3": ("fused QKV", _config("Phi3", _SIZES)),
    "phi3 longrope": (
        "long factors at every position",
        _config("Phi3", _SIZES, original_max_position_embeddings=48, rope_scaling=_LONGROPE),
    ),
    "gemma": ("norms of one plus weight", _config("Gemma", _SIZES, head_dim=16)),
    "gemma2": (
        f"softcap 3, window {WINDOW} in one of two",
        _config("Gemma2", _SIZES, attn_logit_softcapping=3.0, **_ALTERNATING),
    ),
    "gemma3_text": (
        f"window {WINDOW} in one of two",
        _config("Gemma3Text", _SIZES, **_ALTERNATING),
    ),
    "smollm3": ("layers without rotary", _config("SmolLM3", _SIZES, num_hidden_layers=4)),
    "granite": ("multipliers", _config("Granite", _SIZES, attention_multiplier=0.25)),
    "bloom": ("ALiBi", _config("Bloom", _MULTI_HEAD, n_layer=2, n_head=4)),
    "falcon": ("multi-query", _config("Falcon", _MULTI_HEAD, multi_query=True)),
    "falcon, new decoder": (
        "grouped heads, cached repeated",
        _config("Falcon", _MULTI_HEAD, new_decoder_architecture=True, num_kv_heads=2),
    ),
    "falcon, ALiBi": ("ALiBi in bfloat16", _config("Falcon", _MULTI_HEAD, alibi=True, bias=True)),
    "gptj": ("own attention, interleaved rotary", _config("GPTJ", _GPT2_SIZES, rotary_dim=8)),
    "codegen": ("own attention", _config("CodeGen", _GPT2_SIZES, n_ctx=CONTEXT, rotary_dim=8)),
    "phi": ("partial rotary, parallel", _config("Phi", _SIZES, num_key_value_heads=4)),
    "stablelm": ("partial rotary", _config("StableLm", _SIZES)),
    "olmo2": ("norms after", _config("Olmo2", _SIZES)),
    "starcoder2": ("tanh GELU", _config("Starcoder2", _SIZES)),
    "cohere": ("interleaved rotary, parallel", _config("Cohere", _SIZES, logit_scale=1.0)),
    "mixtral": ("2 of 4 experts", _config("Mixtral", _SIZES, num_local_experts=4)),
    "qwen2_moe": (
        "2 of 8 experts and a shared one",
        _config("Qwen2Moe", _SIZES, shared_expert_intermediate_size=32, **_EXPERTS),
    ),
    "qwen3_moe": ("2 of 8 experts, QK norms", _config("Qwen3Moe", _SIZES, head_dim=16, **_EXPERTS)),
    "olmoe": ("2 of 8 experts", _config("Olmoe", _SIZES, num_experts=8, num_experts_per_tok=2)),
    "granitemoe": (
        "2 of 4 experts",
        _config("GraniteMoe", _SIZES, attention_multiplier=0.25, num_local_experts=4),
    ),
    "gpt_oss": (
        f"sinks, window {WINDOW} in one of two, 2 of 4 experts",
        _config("GptOss", _SIZES, num_local_experts=4, num_experts_per_tok=2, **_ALTERNATING),
    ),
    "deepseek_v3": ("latent attention, 2 of 4 experts", _config("DeepseekV3", _SIZES, **_MLA)),
}
