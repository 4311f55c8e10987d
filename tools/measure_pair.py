"""Acceptance and speed of a pair on text that it was not trained on. Development only.

    python tools/measure_pair.py [--bundle FOLDER] [--threads N] [--output FILE]

Prompts are taken from the held-out modules of the running Python's library. Speed-ups are medians
of paired ratios, plain and speculative decoding in alternating order, prompt by prompt.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from statistics import median
from typing import Any

import click

from corpus import held_out, library_files
from specedge import Pipeline, load

PROMPT_LENGTH = 96


def prompts(pipeline: Pipeline, count: int) -> list[list[int]]:
    """The tokens up to the middle of each held-out module that is long enough."""
    found = []
    for name, text in library_files():
        tokens = pipeline.tokenizer.encode(text).ids if held_out(name) else []
        if len(tokens) >= 2 * PROMPT_LENGTH:
            middle = len(tokens) // 2
            found.append(tokens[middle - PROMPT_LENGTH : middle])
    return found[:count]


def measure(
    pipeline: Pipeline, texts: list[list[int]], k: int, temperature: float, length: int
) -> dict[str, Any]:
    """One setting over all prompts."""
    options: dict[str, Any] = {
        "max_new_tokens": length,
        "temperature": temperature,
        "ignore_eos": True,
    }
    ratios, total = [], {"tokens": 0, "rounds": 0, "accepted": 0, "tested": 0}
    for i, text in enumerate(texts):
        seconds = {}
        for plain in (True, False) if i % 2 else (False, True):
            pipeline.forget()
            one = pipeline.generate(text, seed=i, num_draft_tokens=0 if plain else k, **options)
            seconds[plain] = one.stats.prefill_seconds + one.stats.decode_seconds
            if not plain:
                total["tokens"] += one.stats.num_new_tokens
                total["rounds"] += one.stats.num_rounds
                total["accepted"] += one.stats.num_accepted
                total["tested"] += one.stats.num_tested
        ratios.append(seconds[True] / seconds[False])
    return {
        "num_draft_tokens": k,
        "temperature": temperature,
        "tokens_per_round": total["tokens"] / total["rounds"],
        "accepted_over_tested": total["accepted"] / total["tested"],
        "speedup": median(ratios),
        "speedup_range": [min(ratios), max(ratios)],
    }


@click.command()
@click.option("--bundle", help="The bundle to measure. [default: as for specedge generate]")
@click.option("--threads", type=int, help="CPU threads.")
@click.option("--prompts", "count", default=40, show_default=True)
@click.option("--length", default=128, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Write the figures as JSON.")
def main(
    bundle: str | None, threads: int | None, count: int, length: int, output: Path | None
) -> None:
    """Measure tokens a round, acceptance and speed-up on held-out modules."""
    pipeline = load(bundle, threads=threads)
    texts = prompts(pipeline, count)
    pipeline.generate(texts[0], max_new_tokens=32)
    rows = []
    for temperature in (0.0, 1.0):
        for k in (1, 2, 4, 6, 8):
            rows.append(row := measure(pipeline, texts, k, temperature, length))
            click.echo(
                f"T = {temperature:g}, K = {k}: {row['tokens_per_round']:.2f} tokens a round, "
                f"alpha {row['accepted_over_tested']:.3f}, speed-up {row['speedup']:.2f}"
            )
    if output:
        facts = {"python": platform.python_version(), "prompts": len(texts), "new_tokens": length}
        output.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
