"""Checkpoints with the shapes of published ones and random weights. Development only.

    python tools/shapes.py FOLDER [NAME ...]

writes FOLDER/Qwen/Qwen2.5-0.5B and so on: the published config, key names, types and 5 GB shards.
The numbers are of one block of normal ones, which every matrix begins at another place of, so no
more than the block is in memory and the disk is what takes the time. All share one small tokenizer,
whose vocabulary their embeddings are padded beyond.
"""

from __future__ import annotations

import argparse
import inspect
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import click
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from byte_level import END, train_tokenizer

_LLAMA = {"model_type": "llama", "dtype": "bfloat16", "rms_norm_eps": 1e-5, "head_dim": 64}
_LLAMA3 = {
    **_LLAMA, "vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "rope_theta": 500000.0,
}  # fmt: skip
_LLAMA3_ROPE = {
    "rope_type": "llama3", "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
_SMOLLM2 = {
    **_LLAMA, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True
}  # fmt: skip
_QWEN2 = {
    "model_type": "qwen2", "dtype": "bfloat16", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "use_sliding_window": False,
}  # fmt: skip
_GEMMA3 = {
    "model_type": "gemma3_text", "dtype": "bfloat16", "vocab_size": 262144, "hidden_size": 1152,
    "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256,
    "max_position_embeddings": 32768, "sliding_window": 512, "sliding_window_pattern": 6,
    "rope_theta": 1000000, "rope_local_base_freq": 10000, "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
}  # fmt: skip
_GPT2 = {"model_type": "gpt2", "dtype": "float32", "tie_word_embeddings": True}
SHAPES: dict[str, dict[str, Any]] = {
    "HuggingFaceTB/SmolLM2-135M": {
        **_SMOLLM2, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "rope_theta": 100000,
    },
    "HuggingFaceTB/SmolLM2-1.7B": {
        **_SMOLLM2, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
        "num_attention_heads": 32, "num_key_value_heads": 32, "rope_theta": 130000,
    },
    "Qwen/Qwen2.5-0.5B": {
        **_QWEN2, "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "max_position_embeddings": 32768, "sliding_window": 32768, "max_window_layers": 24,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-7B": {
        **_QWEN2, "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "max_position_embeddings": 131072, "sliding_window": 131072, "max_window_layers": 28,
        "tie_word_embeddings": False,
    },
    "google/gemma-3-1b-it": _GEMMA3,
    "meta-llama/Llama-3.1-8B": {
        **_LLAMA3, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "head_dim": 128, "rope_scaling": {**_LLAMA3_ROPE, "factor": 8.0},
        "tie_word_embeddings": False,
    },
    "meta-llama/Llama-3.2-1B": {
        **_LLAMA3, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "rope_scaling": {**_LLAMA3_ROPE, "factor": 32.0}, "tie_word_embeddings": True,
    },
    "TinyLlama/TinyLlama_v1.1": {
        **_LLAMA, "dtype": "float32", "vocab_size": 32000, "hidden_size": 2048,
        "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
        "num_key_value_heads": 4, "max_position_embeddings": 2048, "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "openai-community/gpt2": _GPT2,
    "openai-community/gpt2-medium": {**_GPT2, "n_embd": 1024, "n_layer": 24, "n_head": 16},
    "openai-community/gpt2-xl": {**_GPT2, "n_embd": 1600, "n_layer": 48, "n_head": 25},
}  # fmt: skip
VOCAB_SIZE = 512
SHARD = 5_000_000_000
_BLOCK = 16_777_213  # a prime, so that no two rows of a matrix are the same numbers
_DEVIATION = 0.02
_TYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}

Named = tuple[str, torch.Size]
Pieces = Callable[[str, torch.Size], Iterable[torch.Tensor]]  # a tensor's numbers in turn


def write(folder: Path, shape: dict[str, Any]) -> Path:
    """A random checkpoint of a shape, in a new folder."""
    folder.mkdir(parents=True)
    raw = {**shape, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = AutoConfig.for_model(**raw)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    raw["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(raw, indent=2), "utf-8")
    _tokenizer().save_pretrained(folder)
    dtype = getattr(torch, shape["dtype"])
    write_weights(
        folder,
        _named(model, config),
        dtype,
        lambda name, shape: _numbers(name, shape, dtype, config),
        whole=config.model_type == "gpt2",  # whose files are published whole
    )
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    texts = [inspect.getsource(module) for module in (argparse, inspect, json)]
    tokenizer = train_tokenizer(texts, VOCAB_SIZE)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END)


def _named(model: torch.nn.Module, config: Any) -> list[Named]:
    """The published keys and shapes; gpt2's have no prefix, and its causal masks are stored."""
    found = [(name, parameter.shape) for name, parameter in model.named_parameters()]
    if config.model_type != "gpt2":
        return found
    mask = torch.Size([1, 1, config.n_positions, config.n_positions])
    masks = [(f"h.{i}.attn.bias", mask) for i in range(config.n_layer)]
    return [(name.removeprefix("transformer."), shape) for name, shape in found] + masks


def write_weights(
    folder: Path, named: list[Named], dtype: torch.dtype, pieces: Pieces, whole: bool = False
) -> None:
    """Write tensors as safetensors files and their index, a piece in memory at a time."""
    shards: list[list[Named]] = [[]]
    for one in named:
        size = sum(shape.numel() for _, shape in (*shards[-1], one)) * dtype.itemsize
        if size > SHARD and not whole:
            shards.append([])
        shards[-1].append(one)
    files = ["model.safetensors"]
    if len(shards) > 1:
        files = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
        where = {name: file for file, part in zip(files, shards, strict=True) for name, _ in part}
        size = sum(shape.numel() for _, shape in named) * dtype.itemsize
        index = {"metadata": {"total_size": size}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), "utf-8")
    for file, part in zip(files, shards, strict=True):
        with (folder / file).open("wb") as opened:
            _write_shard(opened, part, dtype, pieces)


def _write_shard(file: BinaryIO, named: list[Named], dtype: torch.dtype, pieces: Pieces) -> None:
    """One file as the safetensors format has it, tensor by tensor."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in named:
        start, end = end, end + shape.numel() * dtype.itemsize
        places = {"shape": list(shape), "data_offsets": [start, end]}
        header[name] = {"dtype": _TYPES[dtype], **places}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name, shape in named:
        for piece in pieces(name, shape):
            file.write(memoryview(piece.view(torch.uint8).numpy()))


def _numbers(
    name: str, shape: torch.Size, dtype: torch.dtype, config: Any
) -> Iterator[torch.Tensor]:
    """A tensor's numbers in pieces: norms' gains are 1, embeddings give logits a spread of 4."""
    if len(shape) == 4:
        yield torch.ones(shape[2:], dtype=dtype).tril().reshape(-1)
        return
    if len(shape) == 1 and name.endswith("weight"):
        gain = 0.0 if config.model_type == "gemma3_text" else 1.0  # stored as what is added to 1
        yield torch.full(shape, gain, dtype=dtype)
        return
    is_table = len(shape) == 2 and shape[0] == config.vocab_size
    block = _block(4 / shape[1] ** 0.5 if is_table else _DEVIATION, dtype)
    start, left = zlib.crc32(name.encode()) % _BLOCK, shape.numel()
    while left:
        yield (piece := block[start : start + left])
        start, left = 0, left - len(piece)


@cache
def _block(deviation: float, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.empty(_BLOCK).normal_(0, deviation, generator=generator).to(dtype)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("names", nargs=-1, type=click.Choice(list(SHAPES)))
def main(folder: Path, names: tuple[str, ...]) -> None:
    """Write random checkpoints under their published names (all if none is named)."""
    for name in names or SHAPES:
        click.echo(write(folder / name, SHAPES[name]))


if __name__ == "__main__":
    main()
