"""config.json of published models of experts, and of multimodal ones, at small width."""

from __future__ import annotations

from typing import Any

from published_configs import ENDS, WINDOW, llama3_rope, llama_like, qwen2


def _deepseek(kind: str, architecture: str, **options: Any) -> dict[str, Any]:
    fixed = {
        "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 16, "moe_intermediate_size": 32, "moe_layer_freq": 1,
        "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 2,
        "num_experts_per_tok": 3, "attention_bias": False, "rope_theta": 10000,
        "max_position_embeddings": 163840, "tie_word_embeddings": False,
    }  # fmt: skip
    return llama_like(kind, architecture, **{**fixed, **options})


def _deepseek_yarn(mscale: float) -> dict[str, Any]:
    return {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": mscale,
            "mscale_all_dim": mscale, "original_max_position_embeddings": 4096}  # fmt: skip


def _qwen_vl(version: str, vision: dict[str, Any], **options: Any) -> dict[str, Any]:
    fixed = {
        "model_type": f"qwen2{version}_vl", "rope_scaling": {"type": "mrope", "mrope_section": [2,
        3, 3]},
        "architectures": [f"Qwen2{version}VLForConditionalGeneration".replace("_5", "_5_")],
        "vision_start_token_id": 500, "vision_end_token_id": 501, "vision_token_id": 502,
        "image_token_id": 503, "video_token_id": 504, "vision_config": vision,
    }  # fmt: skip
    return {**qwen2(), **fixed, **options}


_SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 32, "image_size": 56,
           "patch_size": 14,
           "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1,
           "vision_use_head": False}  # fmt: skip

_PIXTRAL = {"model_type": "pixtral", "hidden_size": 32, "image_size": 56, "patch_size": 14,
            "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1,
            "head_dim": 16,
            "hidden_act": "silu", "rope_theta": 10000.0}  # fmt: skip

_LLAMA4_VISION = {"model_type": "llama4_vision_model", "hidden_size": 32, "image_size": 56,
                  "patch_size": 14, "intermediate_size": 128, "num_attention_heads": 2,
                  "num_hidden_layers": 1, "projector_input_dim": 32, "projector_output_dim": 32,
                  "vision_output_dim": 32, "pixel_shuffle_ratio": 0.5}  # fmt: skip

_QWEN2_VISION = {"depth": 1, "embed_dim": 32, "mlp_ratio": 2, "num_heads": 2, "in_chans": 3,
                 "hidden_size": 64, "patch_size": 14, "spatial_merge_size": 2,
                 "spatial_patch_size": 14, "temporal_patch_size": 2}  # fmt: skip

_QWEN25_VISION = {"depth": 1, "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 64,
                  "num_heads": 2, "in_chans": 3, "out_hidden_size": 64, "patch_size": 14,
                  "spatial_merge_size": 2, "spatial_patch_size": 14, "window_size": 112,
                  "fullatt_block_indexes": [0], "tokens_per_second": 2,
                  "temporal_patch_size": 2}  # fmt: skip

_QWEN3_VISION = {"depth": 1, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 32, "num_heads": 2,
                 "intermediate_size": 64, "in_channels": 3, "out_hidden_size": 64, "patch_size": 16,
                 "spatial_merge_size": 2, "temporal_patch_size": 2, "deepstack_visual_indexes": [0],
                 "num_position_embeddings": 16, "model_type": "qwen3_vl"}  # fmt: skip


