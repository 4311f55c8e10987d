"""Another checkout's planner against this one's, on one pair of sessions: only what plans differs.

    python tools/compare_planners.py OTHER_CHECKOUT [--bundle FOLDER] [--threads N] [--prompts N]

Two processes on one machine may differ by more than two planners do. So both run in this one,
request by request in turn, beside plain decoding and fixed settings. Seconds are the processor's,
all threads together: take one thread. Figures are ratios of all requests together, with a 95%
interval. The other planning room runs on this checkout's drafters, so it must be of a commit that
fits them. Development only.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import click

from measure_pair import prompts
from measure_planner import interval, noise, repeating, seconds, total
from specedge import load
from specedge.runtime import pipeline as pipelines
from specedge.runtime.bench.tune import measure as tune

OTHER, OURS, PLAIN = "other", "ours", "plain"
FIXED = {0.0: ("chain", 8), 1.0: ("model", 3)}  # about the best on code


def planner_of(checkout: Path) -> Callable[..., Any]:
    """`plan_of` of another checkout, whose planning room is a package beside ours."""
    name, folder = "specedge.runtime.other_planning", checkout / "runtime" / "planning"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    found: Callable[..., Any] = importlib.import_module(f"{name}.plans").plan_of
    return found


@click.command()
@click.argument("checkout", type=click.Path(exists=True, path_type=Path))
@click.option("--bundle", help="The bundle to measure. [default: as for specedge generate]")
@click.option("--threads", type=int, help="CPU threads.")
@click.option("--prompts", "count", default=20, show_default=True)
@click.option("--length", default=128, show_default=True)
def main(checkout: Path, bundle: str | None, threads: int | None, count: int, length: int) -> None:
    """Compare two planners."""
    pipeline = load(bundle, threads=threads)
    pipeline.costs.table = tune(pipeline).costs
    plans = {OTHER: planner_of(checkout), OURS: pipelines.plan_of}
    parts = {
        "code": (prompts(pipeline, count), {}),
        "noise": (noise(pipeline, count), {}),
        "tables": (repeating(pipeline, count), {}),
        "random": (prompts(pipeline, count), {"drafter": "random"}),
    }
    for (part, (texts, both)), temperature in product(parts.items(), FIXED):
        settings: dict[str, dict[str, Any]] = {OTHER: {}, OURS: {}, PLAIN: {"num_draft_tokens": 0}}
        if not both:
            name, k = FIXED[temperature]
            settings[f"{name}, K = {k}"] = {"drafter": name, "num_draft_tokens": k}
        took: dict[str, list[float]] = {what: [] for what in settings}
        for i, text in enumerate(texts):
            turn = list(settings)[i % len(settings) :] + list(settings)[: i % len(settings)]
            for what in turn[:: -1 if i % 2 else 1]:
                pipelines.plan_of = plans.get(what, plans[OURS])
                options = both | settings[what] | {"temperature": temperature, "seed": i}
                took[what].append(seconds(pipeline, text, length, **options))
        for one, what in product((OURS, OTHER), settings):
            if one != what and (one, what) != (OTHER, OURS):
                pairs = list(zip(took[one], took[what], strict=True))
                click.echo(
                    f"{part} at {temperature:g}: {one} over {what}: {interval(pairs, total)}"
                )


if __name__ == "__main__":
    main()
