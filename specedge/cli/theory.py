"""Command `specedge theory`."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import click

from specedge.cli import options

if TYPE_CHECKING:
    from collections.abc import Iterable

    from specedge.theory.formulas import Costs

_ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9)
_LENGTHS = (1, 2, 3, 4, 5, 7, 10)
_DRAFT_COSTS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
# alpha and K of table 1 in Leviathan et al.
_TABLE_1 = ((0.6, 2), (0.7, 3), (0.8, 2), (0.8, 5), (0.9, 2), (0.9, 10))
_MIN_LAST_K = 8  # the table of a prediction ends at this K or a larger one


def _costs(context: click.Context, option: click.Parameter, value: str | None) -> Costs | None:
    """Parse one cost, or several for K = 0, 1, 2, ... separated by commas."""
    if value is None:
        return None
    try:
        costs = [float(text) for text in value.split(",")]
    except ValueError as error:
        raise click.BadParameter(
            f"'{value}' must be a number, or numbers separated by commas"
        ) from error
    return costs if len(costs) > 1 else costs[0]


@click.command()
@click.option("--alpha", type=click.FloatRange(0, 1), help="Acceptance rate.")
@click.option("--draft-cost", type=click.FloatRange(0), metavar="C", help="Cost of a draft pass.")
@click.option(
    "--verify-cost",
    callback=_costs,
    metavar="V[,V...]",
    help="Cost of a verify pass: one number, or one for each K from 0.  [default: 1]",
)
@click.option(
    "--host-cost",
    type=click.FloatRange(0),
    metavar="O",
    help="Cost of the host's work per round.  [default: 0]",
)
@click.option("--figures", metavar="FOLDER", help="Write the figures of the papers to this folder.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["svg", "png"]),
    help="Format of --figures.  [default: svg]",
)
@click.option("--overwrite", is_flag=True, help="Replace existing figures.")
@options.as_json
def theory(
    alpha: float | None,
    draft_cost: float | None,
    verify_cost: Costs | None,
    host_cost: float | None,
    figures: str | None,
    form: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Predict the speed-up of speculative decoding.

    Without --alpha and --draft-cost, the tables of the papers are printed. Costs are relative to a
    single-token target pass. Set --alpha and --draft-cost to the values that 'specedge compare'
    measures for your models.
    """
    from specedge.cli import plots

    if figures is None and (form or overwrite):
        raise click.UsageError("--format and --overwrite require --figures")
    if figures is not None:
        plots.check_folder(figures, form or "svg", overwrite)
    if alpha is not None and draft_cost is not None:
        with options.usage_errors():
            result = _prediction(
                alpha, draft_cost, 1.0 if verify_cost is None else verify_cost, host_cost or 0.0
            )
    elif (alpha, draft_cost, verify_cost, host_cost) != (None,) * 4:
        raise click.UsageError("--alpha and --draft-cost must be specified together")
    else:
        result = _tables()
    if as_json:
        with options.usage_errors():  # infinity is not JSON
            click.echo(json.dumps(result, indent=1, allow_nan=False))
    elif alpha is None:
        _print_tables(result)
    else:
        _print_prediction(result)
    if figures is not None:
        for path in plots.write_theory(figures, form or "svg", overwrite):
            click.echo(f"wrote {path}", err=True)


def _tables() -> dict[str, Any]:
    """Return the tables of the papers."""
    from specedge.theory import formulas

    best = {(a, c): formulas.best_k(a, c) for a in _ALPHAS for c in _DRAFT_COSTS}
    return {
        "expected_tokens": [
            {
                "alpha": alpha,
                "by_num_draft_tokens": {k: formulas.expected_tokens(alpha, k) for k in _LENGTHS},
                "limit": formulas.expected_tokens_limit(alpha),
            }
            for alpha in _ALPHAS
        ],
        "best_k": [
            {"alpha": a, "draft_cost": c, "best_k": k, "speedup": formulas.speedup(a, k, c)}
            for (a, c), k in best.items()
        ],
        "operations": [
            {
                "alpha": a,
                "num_draft_tokens": k,
                "operations_factor": formulas.operations_factor(a, k),
                "speedup": formulas.speedup(a, k, 0),
            }
            for a, k in _TABLE_1
        ],
    }


