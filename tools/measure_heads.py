"""What a draft with a cut head gains and loses. Development only.

    python tools/measure_heads.py acceptance 512 1024 2048 [--library]
    python tools/measure_heads.py passes CHECKPOINT 512 1024 2048

The first asks a bundle's draft on held-out prompts, with the columns of a cut head taken from its
whole one: the same numbers. The second writes a checkpoint's graphs, with its whole head and with
heads of the lowest ids, and times passes of one token on one thread, in processor's time.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np

from corpus import held_out, library_files
from measure_pair import prompts
from specedge import Pipeline, load
from specedge.exporter import Progress
from specedge.exporter.quantization import texts
from specedge.exporter.tokenizers.frequent import most_frequent
from specedge.runtime.sampling.scores import Scores

K, LENGTH, HELD = 4, 64, 256


class Cut:
    """A model with some columns of its logits."""

    def __init__(self, model: Any, ids: list[int]) -> None:
        self._model, self._ids = model, np.array(ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, tokens: list[int], num_rows: int | None = None) -> Scores:
        rows = self._model.forward(tokens, num_rows).array()
        return Scores(rows[:, self._ids], self._ids)


@click.group()
def main() -> None:
    """Measure cut heads."""


@main.command()
@click.argument("counts", nargs=-1, type=int)
@click.option("--bundle", help="The bundle to measure. [default: as for specedge generate]")
@click.option("--library", is_flag=True, help="Count in Python's library, but for the prompts.")
@click.option("--prompts", "num_prompts", default=20, show_default=True)
def acceptance(
    counts: tuple[int, ...], bundle: str | None, library: bool, num_prompts: int
) -> None:
    """Print accepted over tested and tokens a round; without counts those of the whole head."""
    pipeline = load(bundle)
    whole, found = pipeline.draft, prompts(pipeline, num_prompts)
    built_in = texts.read(None)
    text = ("the library", _library()) if library else (built_in.name, built_in.text)
    for count in counts or (None,):
        share = "whole"
        if count is not None:
            ids = _ids(pipeline, count, text)
            share = f"{_share(pipeline, ids, found):.1%} of the prompts"
            pipeline.draft = Cut(whole, ids)
        else:
            pipeline.draft = whole
        for temperature in (0.0, 1.0):
            rates = " ".join(f"{x:.3f}" for x in _rates(pipeline, found, temperature))
            click.echo(f"{count or 'all'} ({share}), T = {temperature:g}: {rates}")


def _library() -> str:
    return "".join(text for name, text in library_files() if not held_out(name))[: 4 << 20]


def _ids(pipeline: Pipeline, count: int, text: tuple[str, str]) -> list[int]:
    bundle = pipeline.bundle
    path, size = bundle.path(bundle.tokenizer), bundle.draft.vocab_size
    return most_frequent(count, text, path, bundle.end_tokens, size, Progress())


def _share(pipeline: Pipeline, ids: list[int], found: list[list[int]]) -> float:
    return float(np.isin([token for text in found for token in text], ids).mean())


def _rates(pipeline: Pipeline, found: list[list[int]], temperature: float) -> tuple[float, float]:
    """Accepted over tested, and tokens a round."""
    accepted = tested = tokens = rounds = 0
    for seed, text in enumerate(found):
        one = pipeline.generate(
            text, LENGTH, temperature, seed=seed, num_draft_tokens=K, ignore_eos=True
        )
        stats = one.stats
        accepted, tested = accepted + stats.num_accepted, tested + stats.num_tested
        tokens, rounds = tokens + stats.num_new_tokens, rounds + stats.num_rounds
    return accepted / tested, tokens / rounds


@main.command()
@click.argument("checkpoint", type=click.Path(exists=True))
@click.argument("counts", nargs=-1, type=int)
@click.option("--repeats", default=40, show_default=True)
def passes(checkpoint: str, counts: tuple[int, ...], repeats: int) -> None:
    """Print the milliseconds of the fastest pass of one token after 256."""
    with tempfile.TemporaryDirectory() as folder:
        runs = {}
        for count in (*counts, None):
            path = Path(folder, str(count))
            _write(checkpoint, count, path)
            runs[count] = _passes(path)
        seconds: dict[int | None, list[float]] = {count: [] for count in runs}
        for _ in range(repeats):
            for count, run in runs.items():
                seconds[count].append(next(run))
    for count, taken in seconds.items():
        share = min(taken) / min(seconds[None])
        click.echo(f"{count or 'all'}: {1e3 * min(taken):.2f} ms, {share:.3f} of the whole")


def _write(checkpoint: str, count: int | None, folder: Path) -> None:
    """A checkpoint's graphs, not compared with anything."""
    from specedge.exporter import model_files
    from specedge.exporter.checkpoint import checkpoints, heads, loading

    loaded = loading.load(checkpoints.find("draft", checkpoint, None), Progress())
    if count is not None:
        loaded = heads.cut(loaded, range(count))
    folder.mkdir()
    part = model_files.measured("draft", loaded, 2 * HELD, K, 1, folder, Progress())
    model_files.write([part], "gqa")


def _passes(folder: Path) -> Iterator[float]:
    """The processor's seconds of one pass after another."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(folder / "step-gqa.onnx", options)
    binding = session.io_binding()
    for value in session.get_inputs():
        given = np.zeros(value.shape, np.float32)
        if value.name == "input_ids":
            given = np.array([[7]])
        if value.name == "past_length":
            given = np.array([HELD])
        binding.bind_ortvalue_input(value.name, onnxruntime.OrtValue.ortvalue_from_numpy(given))
    for value in session.get_outputs():
        binding.bind_output(value.name)
    while True:
        begun = time.thread_time()
        session.run_with_iobinding(binding)
        yield time.thread_time() - begun


if __name__ == "__main__":
    main()
