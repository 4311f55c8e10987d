"""GGUF architectures that transformers does not read: configs and names of tensors.

Header fields, permutations and defaults are those of llama.cpp's converter and models
(llama-cpp-python 0.3.36). Names of tensors come from gguf-py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

_FIELDS = {
    "context_length": "max_position_embeddings max_seq_len",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size n_inner",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps layer_norm_epsilon",
    "attention.sliding_window": "sliding_window",
    "attention.clamp_kqv": "clip_qkv",
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logit_scale logits_scaling",
    "use_parallel_residual": "use_parallel_residual",
}  # header fields, without the architecture, and names in configs, of which the first is taken
_FLAGS = {
    "attn_q.bias": "attention_bias use_bias",
    "attn_qkv.bias": "attention_bias",
    "attn_output.bias": "attention_out_bias",
    "ffn_up.bias": "mlp_bias",
    "attn_q_norm.weight": "use_qk_norm qk_layernorm",
}  # tensors of the first layer whose presence sets a field of the config


@dataclass(frozen=True)
class GgufArchitecture:
    """Relation of an architecture to transformers.

    Attributes:
        model_type: Model type of transformers.
        permutation: Architecture known to transformers whose weights are permuted alike.
        variants: Other model types, for files with a nonzero header field.
        options: Fields of the config that follow from the architecture.
    """

    model_type: str
    permutation: str | None = None
    variants: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


ARCHITECTURES = {
    "arcee": GgufArchitecture("arcee", "llama"),
    "chatglm": GgufArchitecture("glm"),
    "cohere2": GgufArchitecture("cohere2"),
    "command-r": GgufArchitecture("cohere"),
    "ernie4_5": GgufArchitecture("ernie4_5"),
    "exaone4": GgufArchitecture("exaone4"),
    "gemma": GgufArchitecture("gemma", "gemma2"),
    "glm4": GgufArchitecture("glm4"),
    "gptneox": GgufArchitecture("gpt_neox", "bloom"),
    "granite": GgufArchitecture("granite", "llama"),
    "hunyuan-dense": GgufArchitecture("hunyuan_v1_dense"),
    "jais2": GgufArchitecture("jais2"),
    "olmo": GgufArchitecture("olmo", "llama"),
    "olmo2": GgufArchitecture("olmo2", variants={"attention.sliding_window": "olmo3"}),
    "phi2": GgufArchitecture("phi"),
    "seed_oss": GgufArchitecture("seed_oss"),
    "smollm3": GgufArchitecture("smollm3", "llama"),
    "starcoder": GgufArchitecture("gpt_bigcode"),
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
    types = [name for key, name in relation.variants.items() if header.get(key)]
    config_class = CONFIG_MAPPING[types[0] if types else relation.model_type]
    default = config_class()
    values = {
        name: header.get(key)
        for key, names in _FIELDS.items()
        if key in header or key == "attention.sliding_window"
        for name in _first_field(default, names)
    }
    for tensor, names in _FLAGS.items():
        for name in _first_field(default, names):
            values[name] = values.get(name) or f"blk.0.{tensor}" in shapes
    head_size = header.get("attention.key_length") or (
        header["embedding_length"] // header["attention.head_count"]
    )
    if "attention.key_length" in header or hasattr(default, "head_dim"):
        values["head_dim"] = head_size
    if rope := getattr(default, "rope_parameters", None):
        values["rope_parameters"] = _rope_parameters(header, head_size, rope)
    if isinstance(windows := header.get("attention.sliding_window_pattern"), list):
        types = [f"{'sliding' if window else 'full'}_attention" for window in windows]
        values["layer_types"] = types
    vocab_size = shapes["token_embd.weight"][0]
    pad = fields.get("tokenizer.ggml.padding_token_id", vocab_size)
    return config_class(
        **values,
        **relation.options,
        vocab_size=vocab_size,
        bos_token_id=fields.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=fields.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=pad if pad < vocab_size else None,
        tie_word_embeddings="output.weight" not in shapes,
    )


def _first_field(config: PreTrainedConfig, names: str) -> list[str]:
    """Return the first of several names that a config has, if any."""
    return [name for name in names.split() if hasattr(config, name)][:1]


def _scalar(value: Any) -> Any:
    """Return the value of a field that is stored for each layer but equal in all."""
    is_uniform = isinstance(value, list) and not isinstance(value[0], bool) and len({*value}) == 1
    return value[0] if is_uniform else value


def _rope_parameters(
    header: Mapping[str, Any], head_size: int, default: Mapping[str, Any]
) -> dict[str, Any]:
    """Return unscaled rotary parameters, nested by layer type if the default is."""
    rope = {
        "rope_type": "default",
        "rope_theta": header.get("rope.freq_base", 10_000.0),
        "partial_rotary_factor": header.get("rope.dimension_count", head_size) / head_size,
    }
    if "full_attention" not in default:
        return rope
    local = {**rope, "rope_theta": header.get("rope.freq_base_swa", rope["rope_theta"])}
    return {"full_attention": rope, "sliding_attention": local}
