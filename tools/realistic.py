"""Random checkpoints with the magnitudes of trained ones, at any size. Development only.

    python tools/realistic.py FAMILY FOLDER [--layers N] [--hidden H] [--seed S]

What a family's magnitudes are is in FAMILIES, how they are made in magnitudes.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

import magnitudes
from byte_level import END, train_tokenizer
from magnitudes import MECHANISMS, Magnitudes


@dataclass(frozen=True)
class Family:
    """A config's class, what makes it this family's, and its magnitudes."""

    kind: str
    sizes: Magnitudes
    options: dict[str, Any] = field(default_factory=dict)


_WINDOWS = {"sliding_window": 24, "layer_types": ("sliding_attention", "full_attention")}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MLA = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "kv_lora_rank": 16, "q_lora_rank": None,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "moe_intermediate_size": 32,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
}  # fmt: skip
_MULTI_HEAD = {"num_key_value_heads": None}

# The largest activation has its source beside it, or is of the order of its kin's.
FAMILIES: dict[str, Family] = {
    # Sun et al. 2024, table 1: 2,622 in LLaMA2-7B, 7,100 in Mixtral-8x7B.
    "llama": Family("Llama", Magnitudes(2622)),
    "llama3": Family("Llama", Magnitudes(300), {"rope_parameters": _LLAMA3}),
    "llama4": Family(
        "Llama4Text",
        Magnitudes(1000),
        {
            "num_local_experts": 4, "num_experts_per_tok": 1, "attention_chunk_size": 24,
            "intermediate_size_mlp": 128, "no_rope_layer_interval": 2, "rope_parameters": _LLAMA3,
        },
    ),
    "mistral": Family("Mistral", Magnitudes(300), {"sliding_window": 24}),
    "mixtral": Family("Mixtral", Magnitudes(7100), {"num_local_experts": 4}),
    "qwen2": Family("Qwen2", Magnitudes(8000, q_bias=69, k_bias=175), _ROPE),
    "qwen2 tied": Family(
        "Qwen2", Magnitudes(8000, q_bias=69, k_bias=175), {**_ROPE, "tie_word_embeddings": True}
    ),
    "qwen3": Family("Qwen3", Magnitudes(8000, qk_gain=30), _ROPE),
    # Chen et al. 2026 (2605.15572): experts keep maxima at hundreds to thousands.
    "qwen2_moe": Family(
        "Qwen2Moe",
        Magnitudes(1000, q_bias=40, k_bias=100),
        {"shared_expert_intermediate_size": 32, **_EXPERTS},
    ),
    "qwen3_moe": Family("Qwen3Moe", Magnitudes(1000, qk_gain=30), _EXPERTS),
    "olmoe": Family("Olmoe", Magnitudes(1000), {"num_experts": 8, "num_experts_per_tok": 2}),
    "gpt_oss": Family(
        "GptOss",
        Magnitudes(1000, q_bias=5, k_bias=5),
        {"num_local_experts": 4, "num_experts_per_tok": 2, **_WINDOWS},
    ),
    "deepseek_v2": Family("DeepseekV2", Magnitudes(1000), _MLA),
    "deepseek_v3": Family("DeepseekV3", Magnitudes(1000), _MLA),
    "granitemoe": Family(
        "GraniteMoe",
        Magnitudes(1000),
        {"attention_multiplier": 0.25, "num_local_experts": 4, "residual_multiplier": 0.22},
    ),
    # Chen et al. 2026: 700,000 in Gemma-3-27B, whose activations overflow float16.
    "gemma": Family("Gemma", Magnitudes(3000, gain=60), {"tie_word_embeddings": True}),
    "gemma2": Family(
        "Gemma2", Magnitudes(3000, gain=60), {"tie_word_embeddings": True, **_WINDOWS}
    ),
    "gemma3": Family(
        "Gemma3Text",
        Magnitudes(20000, gain=60, qk_gain=5),
        {"tie_word_embeddings": True, **_WINDOWS},
    ),
    "gpt2": Family(
        "GPT2", Magnitudes(3000, gain=15, q_bias=5, k_bias=5), {"tie_word_embeddings": True}
    ),
    "opt": Family(
        "OPT", Magnitudes(100, q_bias=5, k_bias=5), {"tie_word_embeddings": True, **_MULTI_HEAD}
    ),
    "gpt_neo": Family(
        "GPTNeo",
        Magnitudes(1000),
        {"tie_word_embeddings": True, "window_size": 24, **_MULTI_HEAD},
    ),
    "mpt": Family("Mpt", Magnitudes(1000), {"tie_word_embeddings": True, **_MULTI_HEAD}),
    "gpt_neox": Family("GPTNeoX", Magnitudes(1000, q_bias=5, k_bias=5), _MULTI_HEAD),
    "gptj": Family("GPTJ", Magnitudes(1000), {"rotary_dim": 8}),
    "bloom": Family("Bloom", Magnitudes(1000, q_bias=5, k_bias=5), _MULTI_HEAD),
    "falcon": Family("Falcon", Magnitudes(1000), {"multi_query": True, **_MULTI_HEAD}),
    "phi": Family("Phi", Magnitudes(1000, q_bias=5, k_bias=5), _MULTI_HEAD),
    "phi3": Family("Phi3", Magnitudes(1000)),
    "stablelm": Family("StableLm", Magnitudes(1000)),
    "starcoder2": Family(
        "Starcoder2",
        Magnitudes(1000, q_bias=5, k_bias=5),
        {"tie_word_embeddings": True, "sliding_window": None},
    ),
    "smollm3": Family("SmolLM3", Magnitudes(1000), {"tie_word_embeddings": True}),
    "cohere": Family("Cohere", Magnitudes(1000), {"tie_word_embeddings": True}),
    "granite": Family(
        "Granite",
        Magnitudes(1000),
        {
            "attention_multiplier": 0.25, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
        },
    ),
    # Norms behind the branches alone: OLMo 2 was made to have no spikes.
    "olmo2": Family("Olmo2", Magnitudes(100, qk_gain=5)),
}  # fmt: skip


def make_config(
    family: str,
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int | None = None,
    vocab: int = 512,
    context: int = 256,
    **options: Any,
) -> PreTrainedConfig:
    """A family's config at a chosen size; `options` are its own."""
    if family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}; got {family}")
    class_ = getattr(transformers, f"{FAMILIES[family].kind}Config")
    sizes: dict[str, Any] = {
        "vocab_size": vocab, "num_hidden_layers": layers, "hidden_size": hidden,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads or heads // 2,
        "intermediate_size": 2 * hidden, "max_position_embeddings": context,
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "tie_word_embeddings": False,
    }  # fmt: skip
    sizes |= {**FAMILIES[family].options, **options}
    if family.startswith("deepseek"):
        sizes["num_key_value_heads"] = heads
    if sizes["num_key_value_heads"] is None:
        sizes["num_key_value_heads"] = heads
    if kinds := sizes.get("layer_types"):
        sizes["layer_types"] = [kinds[i % len(kinds)] for i in range(layers)]
    for name, own in class_.attribute_map.items():
        if name in sizes:
            sizes[own] = sizes.pop(name)
    if family == "gpt_neo":
        kinds = ["global", "local"] * layers
        sizes["attention_types"] = [[kinds[:layers], 1]]
    if family == "opt":
        sizes |= {"ffn_dim": 2 * hidden, "word_embed_proj_dim": hidden, "pad_token_id": 1}
    known = inspect.signature(class_).parameters
    for name in ("head_dim", "query_pre_attn_scalar"):
        if name in known:
            sizes.setdefault(name, hidden // heads)
    for name in ("num_key_value_heads", "intermediate_size"):
        if name not in known:
            sizes.pop(name, None)
    return class_(**sizes)


def make_model(
    family: str, *, seed: int = 0, mechanisms: Collection[str] = MECHANISMS, **sizes: Any
) -> Any:
    """A float32 model with a family's magnitudes; `sizes` are `make_config`'s."""
    config = make_config(family, **sizes)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    return apply(model, family, seed, mechanisms)


def apply(model: Any, family: str, seed: int = 0, mechanisms: Collection[str] = MECHANISMS) -> Any:
    """Give a float32 model random weights with a family's magnitudes, in place."""
    return magnitudes.apply(model, FAMILIES[family].sizes, seed, mechanisms)


def make(
    family: str,
    folder: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> Path:
    """Write a checkpoint with a tokenizer; `options` are `make_model`'s."""
    model = make_model(family, **options)
    model.to(dtype).save_pretrained(folder)
    tokenizer = train_tokenizer([inspect.getsource(inspect)], min(512, model.config.vocab_size))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END
    ).save_pretrained(folder)
    return folder


def residuals(model: Any, tokens: torch.Tensor) -> list[tuple[float, float]]:
    """The largest and the median size in the residual, before each layer and after the last."""
    with torch.no_grad():
        states = model(tokens[None], output_hidden_states=True, use_cache=False).hidden_states
    return [(float(s.abs().max()), float(s.abs().median())) for s in states]


@click.command()
@click.argument("family", type=click.Choice(list(FAMILIES)))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--layers", default=2, show_default=True)
@click.option("--hidden", default=64, show_default=True)
@click.option("--heads", default=4, show_default=True)
@click.option("--kv-heads", type=int, help="Half of the heads, where the family has groups.")
@click.option("--vocab", default=512, show_default=True)
@click.option("--context", default=256, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), default="bfloat16")
def main(family: str, folder: Path, dtype: str, **options: Any) -> None:
    """Write a random checkpoint with the magnitudes of a trained one, and print them."""
    make(family, folder, dtype=getattr(torch, dtype), **options)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.arange(64) % options["vocab"]
    for layer, (largest, median) in enumerate(residuals(model, tokens)):
        click.echo(f"residual {layer:2}: largest {largest:.4g}, median {median:.2g}")


if __name__ == "__main__":
    main()
