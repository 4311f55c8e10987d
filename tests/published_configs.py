"""config.json of published checkpoints at small width; what is scaled is what published.py says."""

from __future__ import annotations

from typing import Any

from checkpoints import VOCAB_SIZE

WINDOW = 24

ENDS = {"vocab_size": VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.2}


def llama_like(kind: str, architecture: str, **options: Any) -> dict[str, Any]:
    return {
        "model_type": kind, "architectures": [architecture], "hidden_size": 64,
        "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "attention_dropout": 0.0, "torch_dtype": "bfloat16",
        "use_cache": True, **ENDS, **options,
    }  # fmt: skip


def _llama(**options: Any) -> dict[str, Any]:
    fixed = {"rms_norm_eps": 1e-5, "attention_bias": False, "pretraining_tp": 1}
    return llama_like("llama", "LlamaForCausalLM", **{**fixed, **options})


def qwen2(**options: Any) -> dict[str, Any]:
    fixed = {"rope_theta": 1e6, "sliding_window": 131072, "use_sliding_window": False,
             "max_position_embeddings": 32768, "max_window_layers": 2}  # fmt: skip
    return llama_like("qwen2", "Qwen2ForCausalLM", **{**fixed, **options})


def llama3_rope(factor: float) -> dict[str, Any]:
    return {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip


def _phi3(**options: Any) -> dict[str, Any]:
    fixed = {"hidden_size": 96, "num_key_value_heads": 4, "rope_theta": 10000.0,
             "rms_norm_eps": 1e-5,
             "rope_scaling": None, "sliding_window": None, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
             "original_max_position_embeddings": 4096, "pad_token_id": 0}  # fmt: skip
    return llama_like("phi3", "Phi3ForCausalLM", **{**fixed, **options})


def _longrope(size: int) -> dict[str, Any]:
    """One factor a pair; the real ones grow with the wavelength like these."""
    return {"type": "longrope", "short_factor": [1.0 + i / 20 for i in range(size)],
            "long_factor": [1.0 + 3 * i for i in range(size)]}  # fmt: skip


def _phi(**options: Any) -> dict[str, Any]:
    return {
        "model_type": "phi", "architectures": ["PhiForCausalLM"], "hidden_size": 64,
        "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": None, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5,
        "max_position_embeddings": 2048, "partial_rotary_factor": 0.5, "qk_layernorm": False,
        "rope_scaling": None, "rope_theta": 10000.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
        "attention_dropout": 0.0, "tie_word_embeddings": False, "torch_dtype": "float16",
        **ENDS, **options,
    }  # fmt: skip


def _gemma(kind: str, architecture: str, **options: Any) -> dict[str, Any]:
    fixed = {"head_dim": 32, "hidden_activation": "gelu_pytorch_tanh", "rope_theta": 10000.0,
             "attention_bias": False, "pad_token_id": 0}  # fmt: skip
    found = llama_like(kind, architecture, **{**fixed, **options})
    return {key: value for key, value in found.items() if key != "hidden_act"}


def _opt(**options: Any) -> dict[str, Any]:
    return {
        "model_type": "opt", "architectures": ["OPTForCausalLM"], "hidden_size": 64, "ffn_dim": 256,
        "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 2048,
        "word_embed_proj_dim": 64, "do_layer_norm_before": True, "activation_function": "relu",
        "_remove_final_layer_norm": False, "init_std": 0.2, "dropout": 0.1, "layerdrop": 0.0,
        "attention_dropout": 0.0, "prefix": "</s>", "torch_dtype": "float16",
        **ENDS, "pad_token_id": 1, **options,
    }  # fmt: skip


def _falcon(**options: Any) -> dict[str, Any]:
    return {
        "model_type": "falcon", "architectures": ["FalconForCausalLM"], "hidden_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "multi_query": True, "alibi": False,
        "bias": False, "new_decoder_architecture": False, "parallel_attn": True,
        "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0,
        "hidden_dropout": 0.0, "layer_norm_epsilon": 1e-5, "torch_dtype": "bfloat16",
        **ENDS, **options,
    }  # fmt: skip


def _stablelm(**options: Any) -> dict[str, Any]:
    fixed = {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "rope_theta": 10000,
             "use_qkv_bias": False, "num_key_value_heads": 4, "hidden_size": 128,
             "tie_word_embeddings": False}  # fmt: skip
    return llama_like("stablelm", "StableLmForCausalLM", **{**fixed, **options})


def _mpt(**options: Any) -> dict[str, Any]:
    attention = {"alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0,
                 "attn_type": "multihead_attention", "attn_uses_sequence_id": False,
                 "clip_qkv": None, "prefix_lm": False, "qk_ln": False,
                 "softmax_scale": None}  # fmt: skip
    return {
        "model_type": "mpt", "architectures": ["MPTForCausalLM"], "d_model": 64, "n_heads": 4,
        "n_layers": 2, "expansion_ratio": 4, "max_seq_len": 2048, "no_bias": True, "emb_pdrop": 0,
        "learned_pos_emb": True, "resid_pdrop": 0, "tokenizer_name": "EleutherAI/gpt-neox-20b",
        "torch_dtype": "bfloat16", **ENDS, "attn_config": {**attention, **options},
    }  # fmt: skip


CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-2-7b": _llama(num_key_value_heads=4, rope_scaling=None, tie_word_embeddings=False),
    "Llama-3.1-8B": _llama(
        max_position_embeddings=131072, rope_theta=500000.0, rope_scaling=llama3_rope(8.0),
        tie_word_embeddings=False,
    ),
    "Llama-3.2-1B": _llama(
        max_position_embeddings=131072, rope_theta=500000.0, rope_scaling=llama3_rope(32.0),
        tie_word_embeddings=True, head_dim=16,
    ),
    "Qwen2-0.5B": qwen2(tie_word_embeddings=True),
    "Qwen2.5-7B": qwen2(tie_word_embeddings=False),
    "Qwen2.5-7B yarn": qwen2(
        tie_word_embeddings=False,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    ),
    "Qwen3-0.6B": llama_like(
        "qwen3", "Qwen3ForCausalLM", head_dim=32, rope_theta=1e6, rope_scaling=None,
        attention_bias=False, max_window_layers=2, sliding_window=None, use_sliding_window=False,
        tie_word_embeddings=True, max_position_embeddings=40960,
    ),
    "gemma-2b": _gemma("gemma", "GemmaForCausalLM", num_key_value_heads=1),
    "gemma-2-2b": _gemma(
        "gemma2", "Gemma2ForCausalLM", attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
        query_pre_attn_scalar=32, sliding_window=WINDOW, cache_implementation="hybrid",
    ),
    "gemma-3-1b": _gemma(
        "gemma3_text", "Gemma3ForCausalLM", num_key_value_heads=1, num_hidden_layers=6,
        query_pre_attn_scalar=32, rope_theta=1000000, rope_local_base_freq=10000, rope_scaling=None,
        sliding_window=WINDOW, sliding_window_pattern=6, attn_logit_softcapping=None,
        final_logit_softcapping=None, cache_implementation="hybrid", max_position_embeddings=32768,
    ),
    "Mistral-7B-v0.1": llama_like(
        "mistral", "MistralForCausalLM", rms_norm_eps=1e-5, rope_theta=10000.0,
        sliding_window=WINDOW,
        max_position_embeddings=32768, tie_word_embeddings=False,
    ),
    "Mistral-Nemo": llama_like(
        "mistral", "MistralForCausalLM", rms_norm_eps=1e-5, rope_theta=1000000.0, head_dim=8,
        sliding_window=None, max_position_embeddings=131072, tie_word_embeddings=False,
    ),
    "phi-1": _phi(),
    "phi-2": _phi(hidden_size=160, partial_rotary_factor=0.4),
    "Phi-3-mini-4k": _phi3(sliding_window=WINDOW),
    "Phi-3.5-mini": _phi3(
        rope_scaling=_longrope(12), max_position_embeddings=131072, sliding_window=262144
    ),
    "phi-4": _phi3(
        num_key_value_heads=1, rope_theta=250000, max_position_embeddings=16384,
        original_max_position_embeddings=16384,
    ),
    "Phi-4-mini": _phi3(
        hidden_size=64, num_key_value_heads=2, partial_rotary_factor=0.75, tie_word_embeddings=True,
        rope_scaling=_longrope(6), max_position_embeddings=131072, sliding_window=262144,
    ),
    "SmolLM-135M": _llama(
        hidden_size=96, num_attention_heads=6, max_position_embeddings=2048,
        tie_word_embeddings=True,
    ),
    "SmolLM2-1.7B": _llama(
        num_key_value_heads=4, rope_theta=130000, max_position_embeddings=8192, pad_token_id=0,
        tie_word_embeddings=True,
    ),
    "SmolLM3-3B": llama_like(
        "smollm3", "SmolLM3ForCausalLM", num_key_value_heads=1, num_hidden_layers=4, rope_theta=5e6,
        no_rope_layers=[1, 1, 1, 0], no_rope_layer_interval=4, rope_scaling=None, mlp_bias=False,
        use_sliding_window=False, sliding_window=None, max_position_embeddings=65536,
        pad_token_id=0, layer_types=["full_attention"] * 4, attention_bias=False,
        tie_word_embeddings=True,
    ),
    "gpt2": {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_ctx": 1024,
        "n_positions": 1024, "n_embd": 64, "n_head": 4, "n_layer": 2, "attn_pdrop": 0.1,
        "embd_pdrop": 0.1, "resid_pdrop": 0.1, "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5, "summary_type": "cls_index", **ENDS,
    },
    "opt-125m": _opt(),
    "opt-350m": _opt(word_embed_proj_dim=32, do_layer_norm_before=False),
    "pythia-160m": {
        "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "hidden_size": 128,
        "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "hidden_act": "gelu", "layer_norm_eps": 1e-5, "max_position_embeddings": 2048,
        "rotary_emb_base": 10000, "rotary_pct": 0.25, "use_parallel_residual": True,
        "tie_word_embeddings": False, "torch_dtype": "float16", **ENDS,
    },
    "bloom-560m": {
        "model_type": "bloom", "architectures": ["BloomForCausalLM"], "n_embed": 64, "n_layer": 2,
        "num_attention_heads": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "apply_residual_connection_post_layernorm": False, "layer_norm_epsilon": 1e-5,
        "masked_softmax_fusion": True, "offset_alibi": 100, "pretraining_tp": 1, "seq_length": 2048,
        "skip_bias_add": True, "slow_but_exact": False, "unk_token_id": 0, **ENDS,
    },
    "falcon-7b": _falcon(),
    "falcon-rw-1b": _falcon(multi_query=False, alibi=True, bias=True, parallel_attn=False),
    "falcon-40b": _falcon(new_decoder_architecture=True, num_kv_heads=2),
    "stablelm-3b-4e1t": _stablelm(),
    "stablelm-2-12b": _stablelm(
        num_key_value_heads=2, use_parallel_residual=True, qk_layernorm=True
    ),
    "OLMo-2-7B": llama_like(
        "olmo2", "Olmo2ForCausalLM", num_key_value_heads=4, rope_theta=500000, attention_bias=False,
        rope_scaling=None, pad_token_id=0, tie_word_embeddings=False,
    ),
    "granite-3.1-2b": llama_like(
        "granite", "GraniteForCausalLM", rms_norm_eps=1e-5, rope_theta=5000000.0,
        embedding_multiplier=12.0, attention_multiplier=0.015625, residual_multiplier=0.22,
        logits_scaling=8.0, attention_bias=False, mlp_bias=False, max_position_embeddings=131072,
        rope_scaling=None, tie_word_embeddings=True,
    ),
    "mpt-7b": _mpt(),
    "mpt-7b, clipped": {**_mpt(clip_qkv=1.5), "d_model": 96, "n_heads": 6},
    "gpt-neo-125m": {
        "model_type": "gpt_neo", "architectures": ["GPTNeoForCausalLM"], "hidden_size": 64,
        "num_heads": 4, "num_layers": 2, "attention_types": [[["global", "local"], 1]],
        "attention_layers": ["global", "local"], "window_size": WINDOW, "intermediate_size": None,
        "activation_function": "gelu_new", "max_position_embeddings": 2048,
        "layer_norm_epsilon": 1e-5, "attention_dropout": 0, "embed_dropout": 0, "resid_dropout": 0,
        **ENDS,
    },
}  # fmt: skip
