"""specedge as a peer: a pair is one bundle."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

from serving import cached, serve


class SpecEdge:
    """Rows keep their bits, so speculative text is plain text."""

    def convert(self, request: dict[str, Any]) -> dict[str, Any]:
        model, precision = request["model"], request["precision"]
        draft, draft_precision = request["draft"], request["draft_precision"] or precision

        def make(place: Path) -> None:
            from specedge.exporter import export

            export(draft, model, place, precision=precision, draft_precision=draft_precision)

        name = f"specedge-{precision}-{draft_precision}"
        return {"target": cached(request["cache"], [model, draft], name, make), "draft": None}

    def load(self, target: str, draft: str | None, threads: int) -> dict[str, Any]:
        import specedge

        self.pipeline = specedge.load(target, threads=threads)
        runtime = importlib.metadata.version("onnxruntime")
        return {"version": f"{specedge.__version__} on onnxruntime {runtime}"}

    def generate(self, prompt: list[int], tokens: int, k: int | str) -> dict[str, Any]:
        self.pipeline.forget()
        one = self.pipeline.generate(
            prompt,
            tokens,
            num_draft_tokens=None if k == "auto" else k,
            drafter="model",
            ignore_eos=True,
        )
        return {
            "tokens": list(one.tokens),
            "prefill_seconds": one.stats.prefill_seconds,
            "decode_seconds": one.stats.decode_seconds,
            "accepted": one.stats.num_accepted,
            "drafted": one.stats.num_drafted,
        }


if __name__ == "__main__":
    serve(SpecEdge())
