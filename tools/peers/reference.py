"""Float32 reference of a GGUF file, and the texts of the comparison.

The reference is transformers with the file's dequantized weights; every library gets token ids of
the file's tokenizer as converted by transformers. Prose and dialogues were written for this project
or are in the public domain (texts/README.md); the code is from Python's standard library.
"""

from __future__ import annotations

import importlib
import inspect
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).with_name("workers")))

from quality import write_reference
from serving import cached

TEXTS = Path(__file__).with_name("texts")
MODULES = ("textwrap", "heapq", "shlex", "fractions")  # of the standard library
WINDOW = 512  # tokens, a BOS token among them
NUM_WINDOWS = {"prose": 5, "chat": 5, "code": 10}  # 10,240 tokens in all
PLAIN_ROLES = {"system": "", "user": "Question: ", "assistant": "Answer: "}


@dataclass(frozen=True)
class Reference:
    """Reference of one file, with cached results."""

    gguf: Path
    cache: Path

    @cached_property
    def checkpoint(self) -> Path:
        """Folder of the float32 checkpoint."""

        def make(folder: Path) -> None:
            import torch
            from transformers import AutoModelForCausalLM, AutoTokenizer

            source = {"gguf_file": self.gguf.name, "local_files_only": True}
            parent = str(self.gguf.absolute().parent)
            model = AutoModelForCausalLM.from_pretrained(parent, dtype=torch.float32, **source)
            del model.hf_quantizer  # the weights are float32
            del model.config.quantization_config
            model.save_pretrained(folder)
            AutoTokenizer.from_pretrained(parent, **source).save_pretrained(folder)

        return cached(str(self.cache), str(self.gguf), "checkpoint", make)

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        source = {"gguf_file": self.gguf.name, "local_files_only": True}
        return AutoTokenizer.from_pretrained(str(self.gguf.absolute().parent), **source)

    def prompts(self, name: str = "prompts.jsonl") -> list[tuple[str, list[int]]]:
        """Return the kinds and token ids of the timed prompts in a file of texts."""
        lines = (TEXTS / name).read_text("utf-8").splitlines()
        prompts = []
        for line in map(json.loads, lines):
            if "messages" in line:
                ids = self._dialogue(line["messages"], add_generation_prompt=True)
            else:
                ids = self.tokenizer(line["text"])["input_ids"]
            prompts.append((line["kind"], ids))
        return prompts

    def first_windows(self, path: Path) -> None:
        """Write the first window of each text to a file."""
        windows = json.loads(self.windows().read_text("utf-8"))
        path.write_text(json.dumps({name: some[:1] for name, some in windows.items()}), "utf-8")

    def windows(self) -> Path:
        """Write the windows of token ids by text to a file; return its path."""
        texts = {
            "prose": self._plain((TEXTS / "prose.txt").read_text("utf-8")),
            "chat": [token for dialogue in dialogues() for token in self._dialogue(dialogue)],
            "code": self._plain(code()),
        }
        bos = self._bos()
        windows = {name: cut(name, ids, bos) for name, ids in texts.items()}
        path = self.checkpoint / "windows.json"
        path.write_text(json.dumps(windows), "utf-8")
        return path

    def log_probabilities(self, say: Any) -> Path:
        """Return the folder of the reference's log-probabilities of all windows."""
        windows = self.windows()
        folder = self.checkpoint / "reference"
        copy = folder / "windows.json"
        if copy.exists() and copy.read_bytes() == windows.read_bytes():
            return folder
        say(f"{self.gguf.name}: running the float32 reference")
        import torch
        from transformers import AutoModelForCausalLM

        shutil.rmtree(folder, ignore_errors=True)
        model = AutoModelForCausalLM.from_pretrained(self.checkpoint, dtype=torch.float32).eval()

        def logits(tokens: list[int]) -> Any:
            with torch.inference_mode():
                return model(torch.tensor([tokens])).logits[0].numpy()

        write_reference(logits, windows, folder)
        shutil.copy(windows, copy)
        return folder

    def _plain(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _bos(self) -> list[int]:
        """Return the tokens that the tokenizer adds before a text."""
        ids, plain = self.tokenizer("a")["input_ids"], self._plain("a")
        return list(ids[: len(ids) - len(plain)])

    def _dialogue(
        self, messages: list[dict[str, str]], add_generation_prompt: bool = False
    ) -> list[int]:
        """Return the tokens of a dialogue, by the chat template if the model has one."""
        if self.tokenizer.chat_template:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
            return self._plain(text)
        text = "\n".join(PLAIN_ROLES[message["role"]] + message["content"] for message in messages)
        text += "\nAnswer:" if add_generation_prompt else "\n\n"
        return (self._bos() if add_generation_prompt else []) + self._plain(text)


def dialogues() -> list[list[dict[str, str]]]:
    """Return the messages of each dialogue."""
    return list(map(json.loads, (TEXTS / "chat.jsonl").read_text("utf-8").splitlines()))


def code() -> str:
    """Return the source of some modules of the standard library."""
    return "\n".join(inspect.getsource(importlib.import_module(name)) for name in MODULES)


def cut(name: str, ids: Sequence[int], bos: Sequence[int]) -> list[list[int]]:
    """Return the first windows of a text, each after the BOS tokens."""
    size, count = WINDOW - len(bos), NUM_WINDOWS[name]
    windows = [[*bos, *ids[i : i + size]] for i in range(0, count * size, size)]
    if len(windows[-1]) < WINDOW:
        raise ValueError(f"{name} has {len(ids)} tokens; {count * size} are needed")
    return windows
