"""What `specedge bench` prints and writes but for the page: a table, JSON, CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specedge.benchmarks.measure import Prompt, Run
from specedge.benchmarks.summary import Figures
from specedge.cli.terminal import counted


@dataclass(frozen=True)
class Report:
    """Everything a benchmark found."""

    facts: dict[str, Any]
    figures: list[Figures]
    losing: list[str]
    prompts: list[Prompt]
    runs: list[Run]

    @property
    def sets(self) -> list[str]:
        """The names of the sets of prompts."""
        return list(dict.fromkeys(one.set_name for one in self.figures))

    def of(self, set_name: str) -> list[Figures]:
        """The figures of one set."""
        return [one for one in self.figures if one.set_name == set_name]


def json_text(report: Report) -> str:
    """JSON with the names of `Figures`, and below them each prompt and each timed run."""
    facts = report.facts | {
        "losing": report.losing,
        "settings": [dataclasses.asdict(one) for one in report.figures],
        "prompts": [{"set_name": one.set_name, "text": one.text} for one in report.prompts],
        "runs": [_run(one) for one in report.runs],
    }
    return json.dumps(facts, ensure_ascii=False, indent=1)


def _run(run: Run) -> dict[str, Any]:
    """One run, with the names of `Stats`; `prompt` is an index into the prompts."""
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


def csv_text(report: Report) -> str:
    """A line for each set and setting; acceptances by position have spaces between them."""
    file = io.StringIO()
    names = [field.name for field in dataclasses.fields(Figures)]
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    for one in report.figures:
        row = dataclasses.asdict(one)
        positions = one.acceptance_by_position
        row["acceptance_by_position"] = " ".join("-" if a is None else f"{a:g}" for a in positions)
        writer.writerow(row)
    return file.getvalue()


def table_text(report: Report) -> str:
    """A table for each set, and below it what to make of it."""
    facts = report.facts
    draft = f"with {facts['draft']} as its draft" if facts["draft"] else "without a draft model"
    lines = [
        f"{facts['target']} {draft}, {facts['processor']},"
        f" {facts['threads']} threads, {facts['ops']}; temperature {facts['temperature']:g}",
    ]
    for name in report.sets:
        lines += ["", _table(report, name), *_notes(report, name)]
    if report.losing:
        lines += ["", *(part for line in report.losing for part in _wrapped(line))]
    return "\n".join(lines)


def _table(report: Report, name: str) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    rows = [_cells(one) for one in report.of(name)]
    for head in rows[0]:
        table.add_column(head, justify="left" if head == "drafter" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    console = Console(width=80, highlight=False, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return captured.get().rstrip("\n")


def _cells(one: Figures) -> dict[str, str]:
    """One row of the table, by the heads of its columns."""
    parts = (one.draft_seconds, one.verify_seconds, one.sampling_seconds, one.rest_seconds)
    split = "/".join(f"{100 * part / one.seconds_per_token:.0f}" for part in parts)
    predicted, error = prediction(one)
    return {
        "drafter": ("! " if one.loses else "  ") + one.drafter[:8],
        "K": str(one.num_draft_tokens),
        "ms a\ntoken": _short(1e3 * one.seconds_per_token, 3),
        "dr./verif./\nsam./rest%": split,
        "tok./\nround": f"{one.tokens_per_round:.2f}",
        "acc./\ntest.": shown(one.accepted_over_tested),
        "speed\n-up": _short(one.speedup),
        "quartiles": f"{_short(one.low)}-{_short(one.high)}",
        "over\nall": _short(one.overall_speedup),
        "pred.": "-" if one.drafter == "plain" else _short(predicted),
        "error": "-" if one.drafter == "plain" else f"{100 * error:+.0f}%",
    }


def named(one: Figures) -> str:
    """A setting as people read it."""
    k = one.num_draft_tokens
    return f"{one.drafter} at K = {k}" if isinstance(k, int) else one.drafter


def _short(value: float, digits: int = 2) -> str:
    """A number in as many characters, however large."""
    whole = len(f"{value:.0f}")
    return f"{value:.{max(0, digits + 1 - whole)}f}"


def prediction(one: Figures) -> tuple[float, float]:
    """What the table predicts with, and its error: alpha and measured costs for a draft model,
    measured acceptance by position and costs for the rest.
    """
    if one.with_costs is not None and one.with_costs_error is not None:
        return one.with_costs, one.with_costs_error
    return one.by_position, one.by_position_error


def _notes(report: Report, name: str) -> list[str]:
    rows = report.of(name)
    plain = rows[0]
    lines = [
        f"{name}: {counted(plain.num_prompts, 'prompt')};"
        f" {100 * plain.loop_share:.0f}% of the text came after a loop began and is left out",
    ]
    if plain.alpha is not None:
        lines.append(f"alpha along the target's own text: {plain.alpha:.3f}")
    best = max(rows, key=lambda one: one.speedup)
    if best is not plain:
        lines.append(f"best: {named(best)}, {best.speedup:.2f} times as fast as the target alone")

    def add(title: str, some: list[Figures], text: Callable[[Figures], str]) -> None:
        if some:
            parts = (f"{one.num_draft_tokens}: {text(one)}" for one in some)
            lines.append(f"{title}: {', '.join(parts)}")

    add(
        "held out, model, predicted/measured from every other prompt",
        [one for one in rows if one.held_out is not None],
        lambda one: (
            f"{one.held_out:.2f}/{one.held_out_speedup:.2f}"
            f" ({100 * (one.held_out_error or 0):+.1f}%)"
        ),
    )
    costs = [one for one in rows if one.drafter == "model" and one.theorem_3_8 is not None]
    add(
        "free verification (theorem 3.8), error",
        costs,
        lambda one: f"{100 * (one.theorem_3_8_error or 0):+.0f}%",
    )
    add("verify pass over K + 1 rows, in plain ones", costs, lambda one: f"{one.verify_cost:.2f}")
    return [line for long in lines for line in _wrapped(long)]


def _wrapped(line: str) -> list[str]:
    import textwrap

    return textwrap.wrap(line, 80, subsequent_indent="  ")


def shown(value: float | None, digits: int = 2) -> str:
    """A number, or a dash for none."""
    return "-" if value is None else f"{value:.{digits}f}"
