"""What near-ties do to greedy text, and what deciding them costs. Development only.

    python tools/measure_exact.py [--bundle FOLDER] [--int8] [--output FILE]

Prompts are from the held-out modules of the running Python's library. With --int8 the target runs
with weights and activations of 8 bits, one scale a pass, made on the spot: noise of another size.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import click

from corpus import held_out, library_files
from specedge import Pipeline, load
from specedge.bundle import store

PROMPT_LENGTH = 96


def prompts(pipeline: Pipeline, count: int) -> list[list[int]]:
    """The tokens up to a third and to two thirds of each held-out module that is long enough."""
    texts = [text for name, text in library_files() if held_out(name)]
    modules = [pipeline.tokenizer.encode(text).ids for text in texts]
    ends = [(t, part * len(t) // 3) for part in (1, 2) for t in modules]
    return [t[end - PROMPT_LENGTH : end] for t, end in ends if end >= PROMPT_LENGTH][:count]


def measure(pipeline: Pipeline, texts: list[list[int]], k: int, length: int) -> dict[str, Any]:
    """One K over all prompts; speed-ups are medians of paired ratios."""
    ways = {"plain": {"num_draft_tokens": 0}, "speculative": {"num_draft_tokens": k}}
    ways["exact"] = {"num_draft_tokens": k, "exact": True}
    count = {"turned": 0, "listed": 0, "exact_differs": 0, "near_ties": 0, "exact_passes": 0}
    ratios: dict[str, list[float]] = {"speculative": [], "exact": []}
    noise = 0.0
    for i, text in enumerate(texts):
        one = {}
        for name in list(ways) if i % 2 else list(ways)[::-1]:
            pipeline.forget()
            one[name] = pipeline.generate(text, length, ignore_eos=True, **ways[name])
        plain, found, exact = one["plain"], one["speculative"], one["exact"]
        pairs = enumerate(zip(plain.tokens, found.tokens, strict=True))
        first = next((at for at, (mine, its) in pairs if mine != its), None)
        count["turned"] += first is not None
        count["listed"] += first in [tie.position for tie in found.near_ties]
        count["exact_differs"] += exact.tokens != plain.tokens
        count["near_ties"] += len(exact.near_ties)
        count["exact_passes"] += exact.stats.num_exact_passes
        noise = max(noise, exact.noise)
        for name, values in ratios.items():
            values.append(plain.stats.decode_seconds / one[name].stats.decode_seconds)
    speedups = {f"{name}_speedup": median(values) for name, values in ratios.items()}
    return {"num_draft_tokens": k, "noise": noise} | count | speedups


@contextlib.contextmanager
def in_int8(bundle: Path) -> Iterator[Path]:
    """A copy of a bundle whose target's gqa decoder is quantised, its passes to be distrusted."""
    import onnxruntime as ort
    from onnxruntime.quantization import quantize_dynamic

    with tempfile.TemporaryDirectory() as scratch:
        folder = shutil.copytree(bundle, Path(scratch) / "bundle")
        manifest = json.loads((folder / "bundle.json").read_text("utf-8"))
        graphs = manifest["target"]["graphs"]
        name = next(g["file"] for g in graphs if (g["name"], g["ops"]) == ("decoder", "gqa"))
        # ONNX Runtime folds the casts of float16 weights, which hide them from the quantiser.
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(folder / "folded.onnx")
        ort.InferenceSession(folder / name, options, providers=["CPUExecutionProvider"])
        quantize_dynamic(folder / "folded.onnx", folder / "int8.onnx")
        data = (folder / "int8.onnx").read_bytes()
        (folder / name).unlink()
        (folder / name).write_bytes(data)
        manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        manifest["target"]["parity"]["gqa"]["row_independent_lengths"] = [1]
        (folder / "bundle.json").write_text(json.dumps(manifest), "utf-8")
        yield folder


@click.command()
@click.option("--bundle", help="The bundle to measure. [default: as for specedge generate]")
@click.option("--int8", is_flag=True, help="Quantise the target first.")
@click.option("--prompts", "count", default=50, show_default=True)
@click.option("--length", default=200, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Write the figures as JSON.")
def main(bundle: str | None, int8: bool, count: int, length: int, output: Path | None) -> None:
    """Count near-ties and texts that differ from plain decoding's, with and without exact."""
    folder = Path(store.find_bundle(bundle))
    with in_int8(folder) if int8 else contextlib.nullcontext(folder) as found:
        pipeline = load(found, ops="gqa")
    texts = prompts(pipeline, count)
    pipeline.generate(texts[0], max_new_tokens=32)
    rows = []
    for k in (1, 2, 4, 8):
        rows.append(row := measure(pipeline, texts, k, length))
        click.echo(json.dumps(row))
    if output:
        facts = {"python": platform.python_version(), "prompts": len(texts), "new_tokens": length}
        output.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
