"""`specedge tune`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from specedge.cli import options
from specedge.cli.progress import bar
from specedge.cli.terminal import counted
from specedge.request import DrafterName

if TYPE_CHECKING:
    from collections.abc import Iterable

    from specedge.runtime.planning.cost_table import CostTable, ModeCosts


@click.command()
@options.bundle
@options.device
@options.draft_device
@options.threads
@options.ops
@options.as_json
def tune(
    bundle: str | None,
    device: str,
    draft_device: str | None,
    threads: int | None,
    ops: str,
    as_json: bool,
) -> None:
    """Measure what a bundle costs here, and remember it for `--num-draft-tokens auto`."""
    from rich.progress import TaskProgressColumn

    from specedge.benchmarks import threads as counts
    from specedge.benchmarks import tune as tuning

    on_cpu = {device, draft_device or device} == {"cpu"}
    fewer = counts.fastest(bundle, ops) if threads is None and on_cpu else None
    pipeline = options.load(bundle, device, threads or fewer, ops, draft_device)
    pipeline.costs.check_writable()  # before measuring, which takes a while
    with bar("measuring", 1.0, TaskProgressColumn()) as (update, _):
        tuned = tuning.measure(pipeline, lambda share: update(completed=share))
    table = tuned.costs
    path = pipeline.costs.remember(table)
    if fewer:
        path = pipeline.costs.remember_as_default(replace(table, threads=fewer))
        many = "threads are" if fewer > 1 else "thread is"
        click.echo(f"{fewer} {many} the fastest, and the default from now on", err=True)
    if tuned.busy:
        click.echo(
            "note: other programs kept the processor busy; tune again when it is calm", err=True
        )
    click.echo(f"remembered in {path}", err=True)
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
    lines = [f"{name + ': milliseconds, by tokens in the cache':60}{heads}"]

    def row(name: str, costs: Iterable[float]) -> str:
        return f"  {name:58}" + "".join(f"{1e3 * cost:9.3f}" for cost in costs)

    for i, tokens in enumerate(table.rows):
        lines.append(
            row(f"target, {counted(tokens, 'token')}", (costs[i] for costs in mode.target))
        )
    host = (
        f" the host adds {1e3 * mode.host:.3f} ms to a round and {1e3 * mode.token:.3f} to each of"
        " its tokens"
    )
    alpha = mode.acceptance.get(DrafterName.MODEL)
    if alpha is None:  # a bundle without a draft model
        copied = ", ".join(f"{rate:.0%} of {name}" for name, rate in mode.acceptance.items())
        return [
            *lines,
            f"  draft tokens that would have been accepted on built-in texts: {copied};{host}",
        ]
    for i, tokens in enumerate(table.rows[1:]):
        es = "es" if tokens > 2 else ""
        what = f"draft, a round's {tokens - 1} pass{es}"
        lines.append(row(what, (costs[i] for costs in mode.draft)))
    lines.append(row("draft, a token of the prompt", mode.reading))
    found = predictions(table.at(table.lengths[0], mode is table.greedy), alpha)
    best = max(range(len(found)), key=lambda k: found[k])
    shown = sorted({k for k in (1, 2, 3, 4, 6, 8, 12, 16) if k < len(found)} | {best})
    copied = "".join(
        f", {rate:.0%} of those of {name} would have been"
        for name, rate in mode.acceptance.items()
        if name != "model"
    )
    return [
        *lines,
        f"  {alpha:.0%} of tested draft tokens accepted on built-in texts{copied};{host}",
        "  predicted speed-up of the draft model: "
        + ", ".join(f"K = {k}: {found[k]:.2f}" for k in shown if k),
        f"  its best is K = {best}, {found[best]:.2f} times as fast as the target alone"
        + ("" if best else ": plain decoding"),
    ]
