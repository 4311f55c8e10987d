"""onnxruntime-genai with its own model builder."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as og

from serving import FirstToken, cached, run_converter, serve, size_of

CONTEXT = 1024


class GenAI:
    """Models of the builder with its default options for a CPU."""

    def convert(self, source: str, precision: str, cache: str) -> Path:
        name = f"genai-{og.__version__}-{precision}"
        return cached(cache, source, name, lambda path: _build(path, source, precision))

    def num_bytes(self, model: Path) -> int:
        return size_of(*model.glob("*.onnx*"))

    def load(self, model: Path, threads: int) -> str:
        config = json.loads((model / "genai_config.json").read_text("utf-8"))
        decoder = config["model"]["decoder"]
        decoder.setdefault("session_options", {})["intra_op_num_threads"] = threads
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        for path in model.glob("*.json"):
            shutil.copy(path, folder)
        (folder / "model").symlink_to(model)  # files must lie below the configuration
        decoder["filename"] = f"model/{decoder['filename']}"
        (folder / "genai_config.json").write_text(json.dumps(config), "utf-8")
        self.model = og.Model(str(folder))
        return og.__version__

    def generate(self, prompt: list[int], tokens: int, k: int | str) -> dict[str, Any]:
        length = len(prompt) + tokens
        times = FirstToken()
        # There is no option to ignore end tokens; a minimum length suppresses them.
        generator = self._generator(max_length=length, min_length=length)
        generator.append_tokens(prompt)
        while not generator.is_done() and generator.token_count() < length:
            generator.generate_next_token()
            times.arrived()
        ids = [int(token) for token in generator.get_sequence(0)[len(prompt) :]]
        return {"tokens": ids, **times.split()}

    def prefill(self, tokens: list[int]) -> None:
        self._passes = self._generator(max_length=CONTEXT)
        self._passes.append_tokens(tokens)
        self._length = len(tokens)

    def run_pass(self, tokens: list[int]) -> None:
        self._passes.append_tokens(tokens)
        self._passes.rewind_to(self._length)

    def logits(self, tokens: list[int]) -> np.ndarray:
        generator = self._generator(max_length=CONTEXT)
        generator.append_tokens(tokens)
        rows = np.asarray(generator.get_output("logits"), np.float32)[0]
        if len(rows) != len(tokens):
            raise RuntimeError(f"returned {len(rows)} rows of logits for {len(tokens)} tokens")
        return rows

    def _generator(self, **options: int) -> Any:
        params = og.GeneratorParams(self.model)
        params.set_search_options(do_sample=False, **options)
        return og.Generator(self.model, params)


def _build(folder: Path, checkpoint: str, precision: str) -> None:
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
    options = ["-i", checkpoint, "-o", str(folder), "-p", precision, "-e", "cpu"]
    with tempfile.TemporaryDirectory() as scratch:
        run_converter([*builder, *options, "-c", scratch])


if __name__ == "__main__":
    serve(GenAI())
