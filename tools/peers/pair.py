"""Measure a real pair: Qwen2.5-Coder-0.5B-Instruct drafts for Qwen2.5-Coder-1.5B-Instruct.

    python tools/peers/pair.py measure [--variants NAME,...] [--steps STEP,...] [--output FOLDER]
    python tools/peers/pair.py render FOLDER...

`measure` converts both files for every library, and measures KL divergence from the float32 model,
acceptance by position, requests in interleaved rounds, and `auto` against fixed settings
(tools/measure_planner.py). It writes figures.json after every step, and resumes. A measurement can
be split by variants over several folders; ratios need runs of the same folder. `render` prints the
tables of all folders.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import click
import platformdirs

import compare
import measuring
from environments import PAIR_PEERS, UnavailableError
from measuring import AUTO, Acceptance, Figures, Run, Variant
from processes import WorkerError
from reference import Reference
from reporting import quality_cells, request_ms

sys.path.append(str(compare.ROOT / "tools"))

import real_weights
from harness import confidence_interval, table_header, table_row

STEPS = ("convert", "quality", "acceptance", "time", "planner")
VARIANTS = [f"{peer.name} {name}" for peer in PAIR_PEERS.values() for name in peer.precisions]
KINDS = ("code", "chat", "prose")
MODEL = [("model", k) for k in (2, 3, 4)]
DRAFTERS = {
    "specedge": [("suffix", 4), *MODEL, ("chain", 4)],
    "llamaserver": [*MODEL, ("lookup", 4), ("cache", 4)],
    "openvino": [*MODEL, ("lookup", 4)],
    "transformers": [*MODEL, ("lookup", 4)],
}
CONVERTED_CHECKPOINTS = ("openvino", "transformers")  # the others read GGUF files
BASELINE = "llamaserver file"
TEMPERATURES = (0.0, 0.8, 1.0)
LONGEST_DRAFT = 4  # of measured acceptance
PLANNER_SETTINGS = ("model:1", "model:2", "model:4", "suffix:2", "suffix:4", "chain:4")
Setting = tuple[str, str, int | str]  # variant, drafter and K


class PairComparison(compare.Comparison):
    """Comparison of one pair; figures are its only result."""

    known_peers = PAIR_PEERS
    lengths = ()

    def __init__(
        self,
        draft: Reference,
        names: list[str],
        bundles: dict[str, Path],
        num_prompts: int,
        output: Path,
        cache: Path,
        pythons: dict[str, str],
        threads: int,
    ) -> None:
        super().__init__(output, cache, list(PAIR_PEERS), [], pythons, threads)
        self.draft, self.names, self.num_prompts = draft, names, num_prompts
        self.bundles = bundles

    def variants(self) -> list[Variant]:
        """Return the selected variants, not yet converted."""
        variants = []
        for name in self.names:
            peer, _, precision = name.partition(" ")
            has_drafts = PAIR_PEERS[peer].has_drafts
            variants.append(
                Variant(peer, precision, has_drafts=has_drafts, drafters=DRAFTERS[peer])
            )
        return variants

    def convert(self, reference: Reference, figures: Figures) -> None:
        """Convert the variants without a bundle; drop results of models that were replaced."""
        models = {name: variant.model for name, variant in figures.variants.items()}
        for name, bundle in self.bundles.items():
            variant = next(v for v in self.variants() if v.name == name)
            variant.model = str(bundle.absolute())  # joined to the cache's path, it stays
            files = (path for path in bundle.rglob("*") if "weights" in path.name)
            variant.num_bytes = sum(path.stat().st_size for path in files)
            previous = figures.variants.get(name)
            if previous is None or previous.model != variant.model:
                figures.variants[name] = variant
        self.names, names = [n for n in self.names if n not in self.bundles], self.names
        super().convert(reference, figures)
        self.names = names
        for name, variant in figures.variants.items():
            if models.get(name) != variant.model:
                figures.acceptance = [row for row in figures.acceptance if row.variant != name]
                figures.planner.pop(name, None)
        self.write()

    def source(self, reference: Reference, variant: Variant) -> dict[str, str]:
        """Return the arguments of a variant's conversion."""
        if variant.peer in CONVERTED_CHECKPOINTS:
            draft = {"draft": str(self.draft.checkpoint)}
            return {**super().source(reference, variant), **draft}
        paths = {"gguf": str(reference.gguf), "draft": str(self.draft.gguf), "checkpoint": ""}
        return {**paths, "precision": variant.precision}

    def prompts(self, reference: Reference) -> list[tuple[str, list[int]]]:
        """Return the first prompts of each kind."""
        prompts = reference.prompts("pair.jsonl")
        return [
            prompt
            for kind in KINDS
            for prompt in [p for p in prompts if p[0] == kind][: self.num_prompts]
        ]

    def write(self) -> None:
        """Write the figures."""
        fields = {"models": [figures.json() for figures in self.figures]}
        (self.output / "figures.json").write_text(json.dumps(fields, indent=1) + "\n", "utf-8")

    def measure_acceptance(self, reference: Reference, figures: Figures, tokens: int) -> None:
        """Measure acceptance by position of specedge's variants that have none."""
        measured = {row.variant for row in figures.acceptance}
        for variant in self._available(figures):
            if variant.peer != "specedge" or variant.name in measured:
                continue
            click.echo(f"acceptance of {variant.name}", err=True)
            with self._worker(variant) as worker:
                worker.ask("load", model=str(self.models / variant.model), threads=self.threads)
                rows = []
                for temperature in TEMPERATURES:
                    for kind in KINDS:
                        prompts = [p for k, p in self.prompts(reference) if k == kind]
                        tested, accepted = [0] * LONGEST_DRAFT, [0] * LONGEST_DRAFT
                        for seed, prompt in enumerate(prompts):
                            answer = worker.ask(
                                "generate", prompt=prompt, tokens=tokens, k=LONGEST_DRAFT,
                                drafter="model", temperature=temperature, seed=seed,
                            )  # fmt: skip
                            for i in range(LONGEST_DRAFT):
                                tested[i] += answer["tested_by_position"][i]
                                accepted[i] += answer["accepted_by_position"][i]
                        rows.append(Acceptance(variant.name, kind, temperature, tested, accepted))
            figures.acceptance += rows
            self.write()

    def measure_planner(self, figures: Figures, tokens: int) -> None:
        """Measure `auto` of specedge's variants that have no rows."""
        script = compare.ROOT / "tools" / "measure_planner.py"
        sets = [word for kind in KINDS for word in ("--set", kind)]
        fixed = [word for setting in PLANNER_SETTINGS for word in ("--fixed", setting)]
        for variant in self._available(figures):
            if variant.peer != "specedge" or variant.name in figures.planner:
                continue
            click.echo(f"planner of {variant.name}", err=True)
            with TemporaryDirectory() as folder:
                rows = Path(folder, "rows.json")
                command = [
                    sys.executable, script, "--bundle", self.models / variant.model,
                    "--threads", self.threads, "--prompts", self.num_prompts, "--length", tokens,
                    "--temperature", 0, *sets, *fixed, "--json", rows,
                ]  # fmt: skip
                subprocess.run(list(map(str, command)), check=True, stdout=sys.stderr)
                figures.planner[variant.name] = json.loads(rows.read_text("utf-8"))
            self.write()

    def _available(self, figures: Figures) -> list[Variant]:
        """Return the selected variants that were converted."""
        variants = [figures.variants[name] for name in self.names if name in figures.variants]
        return [variant for variant in variants if variant.model and not variant.reason]