def _prediction(
    alpha: float, draft_cost: float, verify_cost: Costs, host_cost: float
) -> dict[str, Any]:
    """Return the prediction for each K."""
    from specedge.sampling_options import MAX_DRAFT_TOKENS
    from specedge.theory.formulas import best_k, expected_tokens_limit

    costs = (draft_cost, verify_cost, host_cost)
    best = best_k(alpha, *costs)
    last = max(best + 2, _MIN_LAST_K) if isinstance(verify_cost, float) else len(verify_cost) - 1
    lengths = range(min(last, MAX_DRAFT_TOKENS) + 1)
    limit = expected_tokens_limit(alpha)
    return {
        "alpha": alpha,
        "draft_cost": draft_cost,
        "verify_cost": verify_cost,
        "host_cost": host_cost,
        "best_k": best,
        "tokens_per_round_limit": limit if math.isfinite(limit) else None,
        "by_num_draft_tokens": [_at(alpha, k, *costs) for k in lengths],
    }


def _at(alpha: float, k: int, *costs: Any) -> dict[str, Any]:
    from specedge.theory import formulas

    rates = formulas.acceptance_rates(alpha, k) if k else None
    return {
        "num_draft_tokens": k,
        "tokens_per_round": formulas.expected_tokens(alpha, k),
        "round_cost": formulas.round_cost(k, *costs),
        "speedup": formulas.speedup(alpha, k, *costs),
        "break_even_alpha": formulas.break_even_alpha(k, *costs) if k else None,
        "accepted_over_drafted": rates and rates.accepted_over_drafted,
        "tokens_over_rows": rates and rates.tokens_over_rows,
    }


def _print_tables(tables: dict[str, Any]) -> None:
    _print_table(
        "Tokens per round, by acceptance rate and K",
        (
            {"alpha": f"{row['alpha']:g}"}
            | {f"K = {k}": f"{tokens:.3f}" for k, tokens in row["by_num_draft_tokens"].items()}
            | {"any K": f"< {row['limit']:.2f}"}
            for row in tables["expected_tokens"]
        ),
    )
    click.echo()
    rows: dict[float, dict[str, str]] = {}
    for entry in tables["best_k"]:
        row = rows.setdefault(entry["alpha"], {"alpha": f"{entry['alpha']:g}"})
        row[f"c = {entry['draft_cost']:g}"] = f"{entry['best_k']}: {entry['speedup']:.3f}"
    _print_table(
        "Optimal K: speed-up, by acceptance rate and draft cost c; free verification", rows.values()
    )
    click.echo()
    _print_table(
        "Speed-up and operations relative to the target alone; free drafts",
        (
            {
                "alpha": f"{row['alpha']:g}",
                "K": str(row["num_draft_tokens"]),
                "speed-up": f"{row['speedup']:.2f}",
                "operations": f"{row['operations_factor']:.2f}",
            }
            for row in tables["operations"]
        ),
    )


def _print_prediction(result: dict[str, Any]) -> None:
    rows = result["by_num_draft_tokens"]
    best = rows[result["best_k"]]
    click.echo(f"best K               {result['best_k']}")
    click.echo(f"speed-up             {best['speedup']:.2f}")
    if not result["best_k"]:
        click.echo("no speed-up: the target alone is at least as fast")
    click.echo()
    _print_table(
        "By K; costs relative to a pass of the target over one token",
        ({"": "*" if row is best else ""} | _cells(row) for row in rows),
    )


def _cells(row: dict[str, Any]) -> dict[str, str]:
    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    k, pays = row["num_draft_tokens"], row["break_even_alpha"]
    return {
        "K": str(k),
        "tokens / round": shown(row["tokens_per_round"]),
        "round cost": shown(row["round_cost"]),
        "speed-up": shown(row["speedup"]),
        "min alpha": "never" if k and pays is None else shown(pays),
        "accepted / drafted": shown(row["accepted_over_drafted"]),
        "tokens / rows": shown(row["tokens_over_rows"]),
    }


def _print_table(title: str, rows: Iterable[dict[str, str]]) -> None:
    """Print rows of cells by column."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for row in rows:
        if not table.columns:
            for head in row:
                table.add_column(head, justify="right")
        table.add_row(*row.values())
    click.secho(title, bold=True)
    Console(width=80, highlight=False).print(table)
