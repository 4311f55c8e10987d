"""What each drafter gains on text that nothing was trained on. Development only.

    python tools/measure_drafters.py [--bundle FOLDER] [--threads N] [--output FILE]

The same held-out prompts as measure_pair.py, as they are and repeated: twice, and its beginning
again. The n-gram tables are counted from the modules that are not held out. For each prompt all
drafters run between two plain runs, whose mean is what their seconds are compared with.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import click

from corpus import held_out, library_files
from measure_pair import PROMPT_LENGTH, prompts
from specedge import Pipeline, load
from specedge.runtime.drafters import ngram_files, ngrams
from specedge.runtime.requests.stats import Stats

DRAFTERS = ("model", "lookup", "suffix", "chain", "ngram", "block")


def build_tables(pipeline: Pipeline, path: Path) -> None:
    """N-gram tables of the library without the held-out modules."""
    encode = pipeline.tokenizer.encode
    texts = (encode(text).ids for name, text in library_files() if not held_out(name))
    tables = ngrams.count(texts, pipeline.bundle.target.vocab_size)
    ngram_files.write(tables, pipeline.bundle, path)


def measure(
    pipeline: Pipeline, texts: list[list[int]], drafters: dict[str, str], **options: Any
) -> dict[tuple[str, int], dict[str, float]]:
    """Tokens a round, acceptance and speed-up by drafter and K, over all prompts."""
    settings = [(name, k) for k in (4, 8) for name in drafters]
    ratios: dict[tuple[str, int], list[float]] = defaultdict(list)
    totals: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    for i, text in enumerate(texts):
        request = options | {"seed": i, "ignore_eos": True}
        plain, seconds = [run(pipeline, text, num_draft_tokens=0, **request)[0]], {}
        for setting in settings[i % len(settings) :] + settings[: i % len(settings)]:
            name, k = setting
            seconds[setting], counts = run(
                pipeline, text, num_draft_tokens=k, drafter=drafters[name], **request
            )
            totals[setting] += counts
        plain.append(run(pipeline, text, num_draft_tokens=0, **request)[0])
        for setting, one in seconds.items():
            ratios[setting].append(sum(plain) / 2 / one)
    return {
        setting: {
            "tokens_per_round": total["tokens"] / total["rounds"],
            "drafted_per_round": total["drafted"] / total["rounds"],
            "accepted_over_tested": total["accepted"] / max(1, total["tested"]),
            "draft_passes_per_round": total["passes"] / total["rounds"],
            "speedup": median(ratios[setting]),
        }
        for setting, total in totals.items()
    }


def run(pipeline: Pipeline, text: list[int], **options: Any) -> tuple[float, Counter[str]]:
    """Seconds of a request, and its counts."""
    pipeline.forget()
    stats = pipeline.generate(text, **options).stats
    return stats.prefill_seconds + stats.decode_seconds, counts(stats)


def counts(stats: Stats) -> Counter[str]:
    """What a request did, by what it is called."""
    return Counter(
        tokens=stats.num_new_tokens,
        rounds=stats.num_rounds,
        drafted=stats.num_drafted,
        tested=stats.num_tested,
        accepted=stats.num_accepted,
        passes=stats.num_draft_passes,
    )


@click.command()
@click.option("--bundle", help="The bundle to measure. [default: as for specedge generate]")
@click.option("--threads", type=int, help="CPU threads.")
@click.option("--prompts", "count", default=12, show_default=True)
@click.option("--length", default=64, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="Write the figures as JSON.")
def main(
    bundle: str | None, threads: int | None, count: int, length: int, output: Path | None
) -> None:
    """Measure every drafter on held-out modules, as they are and repeated."""
    pipeline = load(bundle, threads=threads)
    texts = prompts(pipeline, count)
    again = [[*text, *text, *text[: PROMPT_LENGTH // 4]] for text in texts]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        build_tables(pipeline, Path(folder) / "tables.npz")
        drafters = {name: name for name in DRAFTERS} | {"ngram": f"ngram:{folder}/tables.npz"}
        pipeline.generate(texts[0], 32, drafter=drafters["ngram"])
        for kind, held in (("as they are", texts), ("repeated", again)):
            for temperature in (0.0, 1.0):
                found = measure(
                    pipeline, held, drafters, temperature=temperature, max_new_tokens=length
                )
                for (name, k), figures in sorted(found.items()):
                    facts = {"prompts": kind, "temperature": temperature, "k": k, "drafter": name}
                    rows.append(facts | figures)
                    click.echo(" | ".join(map(_shown, rows[-1].values())))
    if output:
        output.write_text(json.dumps(rows, indent=1) + "\n")


def _shown(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
