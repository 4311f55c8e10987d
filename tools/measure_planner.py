"""Benchmark of `auto`: never slower than plain decoding, and near the best fixed setting.

    python tools/measure_planner.py [--bundle FOLDER] [--set SET]... [--temperature T]... [--tune]

Whole requests, prefill included, by the wall clock on a quiet machine. Each prompt's settings run
in turn, `auto` and plain decoding twice, one between two of the other. Costs are measured at load
in an empty data folder, anew for every few prompts, as a first user has them, or by `specedge
tune`. A figure is the ratio of all seconds together with a 95% interval from bootstrap over
prompts. The best fixed setting is the one that was the fastest over the whole set, which nobody
knows before. Development only.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from math import exp, log
from pathlib import Path
from statistics import fmean

import click

from measure_pair import prompts
from specedge import Pipeline, load
from specedge.benchmarks.measure import PLAIN_SETTING, Setting
from specedge.benchmarks.prompts import SETS
from specedge.benchmarks.tune import measure as tune

AUTO = Setting("auto", "auto")
FIXED = [Setting(name, k) for name, k in (("model", 1), ("model", 4), ("suffix", 2), ("suffix", 4))]
QUESTIONS = (
    "What is the difference between a virus and a bacterium?",
    "Write a short email to my landlord about the broken heating.",
    "Explain recursion to a ten-year-old.",
    "Give me five ideas for a cheap weekend trip with children.",
    "Summarize the plot of Romeo and Juliet in four sentences.",
    "How do I make a simple tomato soup?",
    "Write a Python function that returns the n-th Fibonacci number and explain it.",
    "List the planets of the solar system with one fact about each.",
    "What should I consider before I buy a used car?",
    "Translate 'Where is the train station?' into French, Spanish and German.",
)
PROSE = (
    "It was late in the autumn, and the rain had not stopped for a week. She looked out of the",
    "The history of the city began when the first settlers came over the mountains and",
    "Most people who keep bees will tell you that the hardest month is not January but",
    "In the years before the railway came, the valley had been",
)


def prompt_tokens(pipeline: Pipeline, name: str, count: int) -> list[list[int]]:
    """Return the prompts of a set."""
    if name == "noise":
        rng, size = random.Random(0), pipeline.bundle.target.vocab_size
        return [[rng.randrange(size) for _ in range(96)] for _ in range(count)]
    if name == "chat":
        chats = [[{"role": "user", "content": text}] for text in QUESTIONS[:count]]
        return [pipeline.prompts.chat_tokens(chat, False) for chat in chats]
    if name == "code":
        return prompts(pipeline, count)
    return [pipeline.tokenizer.encode(text).ids for text in (*SETS["prose"], *PROSE)[:count]]


def seconds(
    pipeline: Pipeline, prompt: list[int], length: int, temperature: float, seed: int, one: Setting
) -> float:
    """Return the seconds of a new token of one request."""
    pipeline.forget()
    begin = time.perf_counter()
    run = pipeline.generate(prompt, length, temperature, seed=seed, ignore_eos=True, **one.options)
    return (time.perf_counter() - begin) / run.stats.num_new_tokens


def interval(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return the ratio of all seconds together, and the ends of its 95% interval."""

    def ratio(some: Sequence[tuple[float, float]]) -> float:
        return sum(ours for ours, _ in some) / sum(other for _, other in some)

    rng = random.Random(0)
    drawn = sorted(ratio(rng.choices(pairs, k=len(pairs))) for _ in range(2000))
    return ratio(pairs), drawn[50], drawn[-51]


def fresh(bundle: str | None, threads: int | None, tuned: bool) -> Pipeline:
    """Load a bundle as if for the first time on this machine."""
    os.environ["XDG_DATA_HOME"] = tempfile.mkdtemp()
    pipeline = load(bundle, threads=threads)
    if tuned:
        pipeline.costs.table = tune(pipeline).costs
    return pipeline


@click.command()
@click.option("--bundle", help="The bundle to measure. [default: as for specedge generate]")
@click.option("--threads", type=int, help="CPU threads.")
@click.option("--set", "sets", multiple=True, default=("noise", "code", "prose"), show_default=True)
@click.option(
    "--temperature", "temperatures", type=float, multiple=True, default=(0.0, 0.8, 1.0, 1.5)
)
@click.option("--prompts", "count", default=10, show_default=True, help="Of each set.")
@click.option("--length", default=128, show_default=True)
@click.option("--each", default=4, show_default=True, help="Prompts between two loads.")
@click.option("--tune", "tuned", is_flag=True, help="Tune after each load.")
@click.option("--fixed/--no-fixed", default=True, help="Run fixed settings, too.")
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
    took: dict[tuple[float, str, Setting], list[float]] = {}
    pipeline = fresh(path, threads, tuned)
    texts = {name: prompt_tokens(pipeline, name, count) for name in sets}
    for i in range(count):
        if i and i % each == 0:
            pipeline.close()
            pipeline = fresh(path, threads, tuned)
        for temperature, name in product(temperatures, sets):
            ends = [AUTO, PLAIN_SETTING] if i % 2 else [PLAIN_SETTING, AUTO]
            others = settings[i % 4 :] + settings[: i % 4]
            for one in (*ends, *others, *ends[::-1]):
                spent = seconds(pipeline, texts[name][i], length, temperature, i, one)
                took.setdefault((temperature, name, one), []).append(spent)
    ratios, over_best = [], []
    for temperature, name in product(temperatures, sets):
        ours, plain = (took[temperature, name, one] for one in (AUTO, PLAIN_SETTING))
        pairs = [(sum(ours[i : i + 2]), sum(plain[i : i + 2])) for i in range(0, len(ours), 2)]
        ratio, low, high = interval(pairs)
        line = (
            f"temperature {temperature:g}, {name}: {ratio:.3f} ({low:.3f} to {high:.3f}) of plain"
        )
        ratios.append(ratio)
        fixed_sums = {one: 2 * sum(took[temperature, name, one]) for one in settings}
        if fixed_sums:
            fixed_sums[PLAIN_SETTING] = sum(plain)
            best = min(fixed_sums, key=lambda one: fixed_sums[one])
            over_best.append(sum(ours) / fixed_sums[best])
            line += (
                f"; {over_best[-1]:.3f} of the best fixed, {best.drafter} K ="
                f" {best.num_draft_tokens} at {fixed_sums[best] / sum(plain):.3f}"
            )
        click.echo(line + ("; SLOWER" if low > 1.02 else ""))
    click.echo(f"geometric mean over plain: {exp(fmean(map(log, ratios))):.3f}")
    if over_best:
        click.echo(f"geometric mean over the best fixed: {exp(fmean(map(log, over_best))):.3f}")


if __name__ == "__main__":
    main()
