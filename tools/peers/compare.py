"""Compare specedge with other libraries on real weights: quality, size, passes and requests.

    python tools/peers/compare.py [FILE ...]
    python tools/peers/compare.py TARGET --draft DRAFT [--variants NAME,...] [--output FOLDER]

Converts GGUF files for each library, measures quality relative to the float32 model, times requests
in interleaved rounds, and writes README.md, figures.json and chart.svg. With `--draft`, libraries
with speculative decoding are compared on a target and a draft model. Results are cached: a run that
was interrupted, or limited by --minutes, is resumed. docs/benchmarks.md describes the method.
"""

from __future__ import annotations

import json
import operator
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
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
    EXTRA_GGUF_TYPES,
    GGUF_TYPES,
    KEEP,
    PEERS,
    UnavailableError,
    llama_cpp,
    python_of,
)
from measuring import AUTO, LENGTHS, Figures, Kernels, Variant, loaded, measure_rounds
from processes import Worker, WorkerError
from reference import Reference

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))

import real_weights  # noqa: E402
from specedge.cpu_count import processor_name  # noqa: E402

STEPS = ("convert", "quality", "kernels", "time")
NAMES = {
    "SmolLM2-135M-Instruct.Q4_1": "SmolLM2-135M-Instruct",
    "gemma-3-270m-q4_k_m": "Gemma-3-270M",
}


