"""Checkpoints as they are published: each family's config.json at small width, and its key names.

Sizes, windows, chunks and ids are scaled to a context of 256 tokens and a vocabulary of 512; what
is left is as in the repository that a case names. `keys` turn the model's own names into the
published ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from checkpoints import VOCAB_SIZE
from published_composed import COMPOSED
from published_configs import CONFIGS, WINDOW

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Published:
    """One family: what is special, and how its repository names its tensors."""

    special: str
    keys: Callable[[State], State] = dict
    wrapper: bool = False


# Refused by config, and why; options that make transformers' own defaults the
# published ones.
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("are recurrent", {}),
    "mamba2": ("are recurrent", {}),
    "falcon_mamba": ("are recurrent", {}),
    "rwkv": ("are recurrent", {}),
    "xlstm": ("are recurrent", {}),
    "recurrent_gemma": ("are recurrent", {}),
    "jamba": ("are hybrid", {}),
    "falcon_h1": ("are hybrid", {}),
    "qwen3_next": ("are hybrid", {}),
    "bamba": ("are hybrid", {"attn_layer_indices": [9, 18, 27]}),
    "granitemoehybrid": ("are hybrid", {"layer_types": ["mamba", "attention"] * 16}),
    "lfm2": ("are hybrid", {"layer_types": ["conv", "full_attention"] * 16}),
    "nemotron_h": ("are hybrid", {}),
    "zamba2": ("are hybrid", {}),
    "kimi_linear": ("are hybrid", {}),
    "zamba": ("are hybrid", {}),
    "olmo_hybrid": ("are hybrid", {}),
    "bailing_hybrid": ("are hybrid", {}),
    "qwen3_5_text": ("are hybrid", {}),
    "qwen3_5_moe": ("qwen3_5_moe_text models are hybrid", {}),
    "lfm2_vl": (
        "lfm2 models are hybrid",
        {"text_config": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 16}},
    ),
    "lfm3": ("are hybrid", {}),
    "lfm3_vl": ("lfm3 models are hybrid", {}),
    "nemotron_h_omni": ("nemotron_h models are hybrid", {}),
    "deepseek_v32": ("has indices", {}),
    "openai-gpt": ("have no KV cache", {}),
    "bert": ("is an encoder,", {}),
    "roberta": ("is an encoder,", {}),
    "deberta-v2": ("is an encoder,", {}),
    "distilbert": ("is an encoder,", {}),
    "modernbert": ("is an encoder,", {}),
    "vit": ("is an encoder,", {}),
    "wav2vec2": ("is an encoder,", {}),
    "clip": ("is an encoder,", {}),
    "speech_to_text": ("reads speech in another form", {}),
    "vision-encoder-decoder": (
        "is an encoder-decoder whose source is not text",
        {"encoder": {"model_type": "vit"}, "decoder": {"model_type": "gpt2"}},
    ),
}


def build(name: str, folder: Path) -> torch.nn.Module:
    """A random model of the family's own class, with confident logits; its config in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps((CONFIGS | COMPOSED)[name]), "utf-8")
    return randomised(loader(name).from_config(AutoConfig.from_pretrained(folder)))


def loader(name: str) -> Any:
    """The class that transformers reads such a checkpoint with, whole."""
    return AutoModelForImageTextToText if PUBLISHED[name].wrapper else AutoModelForCausalLM


def randomised(model: Any, seed: int = 0) -> torch.nn.Module:
    """Biases and norms are random, too, so that each shows."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.float().eval().parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif parameter.shape[0] == VOCAB_SIZE:
                parameter.mul_(1.5)
    return model


def save(name: str, model: torch.nn.Module, tokenizer: Any, folder: Path) -> Path:
    """Write a model, its tokenizer and its config under the published names."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps((CONFIGS | COMPOSED)[name]), "utf-8")
    state = {key: tensor.contiguous() for key, tensor in _untied(model).items()}
    save_file(PUBLISHED[name].keys(state), folder / "model.safetensors", {"format": "pt"})
    tokenizer.save_pretrained(folder)
    return folder


def save_refused(kind: str, tokenizer: Any, folder: Path) -> Path:
    """Create a repository folder with placeholder weights that must not be read."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG_MAPPING[kind](**REFUSED[kind][1]).to_dict() | {"model_type": kind}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    (folder / "model.safetensors").write_bytes(b"not read")
    tokenizer.save_pretrained(folder)
    return folder


def _untied(model: Any) -> State:
    """Return the tensors of a repository, without a tied head."""
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    return state


def _renamed(*rules: tuple[str, str]) -> Callable[[State], State]:
    def apply(state: State) -> State:
        found = {}
        for key, tensor in state.items():
            for pattern, replacement in rules:
                key = re.sub(pattern, replacement, key)
            found[key] = tensor
        return found

    return apply


def _with_buffers(
    keys: Callable[[State], State], place: str, *names: str
) -> Callable[[State], State]:
    """Old repositories store causal masks and rotary factors with the weights."""
    buffers = {
        "bias": torch.ones(1, 1, 512, 512).tril(),
        "masked_bias": torch.tensor(-1e9),
        "rotary_emb.inv_freq": torch.full((2,), 0.5),
    }

    def apply(state: State) -> State:
        extra = {f"{place.format(i)}.{n}": buffers[n].clone() for i in (0, 1) for n in names}
        return keys(state) | extra

    return apply


def _single_experts(
    *names: str, rules: tuple[tuple[str, str], ...] = ()
) -> Callable[[State], State]:
    """Each expert's matrices apart: gate, up and down by their published names."""
    gate, up, down = names

    def apply(state: State) -> State:
        found: State = {}
        for key, tensor in state.items():
            if key.endswith("experts.gate_up_proj"):
                stem = key.removesuffix("gate_up_proj")
                for i, matrix in enumerate(tensor):
                    found |= {
                        f"{stem}{i}.{part}.weight": half.clone()
                        for part, half in zip((gate, up), matrix.chunk(2), strict=True)
                    }
            elif key.endswith("experts.down_proj"):
                stem = key.removesuffix("down_proj")
                found |= {f"{stem}{i}.{down}.weight": m.clone() for i, m in enumerate(tensor)}
            else:
                found[key] = tensor
        return _renamed(*rules)(found)

    return apply


