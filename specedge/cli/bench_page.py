"""HTML page of `specedge bench --html`: one file without scripts or network resources."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specedge.cli.bench_output import BenchmarkReport, format_number, setting_name

if TYPE_CHECKING:
    from specedge.benchmarks.summary import Figures

_TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>specedge bench: {{ conditions.target }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #111; background: #fff; }
h1 { font-size: 1.6rem; } h2 { margin-top: 3rem; border-top: 2px solid #111; }
h3 { font-size: 1rem; margin: 1.8rem 0 .3rem; }
p.verdict { font-size: 1.15rem; } .loses { color: #B00020; font-weight: 600; }
svg { width: 100%; height: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
td, th { text-align: right; padding: .15rem .5rem; border-bottom: 1px solid #ddd; }
td:first-child, th:first-child { text-align: left; }
.wide { overflow-x: auto; } pre { white-space: pre-wrap; background: #f5f5f5; padding: .5rem; }
dl { display: grid; grid-template-columns: max-content auto; gap: 0 1rem; font-size: .9rem; }
dd { margin: 0; }
</style>
</head>
<body>
<h1>Benchmark of speculative decoding: {{ conditions.target }}</h1>
<dl>{% for name, value in conditions.items() %}
<dt>{{ name.replace("_", " ") }}</dt><dd>{{ value or "none" }}</dd>{% endfor %}</dl>
{% for line in losing %}<p class="verdict loses">{{ line }}</p>
{% endfor %}
{% for set in sets %}
<h2>{{ set.name }}</h2>
<p class="verdict">{{ set.verdict }}</p>
<p>{{ set.alpha }} {{ set.loops }}</p>
{% for title, plot in set.plots %}<h3>{{ title }}</h3>
{{ plot }}
{% endfor %}
<h3>All figures</h3>
<div class="wide"><table>
<tr>{% for head in set.rows[0].cells %}<th>{{ head }}</th>{% endfor %}</tr>
{% for row in set.rows %}<tr{% if row.loses %} class="loses"{% endif %}>
{%- for cell in row.cells.values() %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
<details><summary>Prompts</summary>
{% for text in set.prompts %}<pre>{{ text }}</pre>
{% endfor %}</details>
{% endfor %}
<p>Speed-ups are medians over prompts and repeats of the ratio of seconds per new token, plain
decoding to speculative decoding, without prefill; error bars are quartiles and dashed lines are
predictions. "Request" includes prefill; "overall" is the ratio of total times, which the formulas
predict. c, v and o are the costs of a draft pass, a verify pass and the host's work per round in
plain passes of the target. "Theorem 3.8" assumes free verification; "run level" is the same with
the measured tokens per round; "with costs" is E(α, K) / (K c + v + o) times a plain round's 1 + o;
"by position" uses the measured acceptance rates by position. "Held out" predicts half of the
prompts from the other half.</p>
</body>
</html>
"""


def page(report: BenchmarkReport) -> str:
    """Return a self-contained HTML page with plots and tables.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    sets = [_set(report, name) for name in report.sets]
    template = environment.from_string(_TEMPLATE)
    return template.render(conditions=report.conditions, losing=report.losing, sets=sets) + "\n"


def _set(report: BenchmarkReport, name: str) -> dict[str, Any]:
    from markupsafe import Markup

    from specedge.cli.plots import benchmark_plots

    rows = report.figures_of(name)
    plain = rows[0]
    best = max(rows, key=lambda row: row.speedup)
    return {
        "name": name,
        "verdict": "Plain decoding is the fastest."
        if best is plain
        else f"Fastest: {setting_name(best)}, {best.speedup:.2f} times as fast as plain decoding.",
        "alpha": f"The acceptance rate α on the target's text is {format_number(plain.alpha, 3)}.",
        "loops": f"{100 * plain.loop_share:.0f}% of the text is repetitive and excluded.",
        "plots": [(title, Markup(plot)) for title, plot in benchmark_plots(rows)],
        "rows": [{"loses": row.loses, "cells": _cells(row)} for row in rows],
        "prompts": [prompt.text for prompt in report.prompts if prompt.set_name == name],
    }


def _cells(row: Figures) -> dict[str, str]:
    """Return a row of the table by column."""

    def predicted(value: float | None, error: float | None) -> str:
        return "-" if value is None or error is None else f"{value:.2f} ({100 * error:+.1f}%)"

    return {
        "drafter": row.drafter + (" loses" if row.loses else ""),
        "K": str(row.num_draft_tokens),
        "speed-up": f"{row.speedup:.3f}",
        "quartiles": f"{row.low:.2f} to {row.high:.2f}",
        "request": f"{row.request_speedup:.2f}",
        "overall": f"{row.overall_speedup:.3f}",
        "ms / token": f"{1e3 * row.seconds_per_token:.3f}",
        "tokens / round": f"{row.tokens_per_round:.2f}",
        "accepted / tested": format_number(row.accepted_over_tested),
        "accepted / drafted": format_number(row.accepted_over_drafted),
        "tokens / rows": format_number(row.tokens_over_rows),
        "c": format_number(row.draft_cost, 3),
        "v": format_number(row.verify_cost, 3),
        "o": format_number(row.host_cost, 3),
        "theorem 3.8": predicted(row.theorem_3_8, row.theorem_3_8_error),
        "run level": predicted(row.run_level, row.run_level_error),
        "with costs": predicted(row.with_costs, row.with_costs_error),
        "by position": predicted(row.by_position, row.by_position_error),
        "held out": predicted(row.held_out, row.held_out_error),
    }