@dataclass
class Comparison:
    """Comparison of the selected variants of one file.

    Attributes:
        reference: The compared file.
        figures: Its results.
        draft: File of a draft model, or None.
        patterns: Patterns of the names of variants; if there are none, all but `EXTRA_GGUF_TYPES`.
        bundles: Existing bundles by the name of their variant.
        num_prompts: Number of timed prompts of each kind; None for all.
        write: Function that stores the results of all files.
    """

    reference: Reference
    figures: Figures
    draft: Reference | None
    patterns: Sequence[str]
    bundles: dict[str, str]
    pythons: dict[str, str]
    cache: Path
    threads: int
    num_prompts: int | None
    write: Callable[[], None]

    def __post_init__(self) -> None:
        self.models = self.cache / "models"
        names = [variant.name for variant in self.variants()]
        unknown = [
            *(self.pythons.keys() - PEERS.keys()),
            *(self.bundles.keys() - names),
            *(p for p in self.patterns if not any(fnmatchcase(name, p) for name in names)),
        ]
        if unknown:
            raise click.UsageError(f"no {unknown[0]}; variants are {', '.join(names)}")

    def variants(self) -> list[Variant]:
        """Return all variants, not yet converted."""
        return [
            Variant(
                peer.name,
                precision,
                drafters=[d for d in peer.drafters if self.draft or d[0] == AUTO],
            )
            for peer in PEERS.values()
            for precision in (peer.pair_precisions if self.draft else peer.precisions)
        ]

    def convert(self) -> None:
        """Convert the file for every library and precision."""
        figures = self.figures
        for variant in filter(self._is_selected, self.variants()):
            previous = figures.variants.get(variant.name, variant)
            _say(f"{figures.name}: converting to {variant.name}")
            try:
                with self._worker(variant) as worker:
                    source = self._source(variant)
                    answer = worker.ask("convert", **source, cache=str(self.models))
                model = Path(answer["model"])
                variant.model = model.name if model.parent == self.models else str(model)
                variant.num_bytes = answer["bytes"]
                if variant.model == previous.model:
                    variant = replace(previous, reason="", drafters=variant.drafters)
            except (UnavailableError, WorkerError) as error:
                variant.reason = f"not converted: {error}"
                _say(variant.reason)
            figures.variants[variant.name] = variant
            self.write()

    def _source(self, variant: Variant) -> dict[str, str]:
        """Return the arguments of a variant's conversion."""

        def path(reference: Reference) -> str:
            is_checkpoint = PEERS[variant.peer].reads_checkpoint
            return str(reference.checkpoint if is_checkpoint else reference.gguf)

        arguments = {"source": path(self.reference), "precision": variant.precision}
        arguments |= {"draft": path(self.draft)} if self.draft else {}
        bundle = self.bundles.get(variant.name)
        return arguments | ({"bundle": str(Path(bundle).absolute())} if bundle else {})

    def measure_quality(self) -> None:
        """Measure the quality of every variant that has not been measured."""
        windows = self.reference.windows()
        folder = self.reference.log_probabilities(_say)
        for variant in self._available():
            if variant.quality:
                continue
            _say(f"{self.figures.name}: quality of {variant.name}")
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

    def measure_kernels(self, tokens: int) -> None:
        """Compare kept GGUF types and llama.cpp with the same weights in float32."""
        figures, available = self.figures, {v.name: v for v in self._available()}
        for gguf_type in GGUF_TYPES:
            names = f"llamacpp {gguf_type}", f"specedge {KEEP}{gguf_type}"
            if gguf_type in figures.kernels or not available.keys() >= {*names}:
                continue
            _say(f"{figures.name}: kernels of {gguf_type}")
            try:
                theirs, ours = (available[name] for name in names)
                figures.kernels[gguf_type] = self._kernels(theirs, ours, tokens)
            except (UnavailableError, WorkerError) as error:
                _say(f"no kernels: {error}")
            self.write()

    def _kernels(self, theirs: Variant, ours: Variant, tokens: int) -> Kernels:
        prompts = [prompt for _, prompt in self.prompts()]
        with TemporaryDirectory(dir=self.cache) as temporary:
            windows, folder = Path(temporary, "windows.json"), Path(temporary, "reference")
            self.reference.first_windows(windows)

            def run(worker: Worker, model: str, **options: Any) -> list[list[int]]:
                worker.ask("load", model=model, threads=self.threads, **options)
                requests = ({"prompt": prompt, "tokens": tokens, "k": 0} for prompt in prompts)
                return [worker.ask("generate", **request)["tokens"] for request in requests]

            def divergence(worker: Worker) -> float:
                answer = worker.ask("quality", windows=str(windows), reference=str(folder))
                return fmean(text["kl"] for text in answer["texts"].values())

            model = self.models / theirs.model
            source = {"source": str(model / "model.gguf"), "precision": "F32"}
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

    def time(self, tokens: int, rounds: int, seconds: float) -> None:
        """Time every variant in interleaved rounds."""
        figures, prompts, variants = self.figures, self.prompts(), self._available()
        figures.machine = f"{_processor()}, {self.threads} threads"
        load = {"models": self.models, "threads": self.threads, "prompt": prompts[0][1]}
        lengths = () if self.draft else LENGTHS
        with (
            TemporaryDirectory(dir=self.cache) as data,  # pass costs are measured anew
            loaded(variants, partial(self._worker, data_home=data), **load, say=_say) as workers,
        ):
            measured = (workers, figures, prompts, tokens, rounds, seconds, lengths)
            for _ in measure_rounds(*measured):
                _say(f"{figures.name}: {len(figures.rounds)} of {rounds} rounds")
                self.write()
        self.write()

    def prompts(self) -> list[tuple[str, list[int]]]:
        """Return the kinds and token ids of the timed prompts."""
        prompts = self.reference.prompts("pair.jsonl" if self.draft else "prompts.jsonl")
        kinds = dict.fromkeys(kind for kind, _ in prompts)
        by_kind = ([prompt for prompt in prompts if prompt[0] == kind] for kind in kinds)
        return [prompt for some in by_kind for prompt in some[: self.num_prompts]]

    def _is_selected(self, variant: Variant) -> bool:
        if self.patterns:
            return any(fnmatchcase(variant.name, pattern) for pattern in self.patterns)
        return not variant.precision.endswith(EXTRA_GGUF_TYPES)

    def _available(self) -> list[Variant]:
        """Return the selected variants that were converted."""
        variants = self.figures.variants.values()
        return [v for v in variants if not v.reason and self._is_selected(v)]

    def _worker(self, variant: Variant, data_home: str | None = None) -> Worker:
        """Start a worker process of a variant's library.

        Args:
            variant: The variant.
            data_home: Folder instead of the user's data folder.
        """
        peer, environments = PEERS[variant.peer], self.cache / "environments"
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
    """Return the processor's name, its vector extensions and the number of cores."""
    info = Path("/proc/cpuinfo")
    flags = info.read_text("utf-8").split() if info.exists() else []
    named = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_vnni": "VNNI", "avx_vnni": "AVX-VNNI"}
    extensions = [label for flag, label in named.items() if flag in flags]
    return ", ".join([processor_name(), *extensions])


