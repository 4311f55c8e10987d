"""Small random checkpoints with a real tokenizer, made on the spot.

A random model has no text to agree on, so a pair is one model and the same model plus noise.
"""

from __future__ import annotations

import argparse
import copy
import functools
import inspect
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
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

from corpus import END, train_tokenizer

VOCAB_SIZE = 512
MARKERS = ("<|im_start|>", "<|im_end|>", "<|tool|>")
KINDS = ("gpt2", "llama", "qwen2", "mistral")
_CONFIGS = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "mistral": MistralConfig,
    "gemma2": Gemma2Config,
}


def make_tokenizer(folder: Path, vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the standard library's own source and save it in `folder`."""
    tokenizer = Tokenizer.from_str(_trained(vocab_size))
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END)
    wrapped.save_pretrained(folder)
    return wrapped


@functools.cache
def _trained(vocab_size: int) -> str:
    texts = [inspect.getsource(module) for module in (argparse, inspect, json)]
    return str(train_tokenizer(texts, vocab_size).to_str())


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
    """Return a copy with Gaussian noise of `noise` times the standard deviation per matrix."""
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


def make_checkpoint(
    folder: Path, kind: str, tokenizer: PreTrainedTokenizerFast, seed: int = 0, **options: Any
) -> Path:
    """One random model in a folder; `options` are `make_config`'s."""
    return save(make_model(make_config(kind, **options), seed), tokenizer, folder)


def make_instruct_pair(
    folder: Path, *, draft_context: int, noise: float = 0.03, **options: Any
) -> tuple[Path, Path]:
    """A base draft of fewer positions and a target with chat markers that the draft lacks.

    The draft is the target plus noise, without the markers' rows. The target likes its markers, so
    that they occur; `options` are `make_config`'s, of a kind without learned positions.
    """
    tokenizer = make_tokenizer(folder / "tokenizer")
    config = make_config("llama", vocab_size=VOCAB_SIZE + len(MARKERS), **options)
    target = make_model(config)
    with torch.no_grad():
        target.lm_head.weight[VOCAB_SIZE:] *= 1.3
    draft = add_noise(target, noise)
    draft.resize_token_embeddings(VOCAB_SIZE)
    draft.config.max_position_embeddings = draft_context
    base = save(draft, tokenizer, folder / "draft")
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKERS)})
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
    return base, save(target, tokenizer, folder / "target")


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


def greedy_tokens(model: torch.nn.Module, prompt: list[int], length: int) -> list[int]:
    """`length` tokens that transformers' own greedy generate gives after a prompt, no end token."""
    generated = model.generate(  # type: ignore[operator]
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=length,
        min_new_tokens=length,
        eos_token_id=-1,
        pad_token_id=0,
    )
    return generated[0, len(prompt) :].tolist()
