"""Whether `auto` keeps its promises: never slower, near the best K, ahead where text switches.

    python tools/measure_planner.py [--bundle FOLDER] [--threads N] [--part PART] [--seeds N]

Against plain decoding the figure is the median over prompts of paired ratios of whole requests, two
of one between two of the other. Against every K it is the ratio of all requests' seconds together:
drawn texts differ by K, so pairs do not have the text in common, but each prompt's settings run in
turn. Both have a 95% interval from bootstrap over prompts. Seconds are the processor's, all threads
together: take one thread. Costs are tuned first. Development only.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from itertools import chain, product
from statistics import median
from typing import Any

import click

from measure_pair import prompts
from specedge import Pipeline, load
from specedge.runtime.backend.onnx_model import OrtModel
from specedge.runtime.backend.sessions import Device
from specedge.runtime.bench.measure import PLAIN_SETTING, Setting
from specedge.runtime.bench.tune import measure as tune

PARTS = ("bad", "good", "code", "switching")
KS = (1, 2, 3, 4, 6, 8)
AUTO = Setting("auto", "auto")
REPEATING = '    "{0}": {{"name": "{0}", "value": {1}, "kind": "entry", "checked": False}},\n'


def noise(pipeline: Pipeline, count: int, length: int = 96) -> list[list[int]]:
    """Prompts of tokens drawn alike from the whole vocabulary."""
    rng = random.Random(0)
    size = pipeline.bundle.target.vocab_size
    return [[rng.randrange(size) for _ in range(length)] for _ in range(count)]


def repeating(pipeline: Pipeline, count: int) -> list[list[int]]:
    """Prompts of a table of code that goes on as it began."""
    texts = [
        "".join(REPEATING.format(f"item_{i}", i) for i in range(n, n + 6)) for n in range(count)
    ]
    return [pipeline.tokenizer.encode("ENTRIES = {\n" + text).ids for text in texts]


def seconds(pipeline: Pipeline, prompt: list[int], length: int, **options: Any) -> float:
    """The processor's, of one request, a new token."""
    pipeline.forget()
    begin = time.process_time()
    one = pipeline.generate(prompt, length, ignore_eos=True, **options)
    return (time.process_time() - begin) / one.stats.num_new_tokens


def ratios(
    pipeline: Pipeline, texts: Sequence[list[int]], seeds: int, length: int, **both: Any
) -> list[tuple[float, float]]:
    """Seconds with `auto` and of plain decoding, each twice: one between both of the other."""
    found = []
    for i, (text, seed) in enumerate(product(texts, range(seeds))):
        took = {True: 0.0, False: 0.0}
        outer = bool(i % 2)
        for auto in (outer, not outer, not outer, outer):
            other = {} if auto else {"num_draft_tokens": 0}
            took[auto] += seconds(pipeline, text, length, seed=seed, **both | other)
        found.append((took[True], took[False]))
    return found