def page(models: Sequence[Figures]) -> str:
    """Return all tables in Markdown."""
    tables = (_requests, _acceptance, _quality, _planner)
    parts = ["\n".join(lines) for table in tables if len(lines := table(models)) > 1]
    return "\n\n".join(parts) + "\n"


def _requests(models: Sequence[Figures]) -> list[str]:
    """Return the table of times and ratios of every setting."""
    times = [f"{kind}, ms" for kind in KINDS]
    ratios = ("minima", "median of pairs", "total (95%)", "of llama.cpp's best", "accepted")
    lines = [table_header("", *times, "all, ms", *ratios)]
    for figures in models:
        runs: dict[Setting, list[Run]] = {}
        paired: dict[Setting, dict[tuple[int, int], float]] = {}
        for number, round_ in enumerate(figures.rounds):
            for run in round_.runs:
                setting = run.variant, run.drafter, run.k
                runs.setdefault(setting, []).append(run)
                paired.setdefault(setting, {})[number, run.prompt] = run.ms_per_token
        baselines = [setting for setting in runs if setting[0] == BASELINE]
        best = min(baselines, key=lambda s: request_ms(runs[s])[1], default=None)
        for setting, some in runs.items():
            variant, drafter, k = setting
            by_kind = ([r for r in some if figures.kinds[r.prompt] == kind] for kind in KINDS)
            plain = variant, AUTO, 0
            pairs = [(ms, paired[plain][at]) for at, ms in paired[setting].items()]
            ratio, low, high = confidence_interval(pairs)
            middle = median(ms / base for ms, base in pairs)
            drafted = sum(run.drafted or 0 for run in some)
            accepted = sum(run.accepted or 0 for run in some)
            other = [(ms, paired[best][at]) for at, ms in paired[setting].items()] if best else []
            label = f"{variant}, " + ("plain" if k == 0 else f"{drafter} K = {k}")
            lines.append(
                table_row(
                    label.replace("auto K = auto", "auto"),
                    *(_milliseconds(part) for part in by_kind),
                    _milliseconds(some),
                    f"{request_ms(some)[0] / request_ms(runs[plain])[0]:.2f}",
                    f"{middle:.2f}",
                    f"{ratio:.2f} ({low:.2f} to {high:.2f})",
                    f"{median(ms / base for ms, base in other):.2f}" if other else "",
                    f"{accepted / drafted:.0%}" if drafted else "",
                )
            )
    return lines