def _names(context: click.Context, option: click.Parameter, value: str) -> list[str]:
    """Parse comma-separated names."""
    return [name.strip() for name in value.split(",") if name.strip()]


def _paths(
    context: click.Context, option: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    """Parse values of the form NAME=PATH."""
    return dict(value.partition("=")[::2] for value in values)


@click.command()
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--draft", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="GGUF file of a draft model.",
)  # fmt: skip
@click.option(
    "--output", type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the results.  [default: docs/benchmarks; with --draft, pair in the cache]",
)  # fmt: skip
@click.option("--steps", default=",".join(STEPS), show_default=True, callback=_names)
@click.option(
    "--variants", "patterns", default="", callback=_names,
    help="Patterns of libraries with a precision, such as 'specedge int*,* Q8_0'.",
)  # fmt: skip
@click.option("--prompts", "num_prompts", type=click.IntRange(1), help="Prompts of each kind.")
@click.option(
    "--tokens", type=click.IntRange(2), help="New tokens per prompt.  [default: 48, pairs 64]"
)
@click.option("--minutes", default=60.0, show_default=True, help="Time limit of a file's rounds.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option(
    "--python", "pythons", multiple=True, metavar="LIBRARY=PATH", callback=_paths,
    help="Python of an environment with the library.",
)  # fmt: skip
@click.option(
    "--bundle", "bundles", multiple=True, metavar="VARIANT=FOLDER", callback=_paths,
    help="Existing bundle of a variant, such as 'specedge int8=FOLDER'.",
)  # fmt: skip
def main(
    files: tuple[Path, ...],
    draft: Path | None,
    output: Path | None,
    steps: list[str],
    tokens: int | None,
    rounds: int,
    minutes: float,
    **selection: Any,
) -> None:
    """Compare libraries on GGUF FILES, by default SmolLM2-135M-Instruct and Gemma-3-270M."""
    if unknown := {*steps} - {*STEPS}:
        raise click.UsageError(f"no step {', '.join(unknown)}; choose from {', '.join(STEPS)}")
    cache = Path(platformdirs.user_cache_dir("specedge")).absolute()
    if not files:
        files = tuple(map(real_weights.path_of, (real_weights.SMOLLM2, real_weights.GEMMA)))
    output = output or (cache / "pair" if draft else ROOT / "docs/benchmarks")
    for folder in (output, cache):
        folder.mkdir(parents=True, exist_ok=True)
    results = measuring.read(output / "figures.json")

    def write() -> None:
        fields = {"models": [figures.json() for figures in results]}
        (output / "figures.json").write_text(json.dumps(fields, indent=1) + "\n", "utf-8")
        (output / "README.md").write_text(reporting.page(results), "utf-8")
        (output / "chart.svg").write_text(reporting.chart(results[0]) + "\n", "utf-8")

    for file in files:
        name = NAMES.get(file.stem, file.stem)
        if name not in [figures.name for figures in results]:
            results.append(Figures(name))
        reference, draft_reference = (
            path and Reference(path.absolute(), cache / "models") for path in (file, draft)
        )
        figures = next(figures for figures in results if figures.name == name)
        comparison = Comparison(
            reference, figures, draft_reference, cache=cache, write=write, **selection
        )
        new_tokens = tokens or (64 if draft else 48)
        if "convert" in steps:
            comparison.convert()
        if "quality" in steps:
            comparison.measure_quality()
        if "kernels" in steps:
            comparison.measure_kernels(new_tokens)
        if "time" in steps:
            try:
                comparison.time(new_tokens, rounds, 60 * minutes)
            except (UnavailableError, WorkerError) as error:
                raise click.ClickException(str(error)) from error
    write()
    click.echo((output / "README.md").read_text("utf-8"))


def _say(line: str) -> None:
    click.echo(line, err=True)


if __name__ == "__main__":
    main()
