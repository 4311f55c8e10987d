"""Small random checkpoints with a real tokenizer, made on the spot.

A random model has no text to agree on, so a pair is one model and the same model plus noise.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from byte_level import END, train_tokenizer

VOCAB_SIZE = 512
KINDS = ("gpt2", "llama", "qwen2", "mistral")
_CONFIGS = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "mistral": MistralConfig,
    "gemma2": Gemma2Config,
}


def make_tokenizer(folder: Path, vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the standard library's own source and save it in `folder`."""
    texts = [inspect.getsource(module) for module in (argparse, inspect, json)]
    tokenizer = train_tokenizer(texts, vocab_size)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END)
    wrapped.save_pretrained(folder)
    return wrapped


def make_config(
    kind: str,
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int | None = None,
    head_size: int | None = None,
    context: int = 128,
    vocab_size: int = VOCAB_SIZE,
    tied: bool | None = None,
    scale: float = 0.2,
    **options: Any,
) -> PreTrainedConfig:
    """A small config; `scale` is the standard deviation of the matrices, `options` are its own."""
    common = {
        "vocab_size": vocab_size,
        "initializer_range": scale,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "tie_word_embeddings": kind == "gpt2" if tied is None else tied,
    }
    if kind == "gpt2":
        size = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": context}
        return GPT2Config(**{**common, **size, **options})
    size = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
        "max_position_embeddings": context,
    }
    if head_size:
        size["head_dim"] = head_size
    if kind == "mistral":
        size["sliding_window"] = None
    return _CONFIGS[kind](**{**common, **size, **options})


def make_model(config: PreTrainedConfig, seed: int = 0) -> torch.nn.Module:
    """A random model with confident logits; its biases and norms are random, so that each shows."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif parameter.shape[0] == config.vocab_size:
                parameter.mul_(1.5)
    return model


def add_noise(model: torch.nn.Module, noise: float, seed: int = 1) -> torch.nn.Module:
    """A copy whose matrices have Gaussian noise of `noise` times their standard deviation."""
    torch.manual_seed(seed)
    noisy = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in noisy.parameters():
            if parameter.ndim > 1:
                parameter.add_(noise * parameter.std() * torch.randn_like(parameter))
    return noisy


def save(model: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    """Write model and tokenizer as a checkpoint folder."""
    model.save_pretrained(folder)  # type: ignore[operator]
    tokenizer.save_pretrained(folder)
    return folder


def make_pair(
    folder: Path,
    kind: str,
    *,
    noise: float = 0.03,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **options: Any,
) -> tuple[Path, Path]:
    """A draft (the target plus noise) and a target, as folders; `options` are `make_config`'s."""
    config = make_config(kind, **options)
    tokenizer = make_tokenizer(folder / "tokenizer", min(VOCAB_SIZE, config.vocab_size))
    target = make_model(config, seed)
    draft = add_noise(target, noise)
    return (
        save(draft.to(dtype), tokenizer, folder / "draft"),
        save(target.to(dtype), tokenizer, folder / "target"),
    )
