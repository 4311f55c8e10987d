"""Models of every kind of rotary scaling at a context of 8,192, and how near their graphs are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import torch
from transformers import DynamicCache, LlamaConfig, Phi3Config, PreTrainedConfig

from checkpoints import VOCAB_SIZE, make_model
from specedge.exporter import Progress, internals, model_export
from specedge.exporter.checkpoint.loader import LoadedCheckpoint
from specedge.exporter.checkpoint.placeholders import WeightSources
from specedge.exporter.tracing.geometry import Geometry
from specedge.exporter.tracing.module_patches import freeze_rotary
from specedge.exporter.verification.subgraph import open_session

CONTEXT, ORIGINAL = 8192, 4096
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
SCALED: dict[str, dict[str, object]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [2.0 + i for i in range(8)],
}


KINDS = (*SCALED, "longrope")


def config_of(kind: str) -> PreTrainedConfig:
    """A small model's, of one kind of scaling."""
    if kind == "longrope":
        options = {"original_max_position_embeddings": ORIGINAL, "rope_parameters": LONGROPE}
        return Phi3Config(**_SIZES, **options)
    # Only a dynamic one changes with the text, and only past the positions it was trained on.
    positions = {"max_position_embeddings": ORIGINAL if kind == "dynamic" else CONTEXT}
    rope = {"rope_theta": 10000.0, **SCALED[kind]}
    return LlamaConfig(**{**_SIZES, **positions}, rope_parameters=rope)


def in_transformers(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    """Logits [n, V] of a whole text at once, by its own rule for factors."""
    with torch.no_grad():
        caches = {internals.cache_name(model): DynamicCache()}
        return model(torch.from_numpy(tokens)[None], **caches).logits[0].numpy()


def in_the_graph(folder: Path, shape: Geometry, tokens: np.ndarray) -> np.ndarray:
    """Logits [n, V] of the same text, 512 tokens a pass."""
    session = open_session(folder / "decoder.onnx", onnxruntime.SessionOptions())
    empty = [np.zeros(shape, np.float32) for shape in shape.cache_shapes()]
    caches = dict(zip(shape.cache_names(), empty, strict=True))
    logits = []
    for start in range(0, len(tokens), 512):
        inputs = {"input_ids": tokens[None, start : start + 512], "past_length": np.array([start])}
        outputs = session.run(None, inputs | {"logits_from": np.zeros(1, np.int64)} | caches)
        logits.append(outputs[0][0])
        caches = dict(zip(caches, outputs[1:], strict=True))
    return np.concatenate(logits)


def compared(kind: str, folder: Path) -> tuple[np.ndarray, float]:
    """Differences [n] of a text of 8,192 tokens, relative to its largest logit; and plain rope's.

    Of plain rope's the largest from position 4,096 on, which shows that the factors are at work.
    """
    model, own = make_model(config_of(kind)), make_model(config_of(kind))
    freeze_rotary(model, CONTEXT)
    loaded = LoadedCheckpoint(model, "float32", WeightSources())
    part = model_export.measure_model("target", loaded, CONTEXT, 4, VOCAB_SIZE, folder, Progress())
    model_export.write_models([part], ("onnx",))
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, CONTEXT)
    found, wanted = in_the_graph(folder, part.shape, tokens), in_transformers(own, tokens)
    plain = in_transformers(make_model(config_of("default")), tokens)
    scale = np.abs(wanted).max()
    off = np.abs(plain - wanted)[ORIGINAL:].max() / scale
    return np.abs(found - wanted).max(1) / scale, float(off)
