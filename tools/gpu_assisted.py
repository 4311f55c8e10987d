"""transformers' assisted generation of the same pair on the same card."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

from gpu_measuring import NEW_TOKENS, PROMPTS, REPEATS, K


def assisted(folder: Path, device: str) -> dict[str, Any] | str:
    """transformers on the same card, plain and with the draft as its assistant, in float16."""
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError:
        return "not run: transformers is not installed"
    if not torch.cuda.is_available():
        return "not run: this PyTorch has no CUDA"
    where, roles = torch_device(device), ("target", "draft")
    models = {
        role: AutoModelForCausalLM.from_pretrained(folder / role, dtype=torch.float16).to(where)
        for role in roles
    }
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    config = models["draft"].generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = K, "constant"
    config.assistant_confidence_threshold = 0.0
    times: dict[str, list[float]] = {"plain": [], "assisted": []}
    for _ in range(REPEATS):
        for prompt in PROMPTS:
            given = tokenizer(prompt, return_tensors="pt").to(where)
            for name, options in (
                ("plain", {}),
                ("assisted", {"assistant_model": models["draft"]}),
            ):
                torch.cuda.synchronize(where)
                begin = time.perf_counter()
                made = models["target"].generate(
                    **given, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS,
                    do_sample=False, **options,
                )  # fmt: skip
                torch.cuda.synchronize(where)
                took = time.perf_counter() - begin
                times[name].append(took / (made.shape[1] - given["input_ids"].shape[1]))
    del models
    torch.cuda.empty_cache()
    return {name: {"least": 1e3 * min(t), "median": 1e3 * median(t)} for name, t in times.items()}


def torch_device(device: str) -> str:
    """What PyTorch calls the card that a device of specedge is on."""
    return f"cuda:{int(device.partition(':')[2] or 0)}"
