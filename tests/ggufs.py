"""GGUF files as llama.cpp's own package writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedTokenizerFast

from checkpoints import make_config, make_model, make_tokenizer

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
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
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
