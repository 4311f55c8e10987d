"""transformers: assisted generation with a draft model, and prompt lookup."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from serving import linked, serve, size_of


class Transformers:
    """Links to the float32 checkpoints, loaded in the precision, with the library's defaults."""

    def convert(self, source: str, precision: str, cache: str, draft: str = "") -> Path:
        name = f"transformers-{precision}-{Path(draft).name}"
        return linked(cache, source, name, {"target": source, "draft": draft})

    def num_bytes(self, model: Path) -> int:
        """Return the size of weights with 16 bits."""
        return size_of(*model.glob("*/*.safetensors")) // 2

    def load(self, model: Path, threads: int) -> str:
        torch.set_num_threads(threads)
        self.target, self.draft = (
            transformers.AutoModelForCausalLM.from_pretrained(
                model / role, dtype=torch.bfloat16, local_files_only=True
            ).eval()
            for role in ("target", "draft")
        )
        for loaded in (self.target, self.draft):
            loaded.generation_config.eos_token_id = None  # end tokens are ignored
        return transformers.__version__

    def generate(
        self, prompt: list[int], tokens: int, k: int, drafter: str = "model"
    ) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if k and drafter == "lookup":
            options = {"prompt_lookup_num_tokens": k}
        elif k:
            config = self.draft.generation_config
            config.num_assistant_tokens, config.num_assistant_tokens_schedule = k, "constant"
            config.assistant_confidence_threshold = 0.0
            options = {"assistant_model": self.draft}
        ids = torch.tensor([prompt])
        start = time.perf_counter()
        result = self.target.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens,
            pad_token_id=0, repetition_penalty=1.0, **options,
        )  # fmt: skip
        seconds = time.perf_counter() - start
        new = result[0, len(prompt) :].tolist()
        return {"tokens": new, "prefill_seconds": 0.0, "decode_seconds": seconds}

    def logits(self, tokens: list[int]) -> np.ndarray:
        with torch.inference_mode():
            return self.target(torch.tensor([tokens])).logits[0].float().numpy()


if __name__ == "__main__":
    serve(Transformers())
