"""Compare specedge with other libraries on real weights: quality, size, passes and requests.

    python tools/peers/compare.py

Converts the weights for each library, measures quality relative to the float32 model, times
requests in interleaved rounds, and writes README.md, figures.json and chart.svg. Results are
cached: a run that was interrupted, or limited by --minutes, is resumed. docs/benchmarks.md
describes the method.
"""

from __future__ import annotations

import json
import operator
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import click
import platformdirs

import measuring
import reporting
from environments import (
    DEFAULT_GGUF_TYPES,
    GGUF_TYPES,
    KEEP,
    PAIR_PEERS,
    PEERS,
    UnavailableError,
    llama_cpp,
    python_of,
)
from measuring import LENGTHS, Figures, Kernels, Variant, loaded, measure_rounds
from processes import Worker, WorkerError
from reference import Reference

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))

import real_weights  # noqa: E402

STEPS = ("convert", "quality", "kernels", "time")
COMMAND = "python tools/peers/compare.py"
NAMES = {
    "SmolLM2-135M-Instruct.Q4_1": "SmolLM2-135M-Instruct",
    "gemma-3-270m-q4_k_m": "Gemma-3-270M",
}


class Comparison:
    """Comparison with its caches and results."""

    known_peers = PEERS
    lengths: tuple[int, ...] = LENGTHS  # tokens of timed passes

    def __init__(
        self,
        output: Path,
        cache: Path,
        peers: list[str],
        types: list[str],
        pythons: dict[str, str],
        threads: int,
    ) -> None:
        self.output, self.cache, self.threads = output, cache, threads
        self.peers, self.types, self.pythons = peers, types, pythons
        self.models = cache / "models"
        self.figures: list[Figures] = measuring.read(output / "figures.json")
        for folder in (output, cache):
            folder.mkdir(parents=True, exist_ok=True)

    def figures_of(self, file: Path) -> Figures:
        """Return the figures of a file, which are empty if it was not measured yet."""
        name = NAMES.get(file.stem, file.stem)
        for figures in self.figures:
            if figures.name == name:
                return figures
        self.figures.append(Figures(name))
        return self.figures[-1]

    def convert(self, reference: Reference, figures: Figures) -> None:
        """Convert the file for every library and precision."""
        for variant in self.variants():
            previous = figures.variants.get(variant.name, variant)
            _say(f"{figures.name}: converting to {variant.name}")
            try:
                with self._worker(variant) as worker:
                    source = self.source(reference, variant)
                    answer = worker.ask("convert", **source, cache=str(self.models))
                variant.model = Path(answer["model"]).name
                variant.num_bytes = answer["bytes"]
                if variant.model == previous.model:
                    variant = replace(previous, reason="", drafters=variant.drafters)
            except (UnavailableError, WorkerError) as error:
                variant.reason = f"not converted: {error}"
                _say(variant.reason)
            figures.variants[variant.name] = variant
            self.write()

    def variants(self) -> list[Variant]:
        """Return the selected variants, not yet converted."""
        return [
            Variant(peer.name, precision, has_drafts=peer.has_drafts)
            for peer in map(PEERS.__getitem__, self.peers)
            for precision in filter(self._is_selected, peer.precisions)
        ]

    def source(self, reference: Reference, variant: Variant) -> dict[str, str]:
        """Return the arguments of a variant's conversion."""
        paths = {"gguf": str(reference.gguf), "checkpoint": str(reference.checkpoint)}
        return {**paths, "precision": variant.precision}

    def measure_quality(self, reference: Reference, figures: Figures) -> None:
        """Measure the quality of every variant that has not been measured."""
        windows, folder = reference.windows(), reference.log_probabilities(_say)
        for variant in self._available(figures):
            if variant.quality:
                continue
            _say(f"{figures.name}: quality of {variant.name}")
            try:
                with self._worker(variant) as worker:
                    model = str(self.models / variant.model)
                    worker.ask("load", model=model, threads=self.threads)
                    answer = worker.ask("quality", windows=str(windows), reference=str(folder))
                variant.quality = answer["texts"]
            except (UnavailableError, WorkerError) as error:
                variant.reason = f"no logits: {error}"
                _say(variant.reason)
            self.write()

    def measure_kernels(self, reference: Reference, figures: Figures, tokens: int) -> None:
        """Compare kept GGUF types and llama.cpp with the same weights in float32."""
        for gguf_type in self.types:
            names = f"llamacpp {gguf_type}", f"specedge {KEEP}{gguf_type}"
            variants = [figures.variants.get(name) for name in names]
            if gguf_type in figures.kernels or any(v is None or v.reason for v in variants):
                continue
            _say(f"{figures.name}: kernels of {gguf_type}")
            try:
                figures.kernels[gguf_type] = self._kernels(reference, *variants, tokens)
            except (UnavailableError, WorkerError) as error:
                _say(f"no kernels: {error}")
            self.write()

    def _kernels(
        self, reference: Reference, theirs: Variant, ours: Variant, tokens: int
    ) -> Kernels:
        prompts = [prompt for _, prompt in reference.prompts()]
        with TemporaryDirectory(dir=self.cache) as temporary:
            windows, folder = Path(temporary, "windows.json"), Path(temporary, "reference")
            reference.first_windows(windows)

            def run(worker: Worker, model: str, **options: Any) -> list[list[int]]:
                worker.ask("load", model=model, threads=self.threads, **options)
                requests = ({"prompt": prompt, "tokens": tokens, "k": 0} for prompt in prompts)
                return [worker.ask("generate", **request)["tokens"] for request in requests]

            def divergence(worker: Worker) -> float:
                answer = worker.ask("quality", windows=str(windows), reference=str(folder))
                return fmean(text["kl"] for text in answer["texts"].values())

            model = self.models / theirs.model
            source = {"gguf": str(model / "model.gguf"), "checkpoint": "", "precision": "F32"}
            with self._worker(theirs) as worker:
                whole = worker.ask("convert", cache=temporary, **source)["model"]
                texts = run(worker, whole, float32_cache=True)
                worker.ask("reference", windows=str(windows), folder=str(folder))
            with self._worker(theirs) as worker:
                worker.ask("load", model=str(model), threads=self.threads)
                llamacpp = divergence(worker)
            with self._worker(ours) as worker:
                bundle = str(self.models / ours.model)
                worker.ask("load", model=bundle, threads=self.threads)
                keep = divergence(worker)
                same = map(operator.eq, texts, run(worker, bundle, ops="gqa-fp32"))
                return Kernels(llamacpp, keep, divergence(worker), (sum(same), len(texts)))

    def time(
        self, reference: Reference, figures: Figures, tokens: int, rounds: int, seconds: float
    ) -> None:
        """Time every variant in interleaved rounds."""
        prompts = self.prompts(reference)
        variants = self._available(figures)
        figures.machine = f"{_processor()}, {os.cpu_count()} cores, {self.threads} threads"
        load = {"models": self.models, "threads": self.threads, "prompt": prompts[0][1]}
        with (
            TemporaryDirectory(dir=self.cache) as data,  # pass costs are measured anew
            loaded(variants, partial(self._worker, data_home=data), **load, say=_say) as workers,
        ):
            measured = (workers, figures, prompts, tokens, rounds, seconds, self.lengths)
            for _ in measure_rounds(*measured):
                _say(f"{figures.name}: {len(figures.rounds)} of {rounds} rounds")
                self.write()
        self.write()

    def prompts(self, reference: Reference) -> list[tuple[str, list[int]]]:
        """Return the kinds and token ids of the timed prompts."""
        return reference.prompts()

    def write(self) -> None:
        """Write figures, tables and chart."""
        fields = {"models": [figures.json() for figures in self.figures]}
        (self.output / "figures.json").write_text(json.dumps(fields, indent=1) + "\n", "utf-8")
        page = reporting.page(self.figures, COMMAND)
        (self.output / "README.md").write_text(page, "utf-8")
        (self.output / "chart.svg").write_text(reporting.chart(self.figures[0]) + "\n", "utf-8")

    def _is_selected(self, precision: str) -> bool:
        """Return True unless the precision is a GGUF type that is not compared."""
        gguf_type = precision.removeprefix(KEEP)
        return gguf_type in self.types or gguf_type not in GGUF_TYPES

    def _available(self, figures: Figures) -> list[Variant]:
        """Return the selected variants that were converted."""
        return [
            variant
            for variant in figures.variants.values()
            if not variant.reason
            and variant.peer in self.peers
            and self._is_selected(variant.precision)
        ]

    def _worker(self, variant: Variant, data_home: str | None = None) -> Worker:
        """Start a worker process of a variant's library.

        Args:
            variant: The variant.
            data_home: Folder instead of the user's data folder.
        """
        peer, environments = self.known_peers[variant.peer], self.cache / "environments"
        python = python_of(peer, environments, self.pythons)
        folders = (ROOT, ROOT / "tools", ROOT / "tools/peers/workers")
        paths = os.pathsep.join(map(str, folders))
        environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
        environment |= {"TOKENIZERS_PARALLELISM": "false", "ORT_DISABLE_TELEMETRY": "1"}
        environment |= {"XDG_DATA_HOME": data_home} if data_home else {}
        is_built = peer.name == "llamacpp" and peer.name in self.pythons
        if peer.requirements == PEERS["llamacpp"].requirements and not is_built:
            environment["LLAMA_CPP_LIB_PATH"] = str(llama_cpp(environments))
        return Worker([python, str(peer.worker)], self.cache / "log.txt", environment)


