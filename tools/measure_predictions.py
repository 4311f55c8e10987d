"""How well the costs of `specedge tune` and other prompts' acceptance predict speed-ups.

    python tools/measure_predictions.py [--bundle FOLDER] [--threads N] [--temperature T]

Prompts are two places of each held-out module. Acceptance is counted on the first places; on the
second ones the speed-up is measured and predicted. A machine's speed, and the ratios of its costs,
change by the minute, so costs are tuned anew before every few prompts. Each run has other seeds;
the last lines are medians over runs. Development only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import median

import click

from held_out_prompts import held_out_prompts
from specedge import Pipeline, load
from specedge.benchmarks.measure import Prompt, Run, Setting, measure
from specedge.benchmarks.predictions import known_chances, predicted_speedup
from specedge.benchmarks.totals import overall_speedup, total_of
from specedge.benchmarks.tune import measure as tune
from specedge.runtime.planning.cost_table import Costs

KS = range(1, 9)
TOGETHER = 8  # prompts between two tunings


Text = tuple[int, Costs]  # how many tokens it has, and the costs at that time


def runs(
    pipeline: Pipeline, prompts: list[Prompt], seed: int, temperature: float, length: int
) -> Iterator[tuple[Run, Text]]:
    """Every request, with prompts numbered as they are."""
    settings = [Setting("model", k) for k in KS]
    for start in range(0, len(prompts), TOGETHER):
        tuned = tune(pipeline)
        if tuned.busy:
            click.echo("note: other programs kept the processor busy")
        some = prompts[start : start + TOGETHER]
        options = {"temperature": temperature, "max_new_tokens": length, "seed": seed + start}
        measured = measure(pipeline, some, settings, 1, **options)
        for run in measured.runs:
            new = measured.texts[run.setting, run.prompt].kept
            middle = len(some[run.prompt].tokens) + new // 2
            costs = tuned.costs.at(middle, temperature == 0)
            yield replace(run, prompt=start + run.prompt), (new, costs)


def compared(found: list[tuple[Run, Text]], greedy: bool) -> Iterator[tuple[int, float, float]]:
    """For each K the speed-up on the second places: measured, and predicted."""
    for k in KS:
        here = [(run, text) for run, text in found if run.setting == Setting("model", k)]
        known = total_of([run for run, _ in here if run.prompt % 2 == 0])
        rest = [(run, text) for run, text in here if run.prompt % 2]
        chances = known_chances(known.acceptance_by_position, known.accepted_over_tested, k)
        texts = {run.prompt: text for run, text in rest}
        yield (
            k,
            overall_speedup([run for run, _ in rest]),
            predicted_speedup(chances, texts.values(), greedy),
        )


@click.command()
@click.option("--bundle", help="The bundle to measure. [default: as for specedge generate]")
@click.option("--threads", type=int, help="CPU threads.")
@click.option("--temperature", default=1.0, show_default=True)
@click.option("--modules", "count", default=40, show_default=True)
@click.option("--length", default=128, show_default=True)
@click.option("--runs", "num_runs", default=3, show_default=True)
def main(
    bundle: str | None,
    threads: int | None,
    temperature: float,
    count: int,
    length: int,
    num_runs: int,
) -> None:
    """Print measured and predicted speed-up for each K."""
    pipeline = load(bundle, threads=threads)
    encode = pipeline.tokenizer.encode
    prompts = [
        Prompt("held out", text, encode(text).ids)
        for text in held_out_prompts(pipeline.tokenizer, count)
    ]
    errors: dict[int, list[float]] = {k: [] for k in KS}
    for i in range(num_runs):
        found = list(runs(pipeline, prompts, 1000 * i, temperature, length))
        click.echo(f"run {i + 1}, {len(prompts)} prompts: K, measured, predicted, error")
        for k, measured, expected in compared(found, temperature == 0):
            errors[k].append(expected / measured - 1)
            click.echo(f"{k} {measured:.3f} {expected:.3f} {errors[k][-1]:+.1%}")
    click.echo("K, median error")
    for k, some in errors.items():
        click.echo(f"{k} {median(some):+.1%}")


if __name__ == "__main__":
    main()
