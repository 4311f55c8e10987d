"""Command `specedge tune`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from specedge.cli import options
from specedge.cli.terminal import pluralize, progress_bar
from specedge.request import DrafterName

if TYPE_CHECKING:
    from collections.abc import Iterable

    from specedge.runtime.planning.cost_table import CostTable, ModeCosts


@click.command()
@options.bundle
@options.execution
@options.as_json
def tune(as_json: bool, threads: int | None, **models: Any) -> None:
    """Measure pass costs for the planner.

    The costs are used by '--num-draft-tokens auto' on this machine.
    """
    from rich.progress import TaskProgressColumn

    from specedge.benchmarks import tune as tuning

    device = models["device"]
    fewer = None
    if threads is None and {device, models["draft_device"] or device} == {"cpu"}:
        fewer = tuning.fastest_threads(models["bundle"], models["ops"])
    pipeline = options.load_pipeline(**models, threads=threads or fewer)
    pipeline.costs.check_writable()  # fail before measuring
    with progress_bar("measuring", 1.0, TaskProgressColumn()) as (update, _):
        tuned = tuning.measure(pipeline, lambda share: update(completed=share))
    table = tuned.costs
    path = pipeline.costs.store(table)
    if fewer:
        path = pipeline.costs.store_as_default(replace(table, threads=fewer))
        many = "threads are" if fewer > 1 else "thread is"
        click.echo(f"{fewer} {many} fastest, and now the default", err=True)
    if tuned.busy:
        click.echo("note: the process waited for a core; repeat on an idle machine", err=True)
    click.echo(f"wrote {path}", err=True)
    if as_json:
        from specedge.strict_json import to_plain

        click.echo(json.dumps(to_plain(table), indent=1))
    else:
        for line in _lines(table):
            click.echo(line)


def _lines(table: CostTable) -> list[str]:
    greedy = _mode(table, "temperature 0", table.greedy)
    return [*greedy, "", *_mode(table, "temperature 1", table.sampled)]


def _mode(table: CostTable, name: str, mode: ModeCosts) -> list[str]:
    from specedge.runtime.planning.planner import predictions

    heads = "".join(f"{length:>9}" for length in table.lengths)
    lines = [f"{name + ': milliseconds by cached tokens':60}{heads}"]

    def row(name: str, costs: Iterable[float]) -> str:
        return f"  {name:58}" + "".join(f"{1e3 * cost:9.3f}" for cost in costs)

    for i, tokens in enumerate(table.rows):
        lines.append(
            row(f"target, {pluralize(tokens, 'token')}", (costs[i] for costs in mode.target))
        )
    host = f" host: {1e3 * mode.host:.3f} ms per round and {1e3 * mode.token:.3f} ms per token"
    alpha = mode.acceptance.get(DrafterName.MODEL)
    if alpha is None:  # a bundle without a draft model
        rates = ", ".join(f"{name} {rate:.0%}" for name, rate in mode.acceptance.items())
        return [*lines, f"  acceptance rate on built-in texts: {rates};{host}"]
    for i, tokens in enumerate(table.rows[1:]):
        es = "es" if tokens > 2 else ""
        name = f"draft, {tokens - 1} pass{es}"
        lines.append(row(name, (costs[i] for costs in mode.draft)))
    lines.append(row("draft, per prompt token", mode.prefill))
    speedups = predictions(table.at(table.lengths[0], mode is table.greedy), alpha)
    best = max(range(len(speedups)), key=lambda k: speedups[k])
    shown = sorted({k for k in (1, 2, 3, 4, 6, 8, 12, 16) if k < len(speedups)} | {best})
    others = "".join(
        f", {name} {rate:.0%}" for name, rate in mode.acceptance.items() if name != "model"
    )
    return [
        *lines,
        f"  acceptance rate on built-in texts: draft model {alpha:.0%}{others};{host}",
        "  predicted speed-up of the draft model: "
        + ", ".join(f"K = {k}: {speedups[k]:.2f}" for k in shown if k),
        f"  optimal: K = {best}, {speedups[best]:.2f} times as fast as the target alone"
        + ("" if best else ": plain decoding"),
    ]
