"""Compare the time of specedge, transformers and CTranslate2 for a window of speech.

    python tools/measure_transcription.py CHECKPOINT FILE.wav --bundle BUNDLE [--bundle BUNDLE]
        [--ctranslate2 PYTHON MODEL] [--repeats N] [--threads N]

The first 30 s of FILE.wav are decoded greedily without timestamps, in English. Times are medians of
runs in turn, of encoder and decoder, without the spectrogram. A line says whether the tokens equal
those of the first row. PYTHON has the package ctranslate2, and MODEL is its folder of the
checkpoint.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import click
import numpy as np
import torch
from transformers import WhisperForConditionalGeneration

import specedge
from harness import table_header, table_row
from specedge.runtime.audio.transcriber import Transcriber
from specedge.runtime.audio.wav import read_wav
from specedge.runtime.requests.pipeline import Pipeline
from specedge.runtime.sampling.source import Source

SETTINGS = {"plain": {"num_draft_tokens": 0}, "auto": {}}
SETTINGS |= {f"suffix, K = {k}": {"drafter": "suffix", "num_draft_tokens": k} for k in (2, 4, 8)}
# Reads the type of the weights, decodes once, and prints seconds and tokens.
WORKER = """
import json, sys, time
import ctranslate2, numpy
model, features, prompt, length, threads = sys.argv[1:]
features = ctranslate2.StorageView.from_array(numpy.load(features))
models = {}
for line in sys.stdin:
    compute_type = line.strip()
    if compute_type not in models:
        models[compute_type] = ctranslate2.models.Whisper(
            model, device="cpu", compute_type=compute_type, intra_threads=int(threads))
    start = time.perf_counter()
    result = models[compute_type].generate(
        features, [json.loads(prompt)], beam_size=1, max_length=int(length),
        suppress_blank=True, sampling_temperature=0)
    print(json.dumps([time.perf_counter() - start, result[0].sequences_ids[0]]), flush=True)
"""
Run = Callable[[], Sequence[int]]


class Timing:
    """Seconds of each run of a setting, and its tokens."""

    def __init__(self, run: Callable[[], tuple[float, Sequence[int]]]) -> None:
        self.run, self.seconds = run, list[float]()
        self.tokens = list[int]()

    def measure(self) -> None:
        seconds, tokens = self.run()
        self.seconds.append(seconds)
        self.tokens = list(tokens)


def timed(run: Run) -> Callable[[], tuple[float, Sequence[int]]]:
    """Return a function that also returns the seconds of a run."""

    def measure() -> tuple[float, Sequence[int]]:
        start = time.perf_counter()
        tokens = run()
        return time.perf_counter() - start, tokens

    return measure


def specedge_runs(name: str, pipeline: Pipeline, audio: np.ndarray) -> dict[str, Timing]:
    """Return the settings of a bundle."""
    transcriber = Transcriber(pipeline)
    source = transcriber.source(audio)
    prefix = transcriber.tokens.prefix("en", "transcribe", False)
    end = transcriber.tokens.end

    def run(options: dict[str, object]) -> Run:
        def generate() -> Sequence[int]:
            pipeline.forget()
            tokens = pipeline.generate(
                Source(source.values), pipeline.bundle.context_length, decoder_prefix=prefix,
                **options,
            ).tokens  # fmt: skip
            return [token for token in tokens if token != end]

        return generate

    return {
        f"{name}, {setting}": Timing(timed(run(options))) for setting, options in SETTINGS.items()
    }


def transformers_run(checkpoint: Path, source: np.ndarray, end: int) -> Timing:
    """Return transformers' model in float32."""
    model = WhisperForConditionalGeneration.from_pretrained(checkpoint).eval()
    features = torch.from_numpy(source.copy())[None]
    options: dict[str, object] = {"return_timestamps": False, "do_sample": False}
    if model.generation_config.is_multilingual:
        options |= {"language": "en", "task": "transcribe"}

    def run() -> Sequence[int]:
        with torch.inference_mode():
            tokens = model.generate(features, **options)[0].tolist()
        return [token for token in tokens if token < end]

    return Timing(timed(run))


@contextmanager
def ctranslate2_runs(
    python: str, model: str, features: Path, prompt: list[int], length: int, threads: int
) -> Iterator[dict[str, Timing]]:
    """Yield CTranslate2 in float32 and with int8 weights, in a process of its own."""
    command = [python, "-c", WORKER, model, features, json.dumps(prompt), str(length), str(threads)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        stdin, stdout = worker.stdin, worker.stdout

        def run(compute_type: str) -> Callable[[], tuple[float, Sequence[int]]]:
            def decode() -> tuple[float, Sequence[int]]:
                if worker.poll() is None:
                    stdin.write(f"{compute_type}\n")
                    stdin.flush()
                if not (line := stdout.readline()):
                    raise click.ClickException(f"CTranslate2 failed with {compute_type}")
                seconds, tokens = json.loads(line)
                return seconds, tokens

            return decode

        yield {f"CTranslate2, {name}": Timing(run(name)) for name in ("float32", "int8")}


@click.command()
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@click.argument("audio", type=click.File("rb"))
@click.option("--bundle", "bundles", type=click.Path(path_type=Path), multiple=True, required=True)
@click.option("--ctranslate2", nargs=2, metavar="PYTHON MODEL")
@click.option("--repeats", default=5, show_default=True)
@click.option("--threads", default=torch.get_num_threads(), show_default=True)
def main(
    checkpoint: Path,
    audio: BinaryIO,
    bundles: tuple[Path, ...],
    ctranslate2: tuple[str, str] | None,
    repeats: int,
    threads: int,
) -> None:
    """Print a table of seconds."""
    torch.set_num_threads(threads)
    samples = read_wav(audio, audio.name)[: 30 * 16_000]
    timings: dict[str, Timing] = {}
    with ExitStack() as stack:
        pipelines = [
            stack.enter_context(specedge.load(folder, threads=threads)) for folder in bundles
        ]
        for folder, pipeline in zip(bundles, pipelines, strict=True):
            timings |= specedge_runs(folder.name, pipeline, samples)
        transcriber, bundle = Transcriber(pipelines[0]), pipelines[0].bundle
        source = np.asarray(transcriber.source(samples).values)
        end = transcriber.tokens.end
        timings["transformers, float32"] = transformers_run(checkpoint, source, end)
        if ctranslate2 is not None:
            features = Path(stack.enter_context(tempfile.TemporaryDirectory()), "features.npy")
            np.save(features, source[None])
            prefix = transcriber.tokens.prefix("en", "transcribe", False)
            prompt, length = [*bundle.decoder_start, *prefix], bundle.context_length
            timings |= stack.enter_context(
                ctranslate2_runs(*ctranslate2, features, prompt, length, threads)
            )
        for _ in range(repeats + 1):
            for timing in timings.values():
                timing.measure()
    first = next(iter(timings.values()))
    base = statistics.median(first.seconds[1:])
    print(table_header("setting", "seconds", "speed-up", "tokens", "same"))
    for name, timing in timings.items():
        seconds = statistics.median(timing.seconds[1:])
        same = "yes" if timing.tokens == first.tokens else "no"
        cells = f"{seconds:.3f}", f"{base / seconds:.2f}", len(timing.tokens), same
        print(table_row(name, *cells))


if __name__ == "__main__":
    main()
