"""What suffix gains over lookup, alone, before the draft model, and for `auto`. Development only.

    python tools/measure_copies.py [--bundle FOLDER] [-k N] [--seeds N] [--temperature T]

The built-in prompts of `specedge bench`, and held-out ones as measure_pair.py has them. Counts and
no seconds: they are the same wherever nothing was tuned. Lookup and suffix alone go along the same
texts, which the target wrote alone. With `--remember` a set has its prompts
asked one after another by suffix, with and without their outputs remembered.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import click
import numpy as np

from measure_drafters import counts
from measure_pair import prompts
from specedge import Pipeline, load
from specedge.benchmarks.prompts import SETS
from specedge.runtime.decoding.round import Drafter
from specedge.runtime.drafters.prompt_lookup import Lookup, agreeing
from specedge.runtime.drafters.suffix import Suffix
from specedge.runtime.sampling.history import History
from specedge.sampling_options import Sampling

ALONE = {"lookup": Lookup, "suffix": Suffix}
WAYS: dict[str, dict[str, Any]] = {
    "chain by lookup": {"drafter": "chain", "lookup_min": 2},
    "chain by suffix": {"drafter": "chain"},
    "auto by lookup": {"num_draft_tokens": "auto", "lookup_min": 2},
    "auto by suffix": {"num_draft_tokens": "auto"},
}
REMEMBERING: dict[str, dict[str, Any]] = {
    "suffix": {"drafter": "suffix"},
    "suffix, remembering": {"drafter": "suffix", "remember": True},
}


@click.command()
@click.option("--bundle", help="The bundle to measure. [default: as for specedge generate]")
@click.option("--temperature", default=0.0, show_default=True)
@click.option("-k", "num_draft_tokens", default=8, show_default=True)
@click.option("--length", default=128, show_default=True)
@click.option("--seeds", default=1, show_default=True, help="Texts of each prompt.")
@click.option("--remember", is_flag=True, help="Measure what remembered outputs give.")
def main(bundle: str | None, remember: bool, seeds: int, length: int, **options: Any) -> None:
    """Count rounds, drafted tokens and draft passes of each way to copy."""
    pipeline = load(bundle, threads=1)
    encode = pipeline.tokenizer.encode
    sets = {name: [encode(text).ids for text in texts] for name, texts in SETS.items()}
    sets["held out"] = prompts(pipeline, 12)
    options |= {"max_new_tokens": length, "ignore_eos": True}
    for kind, texts in sets.items():
        if not remember:
            alone(pipeline, kind, texts, seeds, options)
        for name, way in (REMEMBERING if remember else WAYS).items():
            pipeline.forget()
            total: Counter[str] = Counter()
            for seed in range(seeds):
                for text in texts:
                    total += count(pipeline, text, **options | way, seed=seed)
            click.echo(" | ".join([kind, name, *shown(total)]))


def alone(
    pipeline: Pipeline, kind: str, texts: list[list[int]], seeds: int, options: dict[str, Any]
) -> None:
    """What rounds of lookup and of suffix would have made of the same texts."""
    totals = {name: Counter[str]() for name in ALONE}
    plain, most = options | {"num_draft_tokens": 0}, options["num_draft_tokens"]
    for seed in range(seeds):
        for prompt in texts:
            text = pipeline.generate(prompt, seed=seed, **plain).tokens
            for name, drafter in ALONE.items():
                totals[name] += along(drafter(), prompt, text, most)
    for name, total in totals.items():
        click.echo(" | ".join([kind, name, *shown(total)]))


def along(drafter: Drafter, prompt: list[int], text: list[int], most: int) -> Counter[str]:
    """Rounds of up to `most` draft tokens along a text."""
    history, total = History(prompt), Counter[str]()
    while rest := text[history.num_new_tokens :]:
        draft = drafter.propose(history, min(most, len(rest)), Sampling(), np.zeros(0)).tokens
        accepted, tested = agreeing(draft, rest)
        committed = rest[: accepted + 1]
        history.extend(committed)
        drafter.truncate(history.length - 1)
        total += Counter(
            rounds=1, tokens=len(committed), drafted=len(draft), tested=tested, accepted=accepted
        )
    return total


def count(pipeline: Pipeline, text: list[int], **options: Any) -> Counter[str]:
    """The counts of a request."""
    return counts(pipeline.generate(text, **options).stats)


def shown(total: Counter[str]) -> list[str]:
    """Tokens, drafted tokens and draft passes a round, and acceptance."""
    found = [total[name] / total["rounds"] for name in ("tokens", "drafted", "passes")]
    return [f"{value:.2f}" for value in [*found, total["accepted"] / max(1, total["tested"])]]


if __name__ == "__main__":
    main()