_EXPERTS = _single_experts("gate_proj", "up_proj", "down_proj")
_BARE = _renamed(("^transformer\\.", ""))
_LLAVA = _renamed(
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^model\.", ""),
)
_QWEN_VL = _renamed((r"^model\.language_model\.", "model."), (r"^model\.visual\.", "visual."))
_GPT2 = _with_buffers(_BARE, "h.{}.attn", "bias")
_PYTHIA = _with_buffers(
    _renamed((r"^lm_head\.", "embed_out.")),
    "gpt_neox.layers.{}.attention", "bias", "masked_bias", "rotary_emb.inv_freq",
)  # fmt: skip
_GPT_NEO = _with_buffers(dict, "transformer.h.{}.attn.attention", "bias", "masked_bias")

PUBLISHED: dict[str, Published] = {
    "Llama-2-7b": Published("every head its own keys"),
    "Llama-3.1-8B": Published("grouped heads, llama3 rope"),
    "Llama-3.2-1B": Published("llama3 rope, tied"),
    "Llama-4-Scout": Published(
        "the text part; chunks of 64, no rope in one of four, temperature by position, experts",
        _renamed((r"^model\.(vision|multi)", r"\1")), True,
    ),
    "Qwen2-0.5B": Published("biases, tied"),
    "Qwen2.5-7B": Published("biases, a window that is off"),
    "Qwen2.5-7B yarn": Published("yarn as its model card says"),
    "Qwen3-0.6B": Published("QK norms, heads wider than the model, tied"),
    "Qwen1.5-MoE-A2.7B": Published("experts and a shared one with a gate", _EXPERTS),
    "Qwen3-30B-A3B": Published("experts, QK norms", _EXPERTS),
    "gemma-2b": Published("one key head, norms of one plus weight, tied"),
    "gemma-2-2b": Published(f"softcaps 50 and 30, window {WINDOW} in one of two"),
    "gemma-3-1b": Published(f"window {WINDOW} in five of six, two rope bases"),
    "gemma-3-4b": Published("the text part; linear rope in one of six", _LLAVA, True),
    "Mistral-7B-v0.1": Published(f"window {WINDOW}"),
    "Mistral-Nemo": Published("heads narrower than the model"),
    "Mistral-Small-3.1": Published("the text part", _LLAVA, True),
    "Mixtral-8x7B": Published(
        "2 of 4 experts",
        _single_experts("w1", "w3", "w2", rules=((r"\.mlp\.", ".block_sparse_moe."),)),
    ),
    "phi-1": Published("half of a head rotates, parallel"),
    "phi-2": Published("two fifths of a head rotate, parallel"),
    "Phi-3-mini-4k": Published(f"fused QKV, window {WINDOW}"),
    "Phi-3.5-mini": Published("longrope"),
    "phi-4": Published("grouped heads"),
    "Phi-4-mini": Published("longrope on three quarters of a head, tied"),
    "SmolLM-135M": Published("three heads a key, tied"),
    "SmolLM2-1.7B": Published("every head its own keys, tied"),
    "SmolLM3-3B": Published("no rope in one of four, tied"),
    "gpt2": Published("masks among the weights", _GPT2),
    "opt-125m": Published("positions from 2", _renamed((r"^model\.", ""))),
    "opt-350m": Published("norms after, narrower embeddings", _renamed((r"^model\.", ""))),
    "pythia-160m": Published("a quarter of a head rotates, masks among the weights", _PYTHIA),
    "bloom-560m": Published("ALiBi", _BARE),
    "falcon-7b": Published("one key head, parallel"),
    "falcon-rw-1b": Published("ALiBi in bfloat16"),
    "falcon-40b": Published("grouped heads, cached repeated"),
    "stablelm-3b-4e1t": Published("a quarter of a head rotates"),
    "stablelm-2-12b": Published("QK norms a head, parallel"),
    "OLMo-2-7B": Published("norms after"),
    "granite-3.1-2b": Published("multipliers, tied"),
    "DeepSeek-V2-Lite": Published("latent attention, yarn, experts", _EXPERTS),
    "DeepSeek-V3": Published("latent attention, yarn, experts in groups", _EXPERTS),
    "gpt-oss-20b": Published(f"sinks, window {WINDOW} in one of two, yarn, experts"),
    "mpt-7b": Published("ALiBi"),
    "mpt-7b, clipped": Published("ALiBi, six heads, clipped QKV"),
    "gpt-neo-125m": Published(f"window {WINDOW} in one of two, unscaled", _GPT_NEO),
    "Qwen3-VL-4B": Published("the text part, QK norms, tied", wrapper=True),
    "Qwen2-VL-2B": Published("the text part, tied", _QWEN_VL, True),
    "Qwen2.5-VL-7B": Published("the text part", _QWEN_VL, True),
}  # fmt: skip
