"""The page of `specedge bench`: one file, plots included; no script, nothing from a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specedge.cli import svg
from specedge.cli.bench_output import Report, named, prediction, shown

if TYPE_CHECKING:
    from specedge.benchmarks.summary import Figures

_TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>specedge bench: {{ facts.target }}</title>
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
<h1>Speculative decoding of {{ facts.target }}, measured</h1>
<dl>{% for name, value in facts.items() %}
<dt>{{ name.replace("_", " ") }}</dt><dd>{{ value or "none" }}</dd>{% endfor %}</dl>
{% for line in losing %}<p class="verdict loses">{{ line }}</p>
{% endfor %}
{% for set in sets %}
<h2>{{ set.name }}</h2>
<p class="verdict">{{ set.verdict }}</p>
<p>{{ set.alpha }} {{ set.loops }}</p>
<h3>Speed-up by draft tokens a round; bars are quartiles, dashes are predictions</h3>
{{ set.speedup }}
<h3>Acceptance by position in the draft, at the largest K</h3>
{{ set.acceptance }}
<h3>Where a round's time goes</h3>
{{ set.rounds }}
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
<p>Speed-ups are medians, over prompts and repeats, of the ratio of seconds a new token, plain
decoding around each run over the run, without the prefill; "request" counts the prefill, "overall"
is all prompts together, which is what the formulas predict. c, v and o
are what a draft pass, a verify pass and the host in a round cost, in plain passes of the target.
"Theorem 3.8" takes verification for free, "run level" is the same with the run's own tokens a
round, "with costs" is E(α, K) / (K c + v + o) times a plain round's 1 + o, "by position" takes
acceptances and passes as they were. "Held out" is from every other prompt, measured on the
rest.</p>
</body>
</html>
"""

_PARTS = ("draft", "verify", "sampling", "rest")


def page(report: Report) -> str:
    """The whole page; what is not ours, such as prompts, is escaped."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(_TEMPLATE).render(
        facts=report.facts,
        losing=report.losing,
        sets=[_set(report, name) for name in report.sets],
    ) + "\n"  # fmt: skip


def _set(report: Report, name: str) -> dict[str, Any]:
    from markupsafe import Markup

    rows = report.of(name)
    plain = rows[0]
    best = max(rows, key=lambda one: one.speedup)
    return {
        "name": name,
        "verdict": "The target alone is the fastest."
        if best is plain
        else f"Best: {named(best)}, {best.speedup:.2f} times as fast as the target alone.",
        "alpha": f"α along the target's own text is {shown(plain.alpha, 3)}.",
        "loops": f"{100 * plain.loop_share:.0f}% of the text came after a loop began and is left"
        " out.",
        "speedup": Markup(_speedup_plot(name, rows)),
        "acceptance": Markup(_acceptance_plot(name, rows)),
        "rounds": Markup(_rounds_plot(name, rows)),
        "rows": [{"loses": one.loses, "cells": _cells(one)} for one in rows],
        "prompts": [prompt.text for prompt in report.prompts if prompt.set_name == name],
    }


def _colours(rows: Sequence[Figures]) -> dict[str, str]:
    names = [name for name in dict.fromkeys(one.drafter for one in rows) if name != "plain"]
    return {name: svg.COLOURS[i % len(svg.COLOURS)] for i, name in enumerate(names)}


def _speedup_plot(name: str, rows: Sequence[Figures]) -> str:
    measured, predicted, rules = [], [], [svg.Rule("the target alone", 1.0, "#555555")]
    for drafter, colour in _colours(rows).items():
        own = [one for one in rows if one.drafter == drafter]
        points, expected = [], []
        for one in own:
            k = one.num_draft_tokens
            if isinstance(k, str):
                rules.append(svg.Rule(f"{drafter} ({one.speedup:.2f})", one.speedup, colour))
            else:
                points.append(svg.Point(k, one.speedup, one.low, one.high))
                expected.append(svg.Point(k, prediction(one)[0]))
        if points:
            points.sort(key=lambda point: point.x)
            expected.sort(key=lambda point: point.x)
            measured.append(svg.Line(drafter, points, colour))
            predicted.append(svg.Line(f"{drafter}, predicted", expected, colour, dashed=True))
    return svg.lines(
        f"Speed-up on {name}", "draft tokens a round, K", "speed-up", measured + predicted, rules
    )


def _acceptance_plot(name: str, rows: Sequence[Figures]) -> str:
    found, rules = [], []
    alpha = rows[0].alpha
    if alpha is not None:
        rules.append(svg.Rule(f"α of the model ({alpha:.2f})", alpha, "#555555"))
    for drafter, colour in _colours(rows).items():
        own = [one for one in rows if one.drafter == drafter]
        most = max(own, key=lambda one: len(one.acceptance_by_position))
        points = [
            svg.Point(i, acceptance)
            for i, acceptance in enumerate(most.acceptance_by_position, 1)
            if acceptance is not None
        ]
        if points:
            found.append(svg.Line(drafter, points, colour))
    return svg.lines(
        f"Acceptance on {name}", "position in the draft", "accepted over tested", found, rules, 1.0
    )


def _rounds_plot(name: str, rows: Sequence[Figures]) -> str:
    found = []
    for one in rows:
        scale = 1e3 * one.tokens_per_round
        parts = [scale * getattr(one, f"{part}_seconds") for part in _PARTS]
        k = f", K = {one.num_draft_tokens}" if one.drafter not in ("plain", "auto") else ""
        found.append((f"{one.drafter[:12]}{k}", parts))
    return svg.bars(f"Time of a round on {name}", "ms", _PARTS, found)


def _cells(one: Figures) -> dict[str, str]:
    """One row of the table, by the heads of its columns."""

    def predicted(value: float | None, error: float | None) -> str:
        return "-" if value is None or error is None else f"{value:.2f} ({100 * error:+.1f}%)"

    return {
        "drafter": one.drafter + (" loses" if one.loses else ""),
        "K": str(one.num_draft_tokens),
        "speed-up": f"{one.speedup:.3f}",
        "quartiles": f"{one.low:.2f} to {one.high:.2f}",
        "request": f"{one.request_speedup:.2f}",
        "overall": f"{one.overall_speedup:.3f}",
        "ms / token": f"{1e3 * one.seconds_per_token:.3f}",
        "tokens / round": f"{one.tokens_per_round:.2f}",
        "accepted / tested": shown(one.accepted_over_tested),
        "accepted / drafted": shown(one.accepted_over_drafted),
        "tokens / rows": shown(one.tokens_over_rows),
        "c": shown(one.draft_cost, 3),
        "v": shown(one.verify_cost, 3),
        "o": shown(one.host_cost, 3),
        "theorem 3.8": predicted(one.theorem_3_8, one.theorem_3_8_error),
        "run level": predicted(one.run_level, one.run_level_error),
        "with costs": predicted(one.with_costs, one.with_costs_error),
        "by position": predicted(one.by_position, one.by_position_error),
        "held out": predicted(one.held_out, one.held_out_error),
    }