def sweep(
    pipeline: Pipeline, texts: Sequence[tuple[list[int], float]], settings: Sequence[Setting],
    seeds: int, group: int, length: int,
) -> dict[Setting, list[tuple[float, float]]]:  # fmt: skip
    """Of each setting the seconds with `auto`, and its own, of each `group` of prompts, which have
    a temperature each; all settings take turns on a prompt.
    """
    found = {setting: [(0.0, 0.0)] * (len(texts) // group) for setting in settings}
    for i, (at, seed) in enumerate(product(range(len(texts)), range(seeds))):
        (text, temperature), place = texts[at], at // group
        turn = [AUTO, *settings]
        first = i % len(turn)
        took = {
            one: seconds(pipeline, text, length, temperature=temperature, seed=seed, **one.options)
            for one in (turn[first:] + turn[:first])[:: -1 if i % 2 else 1]
        }
        for setting, pairs in found.items():
            ours, other = pairs[place]
            pairs[place] = ours + took[AUTO], other + took[setting]
    return found


def interval(
    pairs: Sequence[tuple[float, float]], figure: Callable[[Sequence[tuple[float, float]]], float]
) -> str:
    """A figure of the pairs, and its 95% interval."""
    rng = random.Random(0)
    drawn = sorted(figure(rng.choices(pairs, k=len(pairs))) for _ in range(2000))
    return f"{figure(pairs):.3f} ({drawn[50]:.3f} to {drawn[-51]:.3f})"


def middle(pairs: Sequence[tuple[float, float]]) -> float:
    """The median of the pairs' ratios."""
    return median(ours / other for ours, other in pairs)


def total(pairs: Sequence[tuple[float, float]]) -> float:
    """The ratio of all seconds together."""
    return sum(ours for ours, _ in pairs) / sum(other for _, other in pairs)


@click.command()
@click.option("--bundle", help="The bundle to measure. [default: as for specedge generate]")
@click.option("--threads", type=int, help="CPU threads.")
@click.option("--prompts", "count", default=24, show_default=True, help="At least 15.")
@click.option("--length", default=128, show_default=True)
@click.option(
    "--part",
    "parts",
    type=click.Choice(PARTS),
    multiple=True,
    default=PARTS,
    help="Bad or good drafts against plain decoding, or every K on code, or on texts that switch."
    " [default: all]",
)
@click.option("--seeds", default=1, show_default=True, help="Drawn texts of a prompt, or turns.")
@click.option("-k", "ks", type=int, multiple=True, default=KS, help="The sweeps' K. [default: all]")
def main(
    bundle: str | None,
    threads: int | None,
    count: int,
    length: int,
    parts: Sequence[str],
    seeds: int,
    ks: Sequence[int],
) -> None:
    """Measure auto against plain decoding and every fixed setting."""
    pipeline = load(bundle, threads=threads)
    tuned = tune(pipeline)
    if tuned.busy:
        click.echo("note: other programs kept the processor busy")
    pipeline.costs.table = tuned.costs
    # The same target under its own name: a draft as large as the target.
    bundle_ = pipeline.bundle
    twin = OrtModel(bundle_, bundle_.target, Device(threads=threads))
    large = Pipeline(bundle_, pipeline.tokenizer, pipeline.target, twin)
    large.costs.table = tune(large).costs
    code, nonsense, tables = (
        prompts(pipeline, count), noise(pipeline, count), repeating(pipeline, count)
    )  # fmt: skip
    cases: list[tuple[str, str, Pipeline, list[list[int]], dict[str, Any]]] = [
        ("bad", "plain, a control", pipeline, code, {"num_draft_tokens": 0}),
        ("bad", "random", pipeline, code, {"drafter": "random"}),
        ("bad", "draft = target", large, code, {"drafter": "model"}),
        ("good", "noise", pipeline, nonsense, {}),
        ("good", "code", pipeline, code, {}),
    ]
    for temperature, (part, name, one, texts, both) in product((0.0, 1.0), cases):
        if part in parts:
            found = ratios(one, texts, seeds, length, temperature=temperature, **both)
            click.echo(f"temperature {temperature:g}, {name}: {interval(found, middle)}")
    plans: list[tuple[str, list[tuple[list[list[int]], float]], tuple[str, ...]]] = [
        ("code", [(code, t)], ("model", "chain")) for t in (0.0, 1.0)
    ]
    plans += [
        ("switching", [(tables, first), (nonsense, second)], ("model", "lookup", "chain"))
        for first, second in ((0.0, 1.0), (0.0, 0.0), (1.0, 1.0))
    ]
    for part, sets, drafters in plans:
        if part in parts:
            settings = [PLAIN_SETTING, *(Setting(name, k) for name, k in product(drafters, ks))]
            groups = zip(*([(text, t) for text in texts] for texts, t in sets), strict=True)
            mixed = list(chain.from_iterable(groups))
            temperatures = [t for _, t in sets]
            swept = sweep(pipeline, mixed, settings, seeds, len(sets), length)
            shown = ", ".join(f"{t:g}" for t in temperatures)
            for setting, pairs in swept.items():
                what = f"{setting.drafter}, K = {setting.num_draft_tokens}"
                click.echo(f"{part} at {shown}, over {what}: {interval(pairs, total)}")


if __name__ == "__main__":
    main()
