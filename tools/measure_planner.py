"""Measure `auto` relative to plain decoding and to the best fixed setting.

    python tools/measure_planner.py [--bundle FOLDER] [--set SET]... [--temperature T]... [--tune]
        [--fixed DRAFTER:K]...

Times are of complete requests including prefill, on an idle machine. The requests of a prompt, one
for each setting, alternate round by round. Costs are measured at load with an empty data folder,
again for every few prompts, or by `specedge tune`. Ratios are of total seconds, with 95% confidence
intervals. The best fixed setting is the fastest over a whole set of prompts, which is unknown in
advance.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import geometric_mean

import click

from harness import (
    SETS,
    bundle_option,
    confidence_interval,
    prompt_tokens,
    threads_option,
    time_requests,
)
from specedge import Pipeline, load
from specedge.benchmarks.measure import PLAIN_SETTING, Setting
from specedge.benchmarks.tune import measure as tune
from specedge.runtime.drafters.registry import NEEDS_MODEL

AUTO = Setting("auto", "auto")
FIXED = ("model:1", "model:4", "suffix:2", "suffix:4")
MAX_LENGTH = 512  # maximum length of texts


def load_fresh(bundle: str | None, threads: int | None, tuned: bool, slots: int) -> Pipeline:
    """Load a bundle as if for the first time on this machine."""
    os.environ["XDG_DATA_HOME"] = tempfile.mkdtemp()
    pipeline = load(bundle, threads=threads, slots=slots, max_length=MAX_LENGTH)
    pipeline._chunk_length = MAX_LENGTH  # one thread reads all streams: none waits for a prefill
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
@click.option(
    "--fixed", multiple=True, metavar="DRAFTER:K", default=FIXED, show_default=True,
    callback=lambda _, __, values: [_setting(value) for value in values],
    help="Fixed settings to compare with.",
)  # fmt: skip
def main(
    bundle: str | None,
    threads: int | None,
    sets: Sequence[str],
    temperatures: Sequence[float],
    count: int,
    length: int,
    each: int,
    tuned: bool,
    fixed: list[Setting],
) -> None:
    """Measure auto against plain decoding and fixed settings."""
    path = os.fspath(Path(bundle).absolute()) if bundle else None
    settings = [PLAIN_SETTING, AUTO, *fixed]
    times: dict[tuple[float, str, Setting], list[float]] = {}
    pipeline = load_fresh(path, threads, tuned, len(settings))
    if pipeline.draft is None:
        settings = [s for s in settings if s.drafter not in NEEDS_MODEL]
    prompts = {name: prompt_tokens(pipeline, name, count) for name in sets}
    for i in range(count):
        if i and i % each == 0:
            pipeline.close()
            pipeline = load_fresh(path, threads, tuned, len(settings))
        for temperature, name in product(temperatures, sets):
            order = settings[i % len(settings) :] + settings[: i % len(settings)]
            requests = [{"temperature": temperature, "seed": i, **s.options} for s in order]
            seconds = time_requests(pipeline, prompts[name][i], length, requests)
            for setting, per_token in zip(order, seconds, strict=True):
                times.setdefault((temperature, name, setting), []).append(per_token)
    ratios: dict[str, list[float]] = {"plain": [], "the best fixed": []}
    for temperature, name in product(temperatures, sets):
        measured = {setting: times[temperature, name, setting] for setting in settings}
        auto, plain = measured.pop(AUTO), measured[PLAIN_SETTING]
        best = min(measured, key=lambda setting: sum(measured[setting]))
        over_plain, over_best = (
            confidence_interval(list(zip(auto, other, strict=True)))
            for other in (plain, measured[best])
        )
        for base, interval in zip(ratios, (over_plain, over_best), strict=True):
            ratios[base].append(interval[0])
        click.echo(
            f"temperature {temperature:g}, {name}: {_text(over_plain)} of plain; "
            f"{_text(over_best)} of the best fixed, {best.drafter} K = {best.num_draft_tokens} at "
            f"{sum(measured[best]) / sum(plain):.3f}" + ("; SLOWER" if over_plain[1] > 1.02 else "")
        )
    for base, values in ratios.items():
        click.echo(f"geometric mean over {base}: {geometric_mean(values):.3f}")


def _text(interval: tuple[float, float, float]) -> str:
    return "{:.3f} ({:.3f} to {:.3f})".format(*interval)


def _setting(text: str) -> Setting:
    """Return the setting of DRAFTER:K."""
    drafter, _, k = text.partition(":")
    if not k.isdigit():
        raise click.BadParameter(f"expected DRAFTER:K, got {text}")
    return Setting(drafter, int(k))


if __name__ == "__main__":
    main()