def _milliseconds(runs: Sequence[Run]) -> str:
    return "{:.1f} ({:.1f})".format(*request_ms(runs)) if runs else ""


def _acceptance(models: Sequence[Figures]) -> list[str]:
    """Return the table of acceptance rates by position."""
    positions = (f"position {i + 1}" for i in range(LONGEST_DRAFT))
    lines = [table_header("", "prompts", "temperature", *positions)]
    for row in (row for figures in models for row in figures.acceptance):
        pairs = zip(row.accepted, row.tested, strict=True)
        rates = (f"{accepted / tested:.2f}" if tested else "" for accepted, tested in pairs)
        lines.append(table_row(row.variant, row.kind, f"{row.temperature:g}", *rates))
    return lines


def _quality(models: Sequence[Figures]) -> list[str]:
    """Return the table of sizes and KL divergences."""
    lines = [table_header("", "MB", "KL prose / chat / code", "mean KL", "top-1", "perplexity")]
    variants = [v for figures in models for v in figures.variants.values() if v.quality]
    for variant in variants:
        size = f"{variant.num_bytes / 1e6:.0f}"
        lines.append(table_row(variant.name, size, *quality_cells(variant)))
    return lines


def _planner(models: Sequence[Figures]) -> list[str]:
    """Return the table of `auto` against plain decoding and the best fixed setting."""
    columns = ("prompts", "temperature", "auto over plain", "auto over best fixed", "best fixed")
    lines = [table_header("", *columns)]
    for figures in models:
        for name, rows in figures.planner.items():
            for row in rows:
                ratios = (row["ratio"], row["of_best"])
                cells = (f"{ratio:.3f} ({low:.3f} to {high:.3f})" for ratio, low, high in ratios)
                lines.append(
                    table_row(name, row["set"], f"{row['temperature']:g}", *cells, row["best"])
                )
    return lines


def _bundles(_: Any, __: Any, values: tuple[str, ...]) -> dict[str, Path]:
    bundles = {name: Path(path) for name, _, path in (v.partition("=") for v in values)}
    for name, path in bundles.items():
        if name not in VARIANTS or not name.startswith("specedge"):
            raise click.BadParameter(f"no variant {name} of specedge")
        if not (path / "bundle.json").exists():
            raise click.BadParameter(f"{path} is not a bundle")
    return bundles


@click.group()
def main() -> None:
    """Measure a pair of real models and render the tables."""


@main.command()
@click.option("--target", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--draft", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@compare.names_option("--variants", VARIANTS)
@compare.names_option("--steps", STEPS)
@click.option(
    "--bundle", "bundles", multiple=True, metavar="VARIANT=FOLDER", callback=_bundles,
    help="Existing bundle of a variant, such as 'specedge int8=FOLDER'.",
)  # fmt: skip
@click.option(
    "--output", type=click.Path(file_okay=False, path_type=Path),
    help="Folder of figures.json.  [default: pair in the cache]",
)  # fmt: skip
@click.option("--prompts", "num_prompts", default=4, show_default=True, help="Of each kind.")
@click.option("--tokens", type=click.IntRange(2), default=64, show_default=True)
@compare.timing_options
def measure(
    target: Path | None,
    draft: Path | None,
    variants: list[str],
    steps: list[str],
    bundles: dict[str, Path],
    output: Path | None,
    num_prompts: int,
    tokens: int,
    rounds: int,
    minutes: float,
    threads: int,
    pythons: dict[str, str],
) -> None:
    """Measure the variants; files other than Qwen's are for a trial."""
    cache = Path(platformdirs.user_cache_dir("specedge"))
    reference, drafts = (
        Reference((file or real_weights.path_of(weights)).absolute(), cache / "models")
        for file, weights in (
            (target, real_weights.QWEN_TARGET),
            (draft, real_weights.QWEN_DRAFT),
        )
    )
    names = list(dict.fromkeys([*variants, *bundles]))
    comparison = PairComparison(
        drafts, names, bundles, num_prompts, output or cache / "pair", cache, pythons, threads
    )
    figures = comparison.figures_of(reference.gguf)
    if "convert" in steps:
        comparison.convert(reference, figures)
    if "quality" in steps:
        comparison.measure_quality(reference, figures)
    try:
        if "acceptance" in steps:
            comparison.measure_acceptance(reference, figures, tokens)
        if "time" in steps:
            comparison.time(reference, figures, tokens, rounds, 60 * minutes)
        if "planner" in steps:
            comparison.measure_planner(figures, tokens)
    except (UnavailableError, WorkerError, subprocess.CalledProcessError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(page([figures]))


@main.command()
@click.argument(
    "folders", nargs=-1, required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)  # fmt: skip
def render(folders: tuple[Path, ...]) -> None:
    """Print the tables of measurements in FOLDERS as Markdown."""
    models = [figures for f in folders for figures in measuring.read(f / "figures.json")]
    if not models:
        raise click.ClickException("no figures.json in these folders")
    click.echo(page(models))


if __name__ == "__main__":
    main()
