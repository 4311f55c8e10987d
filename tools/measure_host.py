"""What share of a round passes outside the graphs. Development only.

    python tools/measure_host.py [--bundle FOLDER] [--output FILE]

Greedy and sampled requests take turns, so that a busy machine slows both; figures are medians over
requests. The host's part of a round is drawing, the accept rule, and turning tokens into text.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from statistics import median
from typing import Any

import click

from specedge import Pipeline, load

PROMPT = "def read_config(path):"
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 0.8, top-k 50": {"temperature": 0.8, "top_k": 50},
    "temperature 1": {"temperature": 1.0},
    "temperature 0.8, top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
}


def measure(pipeline: Pipeline, k: int, length: int, repeats: int) -> dict[str, dict[str, float]]:
    """Medians for each setting: a round's milliseconds by part, the host's share, and tokens."""
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in SETTINGS}
    for i in range(repeats + 1):
        for name, options in SETTINGS.items():
            pipeline.forget()
            one = pipeline.generate(
                PROMPT, length, num_draft_tokens=k, seed=i, ignore_eos=True, **options
            )
            stats = one.stats
            seconds = {
                "draft": stats.draft_seconds,
                "verify": stats.verify_seconds,
                "sampling": stats.sampling_seconds,
                "other": stats.other_seconds,
            }
            parts = {part: 1e3 * value / stats.num_rounds for part, value in seconds.items()}
            host = parts["sampling"] + parts["other"]
            parts |= {"host": host, "share": host / sum(parts.values())}
            parts["tokens"] = stats.num_new_tokens / stats.num_rounds
            if i:  # the first round of requests warms up
                rounds[name].append(parts)
    return {
        name: {part: median(one[part] for one in found) for part in found[0]}
        for name, found in rounds.items()
    }


@click.command()
@click.option("--bundle", help="The bundle to measure. [default: as for specedge generate]")
@click.option("-k", "k", default=4, show_default=True, help="Draft tokens a round.")
@click.option("--length", default=64, show_default=True, help="New tokens a request.")
@click.option("--repeats", default=5, show_default=True, help="Requests of each setting.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the figures as JSON.")
def main(bundle: str | None, k: int, length: int, repeats: int, output: Path | None) -> None:
    """Measure the host's milliseconds and share of a round."""
    pipeline = load(bundle)
    found = measure(pipeline, k, length, repeats)
    for name, parts in found.items():
        click.echo(
            f"{name}: host {parts['host']:.3f} ms of a round ({parts['share']:.1%}; sampling "
            f"{parts['sampling']:.3f}, other {parts['other']:.3f}), draft {parts['draft']:.2f}, "
            f"verify {parts['verify']:.2f}, {parts['tokens']:.2f} tokens"
        )
    if output:
        target = pipeline.bundle.target
        facts = {
            "python": platform.python_version(),
            "target": target.source.id,
            "vocab_size": target.vocab_size,
            "num_draft_tokens": k,
            "new_tokens": length,
            "repeats": repeats,
        }
        output.write_text(json.dumps(facts | {"medians": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
