"""Bundles of real weights, and transformers' model of the same file."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import quality
import real_weights
import reference
import specedge

TEXTS = reference.TEXTS
PROMPTS = 12
LENGTH = 80
NEAR = 1e-4  # of the logits' standard deviation: float32 rounding by summation order
WINDOW = 256


class Real:
    """One file of real weights; bundles are exported once for the present sources."""

    def __init__(self, weights: real_weights.Weights, download: bool = True) -> None:
        try:
            self.gguf = real_weights.path_of(weights, download)
        except real_weights.UnavailableWeightsError as error:
            pytest.skip(str(error))
        self._pipelines: dict[str, specedge.Pipeline] = {}

    def bundle(self, precision: str) -> Path:
        """Return the bundle's folder."""
        return real_weights.bundle_of(self.gguf, precision)

    def pipeline(self, precision: str) -> specedge.Pipeline:
        """Return the loaded bundle, loaded once."""
        if precision not in self._pipelines:
            self._pipelines[precision] = specedge.load(self.bundle(precision))
        return self._pipelines[precision]

    @cached_property
    def model(self) -> torch.nn.Module:
        """transformers' float32 model."""
        options = {"gguf_file": self.gguf.name, "local_files_only": True}
        return AutoModelForCausalLM.from_pretrained(
            self.gguf.parent, dtype=torch.float32, **options
        ).eval()

    @cached_property
    def tokenizer(self) -> AutoTokenizer:
        """transformers' tokenizer of the file."""
        options = {"gguf_file": self.gguf.name, "local_files_only": True}
        return AutoTokenizer.from_pretrained(self.gguf.parent, **options)

    def prompts(self) -> list[list[int]]:
        """Return prompts of prose, code and dialogue, as token ids."""
        prose = (TEXTS / "prose.txt").read_text("utf-8").split("\n\n")
        code = reference.code().split("\n\n\n")
        texts = [*[p[:200] for p in prose[:4]], *[p[:200] for p in code[1:5]]]
        for dialogue in reference.dialogues()[:4]:
            texts.append(
                self.tokenizer.apply_chat_template(
                    dialogue[:1], tokenize=False, add_generation_prompt=True
                )
                if self.tokenizer.chat_template
                else dialogue[0]["content"] + "\n"
            )
        prompts = [self.tokenizer(text)["input_ids"] for text in texts]
        assert len(prompts) == PROMPTS
        return prompts

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Return transformers' logits, [T, V]."""
        with torch.inference_mode():
            return self.model(torch.tensor([tokens])).logits[0].numpy()

    def check_every_k(self, precision: str, prompts: list[list[int]]) -> None:
        """Check that the text is plain decoding's for each K, and where K is chosen by round."""
        pipeline = self.pipeline(precision)
        for prompt in prompts:
            plain, *drafted = (
                pipeline.generate(prompt, LENGTH, num_draft_tokens=k, ignore_eos=True).tokens
                for k in (0, 1, 4, 8, None)
            )
            assert drafted == [plain] * 4

    def check_greedy(self, prompt: list[int], tokens: list[int]) -> None:
        """Check that each token is the greedy choice of transformers after its prefix.

        Where it is another one, the two must be nearer than the roundings of float32.
        """
        rows = self.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
        chosen = rows[np.arange(len(tokens)), tokens]
        margins = (rows.max(1) - chosen) / rows.std(1)
        assert margins.max() < NEAR, int(margins.argmax())

    def divergence(self, precision: str, folder: Path) -> float:
        """Return the mean KL of a bundle on a window of prose, chat and code each."""
        windows = folder / "windows.json"
        bos = self.tokenizer("a")["input_ids"][:-1]
        texts = {
            "prose": (TEXTS / "prose.txt").read_text("utf-8"),
            "code": reference.code(),
            "chat": "\n".join(
                message["content"] for dialogue in reference.dialogues() for message in dialogue
            ),
        }
        plain = {
            name: self.tokenizer(text, add_special_tokens=False)["input_ids"]
            for name, text in texts.items()
        }
        windows.write_text(json.dumps({n: [[*bos, *ids[:WINDOW]]] for n, ids in plain.items()}))
        quality.write_reference(self.logits, windows, folder / "reference")
        target = self.pipeline(precision).target

        def logits(tokens: list[int]) -> np.ndarray:
            target.truncate(0)
            chunks = (tokens[i : i + 128] for i in range(0, len(tokens), 128))
            return np.concatenate([target.forward(one).array().copy() for one in chunks])

        measured = quality.measure(logits, str(windows), str(folder / "reference"))
        return float(np.mean([text["kl"] for text in measured["texts"].values()]))
