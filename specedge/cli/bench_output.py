"""Output of `specedge bench` as a table, JSON and CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specedge.benchmarks.measure import BenchmarkPrompt, TimedRun
from specedge.benchmarks.summary import Figures
from specedge.cli.terminal import pluralize


@dataclass(frozen=True)
class BenchmarkReport:
    """Results and conditions of a benchmark."""

    conditions: dict[str, Any]
    figures: list[Figures]
    losing: list[str]
    prompts: list[BenchmarkPrompt]
    runs: list[TimedRun]

    @property
    def sets(self) -> list[str]:
        """Names of the prompt sets."""
        return list(dict.fromkeys(row.set_name for row in self.figures))

    def figures_of(self, set_name: str) -> list[Figures]:
        """Return the figures of one set."""
        return [row for row in self.figures if row.set_name == set_name]


def json_text(report: BenchmarkReport) -> str:
    """Return JSON with the settings (`Figures`), the prompts and all timed runs."""
    document = report.conditions | {
        "losing": report.losing,
        "settings": [dataclasses.asdict(entry) for entry in report.figures],
        "prompts": [{"set_name": entry.set_name, "text": entry.text} for entry in report.prompts],
        "runs": [_run(entry) for entry in report.runs],
    }
    return json.dumps(document, ensure_ascii=False, indent=1)


def _run(run: TimedRun) -> dict[str, Any]:
    """Return a run as JSON; `prompt` is an index of the prompts."""
    names = (
        *("num_prompt_tokens", "num_new_tokens", "num_rounds", "num_drafted", "num_accepted"),
        *("prefill_seconds", "decode_seconds"),
    )
    return {
        "prompt": run.prompt,
        "repeat": run.repeat,
        "drafter": run.setting.drafter,
        "num_draft_tokens": run.setting.num_draft_tokens,
        "speedup": run.speedup,
    } | {name: getattr(run.stats, name) for name in names}


def csv_text(report: BenchmarkReport) -> str:
    """Return CSV with a line for each prompt set and setting."""
    file = io.StringIO()
    names = [field.name for field in dataclasses.fields(Figures)]
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    for figures in report.figures:
        row = dataclasses.asdict(figures)
        positions = figures.acceptance_by_position
        row["acceptance_by_position"] = " ".join("-" if a is None else f"{a:g}" for a in positions)
        writer.writerow(row)
    return file.getvalue()


def table_text(report: BenchmarkReport) -> str:
    """Return a table for each prompt set, followed by notes."""
    conditions = report.conditions
    name = conditions["draft"]
    draft = f"with draft model {name}" if name else "without a draft model"
    lines = [
        f"{conditions['target']} {draft}, {conditions['processor']},"
        f" {conditions['threads']} threads, {conditions['ops']}; temperature "
        f"{conditions['temperature']:g}",
    ]
    for name in report.sets:
        lines += ["", _table(report, name), *_notes(report, name)]
    if report.losing:
        lines += ["", *(part for line in report.losing for part in _wrapped(line))]
    return "\n".join(lines)


def _table(report: BenchmarkReport, name: str) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    rows = [_cells(figures) for figures in report.figures_of(name)]
    for head in rows[0]:
        table.add_column(head, justify="left" if head == "drafter" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    console = Console(width=80, highlight=False, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return captured.get().rstrip("\n")


def _cells(figures: Figures) -> dict[str, str]:
    """Return a row of the table by column."""
    parts = (
        figures.draft_seconds,
        figures.verify_seconds,
        figures.sampling_seconds,
        figures.rest_seconds,
    )
    split = "/".join(f"{100 * part / figures.seconds_per_token:.0f}" for part in parts)
    predicted, error = prediction(figures)
    return {
        "drafter": ("! " if figures.loses else "  ") + figures.drafter[:8],
        "K": str(figures.num_draft_tokens),
        "ms /\ntoken": _short(1e3 * figures.seconds_per_token, 3),
        "dr./verif./\nsam./rest%": split,
        "tok. /\nround": f"{figures.tokens_per_round:.2f}",
        "acc./\ntest.": format_number(figures.accepted_over_tested),
        "speed\n-up": _short(figures.speedup),
        "quartiles": f"{_short(figures.low)}-{_short(figures.high)}",
        "over\nall": _short(figures.overall_speedup),
        "pred.": "-" if figures.drafter == "plain" else _short(predicted),
        "error": "-" if figures.drafter == "plain" else f"{100 * error:+.0f}%",
    }


def setting_name(figures: Figures) -> str:
    """Return the name of a setting for display."""
    k = figures.num_draft_tokens
    return f"{figures.drafter} at K = {k}" if isinstance(k, int) else figures.drafter


def _short(value: float, digits: int = 2) -> str:
    """Return a number with a fixed number of characters."""
    whole = len(f"{value:.0f}")
    return f"{value:.{max(0, digits + 1 - whole)}f}"


def prediction(figures: Figures) -> tuple[float, float]:
    """Return the predicted speed-up and its error.

    The prediction uses alpha and measured costs for a draft model, and the measured acceptance
    rates by position for other drafters.
    """
    if figures.with_costs is not None and figures.with_costs_error is not None:
        return figures.with_costs, figures.with_costs_error
    return figures.by_position, figures.by_position_error


def _notes(report: BenchmarkReport, name: str) -> list[str]:
    rows = report.figures_of(name)
    plain = rows[0]
    lines = [
        f"{name}: {pluralize(plain.num_prompts, 'prompt')};"
        f" {100 * plain.loop_share:.0f}% of the text is repetitive and excluded",
    ]
    if plain.alpha is not None:
        lines.append(f"acceptance rate (alpha) on the target's text: {plain.alpha:.3f}")
    best = max(rows, key=lambda row: row.speedup)
    if best is not plain:
        lines.append(
            f"fastest: {setting_name(best)}, {best.speedup:.2f} times as fast as plain decoding"
        )

    def add(title: str, figures: list[Figures], text: Callable[[Figures], str]) -> None:
        if figures:
            parts = (f"{row.num_draft_tokens}: {text(row)}" for row in figures)
            lines.append(f"{title}: {', '.join(parts)}")

    add(
        "held-out prompts, draft model, predicted/measured",
        [row for row in rows if row.held_out is not None],
        lambda row: (
            f"{row.held_out:.2f}/{row.held_out_speedup:.2f}"
            f" ({100 * (row.held_out_error or 0):+.1f}%)"
        ),
    )
    costs = [row for row in rows if row.drafter == "model" and row.theorem_3_8 is not None]
    add(
        "error of theorem 3.8 (free verification)",
        costs,
        lambda row: f"{100 * (row.theorem_3_8_error or 0):+.0f}%",
    )
    add(
        "cost of a verify pass of K + 1 tokens in plain passes",
        costs,
        lambda row: f"{row.verify_cost:.2f}",
    )
    return [line for long in lines for line in _wrapped(long)]


def _wrapped(line: str) -> list[str]:
    import textwrap

    return textwrap.wrap(line, 80, subsequent_indent="  ")


def format_number(value: float | None, digits: int = 2) -> str:
    """Return a number as text, or a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}"
