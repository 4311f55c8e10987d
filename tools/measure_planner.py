"""Measure `auto` relative to plain decoding and to the best fixed setting.

    python tools/measure_planner.py [--bundle FOLDER] [--set SET]... [--temperature T]... [--tune]

Times are of complete requests including prefill, on an idle machine. Settings alternate for each
prompt, `auto` and plain decoding before and after the others. Costs are measured at load with an
empty data folder, again for every few prompts, or by `specedge tune`. Ratios are of total seconds,
with 95% confidence intervals. The best fixed setting is the fastest over a whole set of prompts,
which is unknown in advance.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from itertools import product
from math import exp, log
from pathlib import Path
from statistics import fmean

import click

from harness import (
    SETS,
    bundle_option,
    confidence_interval,
    prompt_tokens,
    threads_option,
    time_request,
)
from specedge import Pipeline, load
from specedge.benchmarks.measure import PLAIN_SETTING, Setting
from specedge.benchmarks.tune import measure as tune

AUTO = Setting("auto", "auto")
FIXED = [Setting(name, k) for name, k in (("model", 1), ("model", 4), ("suffix", 2), ("suffix", 4))]


def load_fresh(bundle: str | None, threads: int | None, tuned: bool) -> Pipeline:
    """Load a bundle as if for the first time on this machine."""
    os.environ["XDG_DATA_HOME"] = tempfile.mkdtemp()
    pipeline = load(bundle, threads=threads)
    if tuned:
        pipeline.costs.table = tune(pipeline).costs
    return pipeline


@click.command()
@bundle_option
@threads_option
@click.option(
    "--set",
    "sets",
    type=click.Choice(SETS),
    multiple=True,
    default=("noise", "code", "prose"),
    show_default=True,
)
@click.option(
    "--temperature", "temperatures", type=float, multiple=True, default=(0.0, 0.8, 1.0, 1.5)
)
@click.option("--prompts", "count", default=10, show_default=True, help="Prompts of each set.")
@click.option("--length", default=128, show_default=True, help="New tokens of a request.")
@click.option("--each", default=4, show_default=True, help="Prompts between two loads.")
@click.option("--tune", "tuned", is_flag=True, help="Tune after each load.")
@click.option("--fixed/--no-fixed", default=True, help="Run the fixed settings, too.")
def main(
    bundle: str | None,
    threads: int | None,
    sets: Sequence[str],
    temperatures: Sequence[float],
    count: int,
    length: int,
    each: int,
    tuned: bool,
    fixed: bool,
) -> None:
    """Measure auto against plain decoding and fixed settings."""
    path = os.fspath(Path(bundle).absolute()) if bundle else None
    settings = FIXED if fixed else []
    times: dict[tuple[float, str, Setting], list[float]] = {}
    pipeline = load_fresh(path, threads, tuned)
    prompts = {name: prompt_tokens(pipeline, name, count) for name in sets}
    for i in range(count):
        if i and i % each == 0:
            pipeline.close()
            pipeline = load_fresh(path, threads, tuned)
        for temperature, name in product(temperatures, sets):
            ends = [AUTO, PLAIN_SETTING] if i % 2 else [PLAIN_SETTING, AUTO]
            others = settings[i % 4 :] + settings[: i % 4]
            for setting in (*ends, *others, *ends[::-1]):
                options = {"temperature": temperature, "seed": i, **setting.options}
                seconds = time_request(pipeline, prompts[name][i], length, **options)
                times.setdefault((temperature, name, setting), []).append(seconds)
    ratios, over_best = [], []
    for temperature, name in product(temperatures, sets):
        auto, plain = (times[temperature, name, setting] for setting in (AUTO, PLAIN_SETTING))
        pairs = [(sum(auto[i : i + 2]), sum(plain[i : i + 2])) for i in range(0, len(auto), 2)]
        ratio, low, high = confidence_interval(pairs)
        ratios.append(ratio)
        line = (
            f"temperature {temperature:g}, {name}: {ratio:.3f} ({low:.3f} to {high:.3f}) of plain"
        )
        if settings:
            sums = {setting: 2 * sum(times[temperature, name, setting]) for setting in settings}
            sums[PLAIN_SETTING] = sum(plain)
            best = min(sums, key=lambda setting: sums[setting])
            over_best.append(sum(auto) / sums[best])
            line += (
                f"; {over_best[-1]:.3f} of the best fixed, {best.drafter} K ="
                f" {best.num_draft_tokens} at {sums[best] / sum(plain):.3f}"
            )
        click.echo(line + ("; SLOWER" if low > 1.02 else ""))
    click.echo(f"geometric mean over plain: {exp(fmean(map(log, ratios))):.3f}")
    if over_best:
        click.echo(f"geometric mean over the best fixed: {exp(fmean(map(log, over_best))):.3f}")


if __name__ == "__main__":
    main()
