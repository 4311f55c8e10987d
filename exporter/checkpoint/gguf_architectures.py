"""GGUF architectures that transformers does not read, or not completely: configs and tensor names.

Header fields, permutations and defaults are those of llama.cpp's converter and models
(llama-cpp-python 0.3.36). Names of tensors come from gguf-py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

_FIELDS = {
    "context_length": "max_position_embeddings max_seq_len",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size_mlp intermediate_size n_inner",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps layer_norm_epsilon norm_epsilon",
    "attention.sliding_window": "sliding_window",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.clamp_kqv": "clip_qkv",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logit_scale logits_scaling",
    "use_parallel_residual": "use_parallel_residual",
    "expert_count": "num_local_experts num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size shared_intermediate_size",
    "expert_shared_count": "n_shared_experts num_shared_experts moe_num_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace moe_layer_start_index",
    "interleave_moe_layer_step": "interleave_moe_layer_step moe_layer_interval",
}  # header fields, without the architecture, and names in configs, of which the first is taken
_SCALES = (
    "attention.clamp_kqv",
    "attention.scale",
    "embedding_scale",
    "expert_weights_scale",
    "logit_scale",
    "residual_scale",
)  # fields without which a model computes other numbers
_FLAGS = {
    "attn_q.bias": "attention_bias use_bias",
    "attn_qkv.bias": "attention_bias",
    "attn_output.bias": "attention_out_bias",
    "ffn_up.bias": "mlp_bias",
    "attn_q_norm.weight": "use_qk_norm qk_layernorm",
}  # tensors of the first layer whose presence sets a field of the config
_OTHER_NAMES = {
    "router.weight": "ffn_gate_inp.weight",
    "e_score_correction_bias": "exp_probs_b.bias",
    "sinks": "attn_sinks.weight",
}  # ends of names in models, and names in files
_PARTS = {
    "experts.gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "experts.gate_up_proj_bias": ("ffn_gate_exps.bias", "ffn_up_exps.bias"),
    "experts.down_proj": ("ffn_down_exps.weight",),
    "experts.down_proj_bias": ("ffn_down_exps.bias",),
    "shared_mlp.input_linear.weight": ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
    "kv_b_proj.weight": ("attn_k_b.weight", "attn_v_b.weight"),
}  # ends of names in models, and names of the parts that are joined
_LAYER_NAME = re.compile(
    rf".*\blayers\.(\d+)\..*?\b({'|'.join(map(re.escape, [*_OTHER_NAMES, *_PARTS]))})"
)
_GLM_FLASH_VOCAB_SIZE = 154_880  # of GLM-4.7-Flash, whose files have no gating function
_GROUPS = {160: (8, 3), 256: (8, 4)}  # of DeepSeek V2 and V3 by experts, which older files lack


@dataclass(frozen=True)
class GgufArchitecture:
    """Model type of transformers for an architecture.

    Attributes:
        model_type: Model type of transformers.
        permutation: Architecture known to transformers whose weights are permuted alike.
        variants: Other model types, for files with a header field above a number.
        options: Fields of the config that follow from the architecture.
    """

    model_type: str
    permutation: str | None = None
    variants: Mapping[tuple[str, float], str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


ARCHITECTURES = {
    "arcee": GgufArchitecture("arcee", "llama"),
    "chatglm": GgufArchitecture("glm"),
    "cohere2": GgufArchitecture("cohere2"),
    "command-r": GgufArchitecture("cohere"),
    "deepseek2": GgufArchitecture(
        "deepseek_v2",
        variants={("expert_gating_func", 1): "deepseek_v3"},
        options={"q_lora_rank": None, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
    ),
    "ernie4_5": GgufArchitecture("ernie4_5"),
    "dots1": GgufArchitecture("dots1"),
    "ernie4_5-moe": GgufArchitecture("ernie4_5_moe", options={"moe_layer_end_index": -1}),
    "exaone-moe": GgufArchitecture("exaone_moe"),
    "exaone4": GgufArchitecture("exaone4"),
    "gemma": GgufArchitecture("gemma", "gemma2"),
    "glm4": GgufArchitecture("glm4"),
    "glm4moe": GgufArchitecture("glm4_moe"),
    "gpt-oss": GgufArchitecture("gpt_oss"),
    "gpt2": GgufArchitecture("gpt2", "gpt2"),
    "gptneox": GgufArchitecture("gpt_neox", "bloom"),
    "granite": GgufArchitecture("granite", "llama"),
    "granitemoe": GgufArchitecture(
        "granitemoe",
        "llama",
        variants={("expert_shared_feed_forward_length", 0): "granitemoeshared"},
    ),
    "hunyuan-dense": GgufArchitecture("hunyuan_v1_dense"),
    "hunyuan-moe": GgufArchitecture("hunyuan_v1_moe"),
    "jais2": GgufArchitecture("jais2"),
    "llama": GgufArchitecture("llama", "llama", variants={("expert_count", 0): "mixtral"}),
    "llama4": GgufArchitecture("llama4_text"),
    "minicpm3": GgufArchitecture("minicpm3"),
    "mistral3": GgufArchitecture(
        "mistral", "llama", variants={("attention.temperature_scale", 0): "ministral3"}
    ),
    "mpt": GgufArchitecture("mpt"),
    "olmo": GgufArchitecture("olmo", "llama"),
    "olmo2": GgufArchitecture("olmo2", variants={("attention.sliding_window", 0): "olmo3"}),
    "olmoe": GgufArchitecture("olmoe"),
    "phi2": GgufArchitecture("phi"),
    "phimoe": GgufArchitecture("phimoe"),
    "qwen2": GgufArchitecture("qwen2"),
    "qwen2moe": GgufArchitecture("qwen2_moe", "qwen2moe"),
    "qwen2vl": GgufArchitecture("qwen2"),
    "qwen3": GgufArchitecture("qwen3"),
    "qwen3moe": GgufArchitecture("qwen3_moe", options={"norm_topk_prob": True}),
    "qwen3vl": GgufArchitecture("qwen3"),
    "qwen3vlmoe": GgufArchitecture("qwen3_moe", options={"norm_topk_prob": True}),
    "seed_oss": GgufArchitecture("seed_oss"),
    "smollm3": GgufArchitecture("smollm3", "llama"),
    "starcoder": GgufArchitecture("gpt_bigcode"),
    "starcoder2": GgufArchitecture("starcoder2"),
}


def build_config(
    architecture: str, fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> PreTrainedConfig | None:
    """Return the config of a file; None for an architecture without a table here.

    Args:
        architecture: Name of the architecture.
        fields: Values of the header's fields.
        shapes: Shapes of the tensors by name.
    """
    relation = ARCHITECTURES.get(architecture)
    if relation is None:
        return None
    prefix = f"{architecture}."
    header = {key[len(prefix) :]: _scalar(v) for key, v in fields.items() if key.startswith(prefix)}
    vocab_size = shapes["token_embd.weight"][0]
    if architecture == "deepseek2" and vocab_size == _GLM_FLASH_VOCAB_SIZE:
        header.setdefault("expert_gating_func", 2)
    types = [
        name for (key, number), name in relation.variants.items() if (header.get(key) or 0) > number
    ]
    config_class = CONFIG_MAPPING[types[0] if types else relation.model_type]
    default = config_class()
    special = _special_fields(config_class.model_type, header)
    header["attention.sliding_window"] = header.get("attention.sliding_window") or None
    values = {
        name: header[key]
        for key, names in _FIELDS.items()
        if key in header
        for name in _first_field(default, names)
    }
    values["num_hidden_layers"] -= header.get("nextn_predict_layers", 0)  # of speculative heads
    for tensor, names in _FLAGS.items():
        for name in _first_field(default, names):
            values[name] = values.get(name) or f"blk.0.{tensor}" in shapes
    head_size = (
        special.get("head_dim")
        or header.get("attention.key_length")
        or header["embedding_length"] // header["attention.head_count"]
    )
    if "attention.key_length" in header or hasattr(default, "head_dim"):
        values["head_dim"] = head_size
    if hasattr(default, "lm_head_bias"):
        values["lm_head_bias"] = "output.bias" in shapes
    if rope := getattr(default, "rope_parameters", None):
        values["rope_parameters"] = _rope_parameters(header, head_size, rope)
    _check_scales(header, default)
    if isinstance(windows := header.get("attention.sliding_window_pattern"), list):
        types = [f"{'sliding' if window else 'full'}_attention" for window in windows]
        values["layer_types"] = types
    pad = fields.get("tokenizer.ggml.padding_token_id", vocab_size)
    return config_class(
        **{**relation.options, **values, **special},
        vocab_size=vocab_size,
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=fields.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=pad if pad < vocab_size else None,
        tie_word_embeddings="output.weight" not in shapes,
    )


def tensor_names(keys: Iterable[str]) -> dict[str, str]:
    """Return names in a model by names in a file, for those that gguf-py does not map."""
    return {
        f"blk.{match[1]}.{_OTHER_NAMES[match[2]]}": key
        for key in keys
        if (match := _LAYER_NAME.fullmatch(key)) and match[2] in _OTHER_NAMES
    }


def part_names(keys: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of parts in a file by names in a model, for tensors that are joined."""
    return {
        key: [f"blk.{match[1]}.{part}" for part in _PARTS[match[2]]]
        for key in keys
        if (match := _LAYER_NAME.fullmatch(key)) and match[2] in _PARTS
    }