def _processor() -> str:
    """Return the processor's name and its vector extensions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    flags = fields.get("flags", "").split()
    named = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_vnni": "VNNI", "avx_vnni": "AVX-VNNI"}
    extensions = [label for flag, label in named.items() if flag in flags]
    return f"{fields.get('model name', platform.machine())} ({', '.join(extensions)})"


def names_option(
    flag: str, choices: Sequence[str], default: Sequence[str] = (), **options: Any
) -> Callable[[Any], Any]:
    """Return an option with comma-separated choices, by default all."""

    def parse(_: Any, __: Any, value: str) -> list[str]:
        names = [part.strip() for part in value.split(",")]
        if unknown := [name for name in names if name not in choices]:
            raise click.BadParameter(f"no {unknown[0]}; choose from {', '.join(choices)}")
        return names

    options |= {"default": ",".join(default or choices), "callback": parse, "show_default": True}
    return click.option(flag, **options)


def _pythons(_: Any, __: Any, values: tuple[str, ...]) -> dict[str, str]:
    pythons = dict(value.partition("=")[::2] for value in values)
    if unknown := pythons.keys() - PEERS.keys() - PAIR_PEERS.keys():
        raise click.BadParameter(f"no library {', '.join(unknown)}")
    return pythons


def timing_options(command: Any) -> Any:
    """Add the options of measured rounds to a command."""
    for option in (
        click.option(
            "--minutes", default=60.0, show_default=True, help="Time limit of a file's rounds."
        ),
        click.option("--rounds", type=click.IntRange(1), default=3, show_default=True),
        click.option("--threads", type=click.IntRange(1), default=2, show_default=True),
        click.option(
            "--python", "pythons", multiple=True, metavar="LIBRARY=PATH", callback=_pythons,
            help="Python of an environment with the library.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


@click.command()
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=ROOT / "docs/benchmarks",
    help="Folder of the results.  [default: docs/benchmarks]",
)
@names_option("--steps", STEPS)
@names_option("--peers", [*PEERS])
@names_option("--types", GGUF_TYPES, DEFAULT_GGUF_TYPES, help="GGUF types to compare.")
@click.option(
    "--tokens", type=click.IntRange(2), default=48, show_default=True, help="New tokens per prompt."
)
@timing_options
def main(
    files: tuple[Path, ...],
    output: Path,
    steps: list[str],
    peers: list[str],
    types: list[str],
    minutes: float,
    rounds: int,
    tokens: int,
    threads: int,
    pythons: dict[str, str],
) -> None:
    """Compare libraries on GGUF FILES, by default SmolLM2-135M-Instruct and Gemma-3-270M."""
    cache = Path(platformdirs.user_cache_dir("specedge")).absolute()
    if not files:
        files = tuple(map(real_weights.path_of, (real_weights.SMOLLM2, real_weights.GEMMA)))
    comparison = Comparison(output, cache, peers, types, pythons, threads)
    for file in files:
        reference = Reference(file.absolute(), cache / "models")
        figures = comparison.figures_of(file)
        if "convert" in steps:
            comparison.convert(reference, figures)
        if "quality" in steps:
            comparison.measure_quality(reference, figures)
        if "kernels" in steps:
            comparison.measure_kernels(reference, figures, tokens)
        if "time" in steps:
            comparison.time(reference, figures, tokens, rounds, 60 * minutes)
    comparison.write()
    click.echo((output / "README.md").read_text("utf-8"))


def _say(line: str) -> None:
    click.echo(line, err=True)


if __name__ == "__main__":
    main()
