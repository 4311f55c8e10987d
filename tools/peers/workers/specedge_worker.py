"""specedge: bundles with or without a draft model."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import numpy as np

from real_weights import bundle_of, digest_of_sources
from serving import FirstToken, cached, serve, size_of

CHUNK = 128  # tokens of a pass whose logits are read


class SpecEdge:
    """Bundles of the current exporter; to keep a GGUF type, from llama.cpp's file."""

    def convert(
        self, source: str, precision: str, cache: str, draft: str = "", bundle: str = ""
    ) -> Path:
        """Return the bundle, by default exported once for the current sources."""
        if bundle:
            return Path(bundle)
        gguf, name = Path(source), Path(source).stem
        precision, _, gguf_type = precision.partition(" ")
        if gguf_type:
            gguf = cached(cache, source, f"llamacpp-{gguf_type}", _require) / "model.gguf"
            name += f"-{gguf_type}"
        if draft:
            name += f"+{Path(draft).stem}"
        return bundle_of(gguf, precision, Path(cache), name, Path(draft) if draft else None)

    def num_bytes(self, model: Path) -> int:
        return size_of(*(path for path in model.rglob("*") if "weights" in path.name))

    def load(self, model: Path, threads: int, ops: str = "auto") -> str:
        import specedge

        self.pipeline = specedge.load(model, threads=threads, ops=ops)
        runtime = importlib.metadata.version("onnxruntime")
        version = f"{specedge.__version__} (sources {digest_of_sources('runtime')})"
        return f"{version} on onnxruntime {runtime}"

    def generate(
        self, prompt: list[int], tokens: int, k: int | str, **options: Any
    ) -> dict[str, Any]:
        self.pipeline.forget()
        times = FirstToken()
        result = self.pipeline.generate(
            prompt, tokens, num_draft_tokens=k, ignore_eos=True, **options
        )
        whole = sum(times.split().values())
        return {
            "tokens": list(result.tokens),
            "prefill_seconds": result.stats.prefill_seconds,
            "decode_seconds": whole - result.stats.prefill_seconds,
            "accepted": result.stats.num_accepted,
            "drafted": result.stats.num_drafted,
        }

    def prefill(self, tokens: list[int]) -> None:
        model = self.pipeline.target
        model.truncate(0)
        model.prefill(tokens)
        self._length = len(tokens)

    def run_pass(self, tokens: list[int]) -> None:
        self.pipeline.target.forward(tokens).array()
        self.pipeline.target.truncate(self._length)

    def logits(self, tokens: list[int]) -> np.ndarray:
        model = self.pipeline.target
        model.truncate(0)
        starts = range(0, len(tokens), CHUNK)
        chunks = [model.forward(tokens[i : i + CHUNK]).array().copy() for i in starts]
        return np.concatenate(chunks)


def _require(folder: Path) -> None:
    """Reject to create a file that llama.cpp has to quantize first."""
    raise RuntimeError("requires llama.cpp's file; run with its variant of llamacpp")


if __name__ == "__main__":
    serve(SpecEdge())
