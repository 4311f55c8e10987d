"""transformers as a peer: plain and assisted generation in float32."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from serving import FirstToken, serve


class Watch(BaseStreamer):
    """Streamed first are the prompt's tokens."""

    def __init__(self) -> None:
        self.times = FirstToken()
        self._prompt_came = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_came:
            self.times.came()
        self._prompt_came = True

    def end(self) -> None:
        """Nothing is held back."""


class Transformers:
    """Reads checkpoints as they are."""

    def convert(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"target": request["model"], "draft": request["draft"]}

    def load(self, target: str, draft: str | None, threads: int) -> dict[str, Any]:
        torch.set_num_threads(threads)
        self.target = _model(target)
        self.draft = _model(draft) if draft else None
        return {"version": f"{transformers.__version__} on torch {torch.__version__}"}

    def generate(self, prompt: list[int], tokens: int, k: int) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if k:
            assert self.draft is not None
            config = self.draft.generation_config
            config.num_assistant_tokens = k
            config.num_assistant_tokens_schedule = "constant"
            config.assistant_confidence_threshold = 0.0
            options["assistant_model"] = self.draft
        ids = torch.tensor([prompt])
        watch = Watch()
        found = self.target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            streamer=watch,
            **options,
        )
        return {"tokens": found[0, len(prompt) :].tolist(), **watch.times.split()}


def _model(folder: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


if __name__ == "__main__":
    serve(Transformers())
