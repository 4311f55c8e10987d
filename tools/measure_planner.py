"""Whether `auto` keeps its promises: never slower, near the best K, ahead where text switches.

    python tools/measure_planner.py [--bundle FOLDER] [--threads N] [--part PART] [--output FILE]

For every setting the figure is the median over prompts of paired ratios of whole requests, in
alternating order, with a 95% interval from bootstrap. Costs are tuned first. Development only.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import click

from measure_pair import prompts
from specedge import Pipeline, load
from specedge.runtime.ort import OrtModel
from specedge.runtime.tuning import measure as tune

PARTS = ("plain", "code", "switching")
KS = (1, 2, 4, 6, 8)
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
    """Of one request, a new token."""
    one = pipeline.generate(prompt, length, seed=1, ignore_eos=True, **options)
    return (one.stats.prefill_seconds + one.stats.decode_seconds) / one.stats.num_new_tokens


def ratios(
    pipeline: Pipeline, texts: Sequence[list[int]], length: int, other: dict[str, Any], group: int,
    **both: Any,
) -> list[float]:  # fmt: skip
    """Seconds of `auto` over those of the other setting, in turn; `group` prompts are one pair."""
    took: dict[bool, list[float]] = {True: [], False: []}
    for i, text in enumerate(texts):
        for auto in (True, False) if i % 2 else (False, True):
            took[auto].append(seconds(pipeline, text, length, **both | ({} if auto else other)))
    starts = range(0, len(texts), group)
    return [sum(took[True][i : i + group]) / sum(took[False][i : i + group]) for i in starts]


def interval(found: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the 95% interval of it."""
    rng = random.Random(0)
    medians = sorted(median(rng.choices(found, k=len(found))) for _ in range(2000))
    return median(found), medians[50], medians[-51]


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
    help="Against plain decoding, or every K on code, or on texts that switch. [default: all]",
)
@click.option("--output", type=click.Path(path_type=Path), help="Write the figures as JSON.")
def main(
    bundle: str | None,
    threads: int | None,
    count: int,
    length: int,
    parts: Sequence[str],
    output: Path | None,
) -> None:
    """Measure auto against plain decoding and every fixed setting."""
    pipeline = load(bundle, threads=threads)
    tuned = tune(pipeline)
    if tuned.busy:
        click.echo("note: other programs kept the processor busy")
    pipeline.costs.table = tuned.costs
    # The same target under its own name: a draft as large as the target.
    bundle_ = pipeline.bundle
    twin = OrtModel(bundle_, bundle_.target, "cpu", threads, True)
    large = Pipeline(bundle_, pipeline.tokenizer, pipeline.target, twin)
    large.costs.table = tune(large).costs
    code, nonsense, tables = (
        prompts(pipeline, count), noise(pipeline, count), repeating(pipeline, count)
    )  # fmt: skip
    rows: list[dict[str, Any]] = []

    def show(
        name: str, one: Pipeline, texts: list[list[int]], other: dict[str, Any], group: int = 1,
        **both: Any,
    ) -> None:  # fmt: skip
        middle, low, high = interval(ratios(one, texts, length, other, group, **both))
        rows.append({"name": name, "other": other, "ratio": middle, "interval": [low, high]} | both)
        click.echo(f"{name} {both}, auto over {other}: {middle:.3f} ({low:.3f} to {high:.3f})")

    plain = {"num_draft_tokens": 0}
    if "plain" in parts:
        for temperature in (0.0, 1.0):
            show("plain", pipeline, code, plain, temperature=temperature, **plain)
            show("random", pipeline, code, plain, drafter="random", temperature=temperature)
            show("draft = target", large, code, plain, drafter="model", temperature=temperature)
            show("noise", pipeline, nonsense, plain, temperature=temperature)
            show("code", pipeline, code, plain, temperature=temperature)
    mixed = [text for pair in zip(tables, nonsense, strict=True) for text in pair]
    for part, texts, group, drafters in (
        ("code", code, 1, ("model", "chain")),
        ("switching", mixed, 2, ("model", "lookup", "chain")),
    ):
        settings = [("model", 0), *product(drafters, KS)] if part in parts else []
        for temperature, (drafter, k) in product((0.0, 1.0), settings):
            other = {"num_draft_tokens": k, "drafter": drafter}
            show(part, pipeline, texts, other, group, temperature=temperature)
    if output:
        output.write_text(json.dumps({"prompts": count, "new_tokens": length, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