COMPOSED: dict[str, dict[str, Any]] = {
    "Llama-4-Scout": {
        "model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"],
        "boi_token_index": 500, "eoi_token_index": 501, "image_token_index": 502,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vision_config": _LLAMA4_VISION,
        "text_config": llama_like(
            "llama4_text", "Llama4ForCausalLM", num_hidden_layers=4, head_dim=16, rms_norm_eps=1e-5,
            intermediate_size=64, intermediate_size_mlp=128, num_local_experts=4, rope_theta=5e5,
            num_experts_per_tok=1, interleave_moe_layer_step=1, attention_chunk_size=64,
            no_rope_layers=[1, 1, 1, 0], use_qk_norm=True, attn_temperature_tuning=True,
            floor_scale=64, attn_scale=0.1, rope_scaling=llama3_rope(16.0),
            for_llm_compressor=False,
            max_position_embeddings=10485760, attention_bias=False, router_jitter_noise=0.0,
            output_router_logits=False, router_aux_loss_coef=0.001,
        ),
    },
    "Qwen1.5-MoE-A2.7B": llama_like(
        "qwen2_moe", "Qwen2MoeForCausalLM", num_key_value_heads=4, moe_intermediate_size=32,
        shared_expert_intermediate_size=128, num_experts=8, num_experts_per_tok=4, rope_theta=1e6,
        decoder_sparse_step=1, norm_topk_prob=False, sliding_window=32768, max_window_layers=2,
        use_sliding_window=False, tie_word_embeddings=False, router_aux_loss_coef=0.001,
    ),
    "Qwen3-30B-A3B": llama_like(
        "qwen3_moe", "Qwen3MoeForCausalLM", head_dim=32, moe_intermediate_size=32, num_experts=8,
        num_experts_per_tok=3, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
        rope_theta=1e6, rope_scaling=None, attention_bias=False, sliding_window=None,
        use_sliding_window=False, tie_word_embeddings=False,
    ),
    "gemma-3-4b": {
        "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 500, "eoi_token_index": 501, "image_token_index": 502,
        "eos_token_id": [0, 1], "mm_tokens_per_image": 4, "torch_dtype": "bfloat16",
        "initializer_range": 0.2, "vision_config": _SIGLIP,
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 6, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": WINDOW, "head_dim": 32, "num_attention_heads": 4,
            "num_key_value_heads": 2, "query_pre_attn_scalar": 32, **ENDS,
        },
    },
    "Mistral-Small-3.1": {
        "model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"],
        "image_token_index": 10, "multimodal_projector_bias": False, "projector_hidden_act": "gelu",
        "spatial_merge_size": 2, "vision_feature_layer": -1, "torch_dtype": "bfloat16",
        "vision_config": _PIXTRAL,
        "text_config": llama_like(
            "mistral", "MistralForCausalLM", rms_norm_eps=1e-5, rope_theta=1000000000.0, head_dim=8,
            sliding_window=None, max_position_embeddings=131072,
        ),
    },
    "Mixtral-8x7B": llama_like(
        "mixtral", "MixtralForCausalLM", rms_norm_eps=1e-5, rope_theta=1000000.0,
        sliding_window=None,
        num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32768,
        output_router_logits=False, router_aux_loss_coef=0.02, tie_word_embeddings=False,
    ),
    "DeepSeek-V2-Lite": _deepseek(
        "deepseek_v2", "DeepseekV2ForCausalLM", topk_method="greedy", n_group=1, topk_group=1,
        norm_topk_prob=False, routed_scaling_factor=1.0, scoring_func="softmax",
        aux_loss_alpha=0.001, seq_aux=True, rope_scaling=_deepseek_yarn(0.707),
    ),
    "DeepSeek-V3": _deepseek(
        "deepseek_v3", "DeepseekV3ForCausalLM", q_lora_rank=48, n_shared_experts=1, n_group=4,
        topk_group=2, topk_method="noaux_tc", norm_topk_prob=True, routed_scaling_factor=2.5,
        scoring_func="sigmoid", num_nextn_predict_layers=1, rope_scaling=_deepseek_yarn(1.0),
    ),
    "gpt-oss-20b": llama_like(
        "gpt_oss", "GptOssForCausalLM", head_dim=16, rms_norm_eps=1e-5, num_local_experts=4,
        num_experts_per_tok=2, experts_per_token=2, attention_bias=True, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"], rope_theta=150000, swiglu_limit=7.0,
        max_position_embeddings=131072, initial_context_length=4096, tie_word_embeddings=False,
        rope_scaling={"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                      "truncate": False, "original_max_position_embeddings": 4096},
    ),
    "Qwen3-VL-4B": {
        "model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"],
        "image_token_id": 503, "video_token_id": 504, "vision_start_token_id": 500,
        "vision_end_token_id": 501, "tie_word_embeddings": True, "vision_config": _QWEN3_VISION,
        "text_config": llama_like(
            "qwen3_vl_text", "Qwen3VLForConditionalGeneration", head_dim=16, attention_bias=False,
            rope_theta=5000000, max_position_embeddings=262144, rope_scaling={
                "mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"},
        ),
    },
    "Qwen2-VL-2B": _qwen_vl("", _QWEN2_VISION, tie_word_embeddings=True),
    "Qwen2.5-VL-7B": _qwen_vl("_5", _QWEN25_VISION, tie_word_embeddings=False),
}  # fmt: skip