def join_parts(
    key: str, parts: Sequence[torch.Tensor], module: torch.nn.Module, shape: torch.Size
) -> torch.Tensor:
    """Join the parts of a file's weights or biases in the layout of the module.

    Args:
        key: Name in the model.
        parts: Tensors of the file: gate and up, or one tensor, of all experts, [E, R, C] or
            [E, R]; gate and up of shared experts, [R, C]; keys [H, L, D] and values [H, D, L]
            of latent attention.
        module: Module of the weights.
        shape: Shape in the module.
    """
    if key.endswith("kv_b_proj.weight"):
        keys, values = parts
        return torch.cat([keys.transpose(1, 2), values], 1).flatten(0, 1)
    if key.endswith("shared_mlp.input_linear.weight"):
        return torch.cat(list(parts))
    if len(parts) == 1:
        (joined,) = parts
    elif getattr(module, "is_concatenated", True):
        joined = torch.cat(list(parts), 1)
    else:
        stacked = torch.stack(list(parts), 2)
        joined = stacked.reshape(len(stacked), -1, *stacked.shape[3:])
    if joined.ndim > 2 and getattr(module, "is_transposed", joined.shape != shape):
        joined = joined.transpose(1, 2)
    return joined


def _first_field(config: PreTrainedConfig, names: str) -> list[str]:
    """Return the first of several names that a config has, if any."""
    return [name for name in names.split() if hasattr(config, name)][:1]


