"""What a GPU gives: passes beside the time to read the weights, a round's parts, and the speed-up.

    python tools/gpu_bench.py prepare FOLDER --llama CHECKPOINT [--pair gpt2-xl ...]
    python tools/gpu_bench.py run FOLDER [--device cuda] [--report FILE]
    python tools/gpu_bench.py show FILE

Development only. `prepare` grows and exports the pairs, which takes no GPU and, with 8 billion
parameters, an hour: do it once, anywhere, and copy FOLDER. `run` is to take 8 minutes at most.
Weights are grown (docs/growing.md): times and memory are the shapes', text and acceptance are not.
CHECKPOINT is a small Llama, as tools/train_llama.py makes one. With PyTorch for CUDA installed,
transformers' assisted generation runs beside it. The report may be the one that tests on a GPU
write: `pytest -m gpu tests/gpu --gpu-report FILE`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from gpu_assisted import assisted
from gpu_bandwidth import bandwidth
from gpu_measuring import K, measure
from gpu_report import Report, read, tests_table

PAIRS = {
    "gpt2-xl": ("gpt2", "gpt2-xl"),
    "tinyllama-1.1b": ("smollm2-135m", "tinyllama-1.1b"),
    "llama-3.1-8b": ("llama-3.2-1b", "llama-3.1-8b"),
}
PRECISIONS = ("fp16", "int4")


@click.group()
def main() -> None:
    """Pairs for a GPU, and what it makes of them."""


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--gpt2", default="models/checkpoints/python-9m", show_default=True)
@click.option("--llama", help="A small trained Llama, as tools/train_llama.py makes one.")
@click.option(
    "--pair", "pairs", type=click.Choice(list(PAIRS)), multiple=True, help="[default: all]"
)
@click.option(
    "--noise", default=0.02, show_default=True, help="Of the drafts: see docs/growing.md."
)
def prepare(
    folder: Path, gpt2: str, llama: str | None, pairs: tuple[str, ...], noise: float
) -> None:
    """Grow and export pairs into FOLDER."""
    from specedge.exporter import export

    for name in pairs or PAIRS:
        place = folder / name
        source = gpt2 if name == "gpt2-xl" else llama
        if source is None:
            raise click.UsageError(f"{name} is grown from a Llama: give --llama CHECKPOINT")
        for role, shape in zip(("draft", "target"), PAIRS[name], strict=True):
            if not (place / role / "config.json").exists():
                command = [sys.executable, str(Path(__file__).with_name("grow.py")), source]
                command += [
                    str(place / role),
                    "--shape",
                    shape,
                    "--dtype",
                    "float16",
                    "--tokens",
                    "0",
                ]
                command += ["--noise", str(noise)] if role == "draft" else []
                subprocess.run(command, check=True)
        for precision in PRECISIONS:
            if not (place / precision).exists():
                export(
                    place / "draft", place / "target", place / precision,
                    precision=precision, draft_precision=precision, compute="fp16",
                )  # fmt: skip
                click.echo(place / precision)


@main.command()
@click.argument("folder", type=click.Path(exists=True, path_type=Path))
@click.option("--device", default="cuda", show_default=True)
@click.option(
    "--report", type=click.Path(path_type=Path), help="Put everything there, beside what it has."
)
def run(folder: Path, device: str, report: Path | None) -> None:
    """Measure the pairs of FOLDER and print a table."""
    kept = _report(report)
    speed = bandwidth(device)
    found: dict[str, Any] = {"bytes_per_second": speed, "pairs": {}}
    click.echo(f"{device}: {speed / 1e9:.0f} GB/s; milliseconds are medians")
    for place in sorted(p for p in folder.iterdir() if p.is_dir()):
        one = found["pairs"][place.name] = {
            precision: measure(place, precision, device, speed)
            for precision in PRECISIONS
            if (place / precision / "bundle.json").exists()
        }
        if device != "cpu":
            one["transformers"] = assisted(place, device)
        if kept is not None:  # what is measured is kept, whatever comes
            kept.put("bench", {device: found})
    click.echo(table(found))


@main.command()
@click.argument("report", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def show(report: Path) -> None:
    """Print what a report has, of tests and of measurements."""
    try:
        found = read(report)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    if tests := found.get("tests"):
        click.echo(tests_table(tests))
    for device, one in found.get("bench", {}).items():
        click.echo(f"{device}: {one['bytes_per_second'] / 1e9:.0f} GB/s")
        click.echo(table(one))


def _report(path: Path | None) -> Report | None:
    try:
        return None if path is None else Report(path)
    except ValueError as error:
        raise click.ClickException(str(error)) from error


def table(report: dict[str, Any]) -> str:
    """For people, and for docs/performance.md."""
    lines = [
        "| pair | target | bound | T=1 | T=2 | T=5 | eager T=1 | draft T=1 | host | plain | K = 4 |"
        " speed-up (predicted) | same text |",
        "|---" * 13 + "|",
    ]
    for pair, found in report["pairs"].items():
        for precision in PRECISIONS:
            one = found.get(precision)
            if not isinstance(one, dict):
                continue
            target, draft, asked = one["target"], one["draft"], one["requests"]
            at = {t: p["captured"]["median"] for t, p in target["passes"].items()}
            host = asked["shares"]["sampling"] + asked["shares"]["other"]
            lines.append(
                f"| {pair} | {precision} | {target['bound_milliseconds']:.2f} | {at['1']:.2f} | "
                f"{at['2']:.2f} | {at[str(K + 1)]:.2f} | "
                f"{target['passes']['1']['eager']['median']:.2f} | "
                f"{draft['passes']['1']['captured']['median']:.2f} | {host:.1%} | "
                f"{asked['plain']['median']:.2f} | {asked['speculative']['median']:.2f} | "
                f"{asked['speedup']:.2f} ({one['predicted_speedup']:.2f}) | "
                f"{asked['same_text']} of {asked['num_texts']} |"
            )
        if isinstance(other := found.get("transformers"), dict):
            plain, helped = other["plain"]["median"], other["assisted"]["median"]
            lines.append(
                f"| {pair} | transformers, float16 | | | | | | | | {plain:.2f} | {helped:.2f} | "
                f"{plain / helped:.2f} | |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
