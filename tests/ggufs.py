"""GGUF files as llama.cpp's own package writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from transformers import (
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

from checkpoints import make_config, make_model, make_tokenizer
from ggml_rows import random_weights

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write(
    path: Path,
    kind: Kind,
    folder: Path,
    arch: str = "qwen2",
    more: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    **options: Any,
) -> dict[str, np.ndarray]:
    """A qwen2 or llama in a GGUF file; its numbers as the format has them, by transformers' names.

    `more` adds fields and tensors to the file, `options` are `make_config`'s.
    """
    config = make_config(arch, **{"kv_heads": 2, "scale": 0.1} | options)
    model = make_model(config)
    writer = gguf.GGUFWriter(path, arch)
    _add_config(writer, config)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    add_tokenizer(writer, make_tokenizer(folder / "tokenizer"))
    more(writer)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    numbers = {}
    for name, parameter in model.state_dict().items():
        array, short = parameter.numpy(), name
        for long, other in _NAMES.items():
            short = short.replace(long, other)
        of = heads.get(short.split(".")[-2]) if arch == "llama" else None
        stored = interleave_halves(array, of) if of else array
        if array.ndim > 1:
            stored = gguf.quants.quantize(stored, kind)
        writer.add_tensor(short, stored, raw_dtype=kind if array.ndim > 1 else None)
        # Rows are moved, and quantised each by itself: so are these, as transformers has them.
        plain = gguf.quants.quantize(array, kind) if array.ndim > 1 else array
        numbers[name] = gguf.quants.dequantize(plain, kind) if array.ndim > 1 else array
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return numbers


def _add_config(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    """Add the fields that all architectures have."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def write_mixture(
    path: Path,
    folder: Path,
    kinds: Callable[[str], Kind],
    arch: str = "qwen3moe",
    is_fused: bool = False,
) -> dict[str, np.ndarray]:
    """A small Mixtral ("llama") or Qwen 3 MoE; its numbers by transformers' names.

    `kinds` returns the type of a matrix of the file. K-quants, which gguf-py cannot write, have
    random bytes. Gate and up projections may be fused.
    """
    config = (MixtralConfig if arch == "llama" else Qwen3MoeConfig)(**MIXTURE)
    model = make_model(config)
    writer = gguf.GGUFWriter(path, arch)
    _add_config(writer, config)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_expert_count(8)
    writer.add_expert_used_count(2)
    if arch == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    else:
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    add_tokenizer(writer, make_tokenizer(folder / "tokenizer"))
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    numbers = {}
    for name, parameter in model.state_dict().items():
        array, short = parameter.numpy(), name
        for long, other in (_NAMES | _MIXTURE_NAMES).items():
            short = short.replace(long, other)
        parts = {short: array}
        if short.endswith("gate_up_proj"):
            halves = np.split(array, 2, 1)
            prefix = short.removesuffix("mlp.experts.gate_up_proj")
            parts = {f"{prefix}ffn_gate_up_exps.weight": array}
        if short.endswith("gate_up_proj") and not is_fused:
            parts = {f"{prefix}ffn_{n}_exps.weight": half
                     for n, half in zip(("gate", "up"), halves, strict=True)}  # fmt: skip
        values = []
        for stored_name, whole in parts.items():
            kind = kinds(stored_name) if array.ndim > 1 and "gate_inp" not in stored_name else None
            if kind is None:
                writer.add_tensor(stored_name, whole)
                values.append(whole)
                continue
            rows = whole.reshape(-1, whole.shape[-1])
            if kind.name.endswith("_K"):
                packed = random_weights(kind.name, *rows.shape, 2 * len(numbers) + len(values))
            else:
                packed = gguf.quants.quantize(rows, kind)
            values.append(gguf.quants.dequantize(packed, kind).reshape(whole.shape))
            of = heads.get(stored_name.split(".")[-2]) if arch == "llama" else None
            packed = interleave_halves(packed, of) if of else packed
            packed = packed.reshape(*whole.shape[:-1], -1)
            writer.add_tensor(stored_name, packed, raw_dtype=kind)
        numbers[name] = np.concatenate(values, 1) if len(values) > 1 else values[0]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return numbers


MIXTURE = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 96, "initializer_range": 0.1, "tie_word_embeddings": False,
    "num_experts_per_tok": 2, "num_local_experts": 8, "num_experts": 8,
    "moe_intermediate_size": 256, "norm_topk_prob": True, "rms_norm_eps": 1e-5,
}  # fmt: skip
_MIXTURE_NAMES = {
    "mlp.experts.down_proj": "ffn_down_exps.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}


def interleave_halves(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp's converter moves a llama's: halves of a head that turn together. [R, C]"""
    halves = matrix.reshape(heads, 2, -1, *matrix.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(matrix.shape))


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerFast) -> None:
    """A byte-level tokenizer's vocabulary and merges, as qwen2's files have them."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    words = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([word for word, _ in words])
    writer.add_token_types([gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * (len(words) - 1)])
    writer.add_token_merges([" ".join(pair) for pair in state["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