def _scalar(value: Any) -> Any:
    """Return the value of a field that is stored for each layer but equal in all."""
    is_uniform = isinstance(value, list) and not isinstance(value[0], bool) and len({*value}) == 1
    return value[0] if is_uniform else value


def _special_fields(model_type: str, header: dict[str, Any]) -> dict[str, Any]:
    """Return fields of the config that several header fields determine. Raises ValueError."""
    if model_type == "mpt":
        if not header.get("attention.max_alibi_bias"):
            raise ValueError("mpt without ALiBi is not supported")
        attention = {
            "clip_qkv": header.pop("attention.clamp_kqv", None),
            "alibi_bias_max": int(header["attention.max_alibi_bias"]),
        }
        return {"attn_config": attention}
    if model_type == "llama4_text":
        if header.get("attention.sliding_window") == 0 or not header.get("expert_count"):
            raise ValueError("Llama 4 without chunked attention or experts is not supported")
        return {
            "intermediate_size": header["expert_feed_forward_length"],
            "use_qk_norm": header["expert_count"] != 128,  # as llama.cpp recognizes Maverick
        }
    if "attention.kv_lora_rank" not in header:
        return {}
    heads, rotary_size = header["attention.head_count"], header["rope.dimension_count"]
    key_size = header.get("attention.key_length_mla", header["attention.key_length"])
    value_size = header.get("attention.value_length_mla", header.get("attention.value_length"))
    fields = {
        "num_key_value_heads": heads,  # of keys and values that are not compressed
        "head_dim": rotary_size,
        "qk_rope_head_dim": rotary_size,
        "qk_nope_head_dim": key_size - rotary_size,
        "v_head_dim": value_size or header["embedding_length"] // heads,
    }
    if model_type == "minicpm3":
        return fields
    groups = _GROUPS.get(header.get("expert_count", 0), (1, 1))
    fields["n_group"] = header.get("expert_group_count") or groups[0]
    fields["topk_group"] = header.get("expert_group_used_count") or groups[1]
    if model_type == "deepseek_v2":
        if header.get("expert_weights_norm"):
            raise ValueError("its expert_weights_norm is not supported by deepseek_v2")
        is_greedy = fields["n_group"] == 1
        fields["topk_method"] = "greedy" if is_greedy else "group_limited_greedy"
    return fields


def _check_scales(header: Mapping[str, Any], config: PreTrainedConfig) -> None:
    """Raise ValueError if a header has a scale or limit that the model type does not support."""
    for key in _SCALES:
        if header.get(key, 1) not in (0, 1) and not _first_field(config, _FIELDS[key]):
            raise ValueError(f"its {key} of {header[key]} is not supported by {config.model_type}")
    has_yarn = header.get("rope.scaling.type") == "yarn"
    if header.get("attention.temperature_scale") and not (
        config.model_type == "ministral3" and has_yarn
    ):
        raise ValueError("its attention.temperature_scale is supported with mistral3 and YaRN only")
    if config.model_type.startswith("granite") and header.get("rope.scaling.finetuned") is False:
        raise ValueError("Granite without rotary embedding is not supported")


def _rope_parameters(
    header: Mapping[str, Any], head_size: int, default: Mapping[str, Any]
) -> dict[str, Any]:
    """Return unscaled rotary parameters, nested by layer type if the default is."""
    rope = {"rope_type": "default", "rope_theta": header.get("rope.freq_base", 10_000.0)}
    size = header.get("rope.dimension_count", head_size)
    if not isinstance(size, int) or not 0 < size <= head_size:
        raise ValueError(f"it has a rotary size of {size} for heads of {head_size}")
    if "partial_rotary_factor" in default:
        rope["partial_rotary_factor"] = size / head_size
    elif size != head_size:
        raise ValueError(
            f"rotary embedding of {size} of {head_size} dimensions is not supported by its type"
        )
    if temperature := header.get("attention.temperature_scale"):
        rope["llama_4_scaling_beta"] = temperature
    if "truncate" in default:
        rope["truncate"] = default["truncate"]
    if "full_attention" not in default:
        return rope
    local = {**rope, "rope_theta": header.get("rope.freq_base_swa", rope["rope_theta"])}
    return {"full_attention": rope, "sliding_attention": local}
