"""Measure near-ties: the greedy texts that they change, and the cost of exact resolution.

    python tools/measure_exact.py [--bundle FOLDER]

Prompts are held-out modules of the running Python's library. For each K plain decoding, speculative
decoding and exact speculative decoding alternate; speed-ups are medians of paired ratios.
"""

from __future__ import annotations

from collections import Counter
from statistics import median

import click

from harness import bundle_option, prompt_tokens, table_header, table_row, threads_option
from specedge import Pipeline, load

COUNTS = ("changed texts", "of these listed", "exact differs", "near-ties", "exact passes")


def measure(
    pipeline: Pipeline, prompts: list[list[int]], k: int, length: int
) -> tuple[Counter[str], dict[str, float]]:
    """Return counts over all prompts and the median speed-ups of one K."""
    options = {"plain": {"num_draft_tokens": 0}, "speculative": {"num_draft_tokens": k}}
    options["exact"] = {"num_draft_tokens": k, "exact": True}
    counts: Counter[str] = Counter()
    ratios: dict[str, list[float]] = {"speculative": [], "exact": []}
    for i, prompt in enumerate(prompts):
        results = {}
        for name in list(options) if i % 2 else list(options)[::-1]:
            pipeline.forget()
            results[name] = pipeline.generate(prompt, length, ignore_eos=True, **options[name])
        plain, speculative, exact = (results[name] for name in options)
        pairs = enumerate(zip(plain.tokens, speculative.tokens, strict=True))
        first = next((position for position, (a, b) in pairs if a != b), None)
        listed = [tie.position for tie in speculative.near_ties]
        row = (first is not None, first in listed, exact.tokens != plain.tokens)
        counts.update(dict(zip(COUNTS, (*map(int, row), len(exact.near_ties)), strict=False)))
        counts[COUNTS[-1]] += exact.stats.num_exact_passes
        for name, values in ratios.items():
            values.append(plain.stats.decode_seconds / results[name].stats.decode_seconds)
    return counts, {name: median(values) for name, values in ratios.items()}


@click.command()
@bundle_option
@threads_option
@click.option("--ops", default="auto", show_default=True, help="Graph variant to run.")
@click.option("--k", "draft_lengths", type=int, multiple=True, default=(1, 2, 4, 8))
@click.option("--prompts", "count", default=50, show_default=True)
@click.option("--length", default=200, show_default=True, help="New tokens of a request.")
def main(
    bundle: str | None,
    threads: int | None,
    ops: str,
    draft_lengths: tuple[int, ...],
    count: int,
    length: int,
) -> None:
    """Count near-ties and texts that differ from plain decoding's, with and without exact."""
    pipeline = load(bundle, threads=threads, ops=ops)
    prompts = prompt_tokens(pipeline, "code", count)
    pipeline.generate(prompts[0], 32)
    click.echo(table_header("K", *COUNTS, "speed-up", "speed-up, exact"))
    for k in draft_lengths:
        counts, speedups = measure(pipeline, prompts, k, length)
        cells = (*(counts[name] for name in COUNTS), *(f"{x:.2f}" for x in speedups.values()))
        click.echo(table_row(k, *cells))


if __name__ == "__main__":
    main()
