"""Plots of `specedge bench`, drawn with matplotlib (the `plot` extra)."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from specedge.errors import MissingExtraError, SpecEdgeError

if TYPE_CHECKING:
    from specedge.benchmarks.summary import Figures

# The palette of Okabe and Ito, distinguishable with color vision deficiencies.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00")
_LINES = ("-", "--", "-.", (0, (1, 1)), (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))
_MARKERS = ("o", "s", "^", "D", "v", "P")
_TIME_PARTS = ("draft", "verify", "sampling", "rest")


def benchmark_plots(rows: Sequence[Figures]) -> Iterator[tuple[str, str]]:
    """Yield the titles of a prompt set's plots, and the plots as SVG elements."""
    yield "Speed-up by draft tokens per round", _element(lambda axes: _speedup(axes, rows))
    yield "Acceptance rate by position", _element(lambda axes: _acceptance(axes, rows))
    yield "Time per round", _element(lambda axes: _round_time(axes, rows))


def stacked_bars(
    axes: Any, unit: str, parts: Sequence[str], rows: Sequence[tuple[str, Sequence[float]]]
) -> None:
    """Draw labeled horizontal bars with their totals, the first at the top."""
    labels = [label for label, _ in rows]
    left = [0.0] * len(rows)
    for i, part in enumerate(parts):
        sizes = [row[i] for _, row in rows]
        axes.barh(range(len(rows)), sizes, left=left, label=part, color=_COLORS[i])
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    for row, total in enumerate(left):
        axes.text(total, row, f" {total:.2f}", va="center")
    axes.figure.set_figheight(max(2.5, 1 + 0.25 * len(rows)))


def require_matplotlib() -> None:
    """Raise MissingExtraError if matplotlib is not installed."""
    with _matplotlib():
        pass


def draw(plot: Callable[[Any], None]) -> str:
    """Return a plot as the text of an SVG file, reproducible for one version of matplotlib.

    Args:
        plot: Draws on the axes that it receives.

    Raises:
        MissingExtraError: If matplotlib is not installed.
    """
    with _matplotlib() as matplotlib:
        figure = matplotlib.figure.Figure(figsize=(8, 4.4), dpi=150, layout="constrained")
        axes = figure.subplots()
        axes.grid(color="0.9")
        axes.set_axisbelow(True)
        plot(axes)
        figure.legend(loc="outside right upper", frameon=False)
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue().decode("utf-8")


@contextmanager
def _matplotlib() -> Iterator[Any]:
    """Import matplotlib, with its default settings instead of the user's."""
    try:
        importlib.import_module("matplotlib.figure")
        matplotlib = importlib.import_module("matplotlib")
    except ImportError as error:
        raise MissingExtraError(
            'plots need matplotlib, which is not installed: pip install "specedge[plot]"'
        ) from error
    except ValueError as error:  # MPLBACKEND is invalid
        raise SpecEdgeError(f"matplotlib cannot be imported: {error}") from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams["svg.hashsalt"] = "specedge"
        matplotlib.rcParams["svg.fonttype"] = "none"
        matplotlib.rcParams["axes.spines.top"] = matplotlib.rcParams["axes.spines.right"] = False
        yield matplotlib


def _element(plot: Callable[[Any], None]) -> str:
    """Return a plot as an SVG element for HTML, without the XML prolog."""
    text = draw(plot)
    return text[text.index("<svg") :]


def _drafters(rows: Sequence[Figures]) -> Iterator[tuple[int, str, list[Figures]]]:
    """Yield index, name and figures of each drafter but plain decoding."""
    names = [name for name in dict.fromkeys(row.drafter for row in rows) if name != "plain"]
    for i, name in enumerate(names):
        yield i, name, [row for row in rows if row.drafter == name]


def _speedup(axes: Any, rows: Sequence[Figures]) -> None:
    from specedge.cli.bench_output import prediction

    axes.axhline(1.0, label="the target alone", color="0.35", linestyle=":")
    for i, name, figures in _drafters(rows):
        color = _COLORS[i % len(_COLORS)]
        fixed = sorted(
            (row for row in figures if not isinstance(row.num_draft_tokens, str)),
            key=lambda row: row.num_draft_tokens,
        )
        for row in figures:
            if isinstance(row.num_draft_tokens, str):
                label = f"{name} ({row.speedup:.2f})"
                axes.axhline(row.speedup, label=label, color=color, linestyle="--")
        if fixed:
            ks = [row.num_draft_tokens for row in fixed]
            speedups = [row.speedup for row in fixed]
            quartiles = (
                [max(0.0, row.speedup - row.low) for row in fixed],
                [max(0.0, row.high - row.speedup) for row in fixed],
            )
            axes.errorbar(
                ks, speedups, quartiles, label=name, color=color, marker=_MARKERS[i % 6], capsize=2
            )
            predictions = [prediction(row)[0] for row in fixed]
            axes.plot(ks, predictions, label=f"{name}, predicted", color=color, linestyle="--")
    axes.set(xlabel="draft tokens per round, K", ylabel="speed-up", ylim=(0, None))


def _acceptance(axes: Any, rows: Sequence[Figures]) -> None:
    if rows[0].alpha is not None:
        label = f"model, all positions ({rows[0].alpha:.2f})"
        axes.axhline(rows[0].alpha, label=label, color="0.35", linestyle=":")
    for i, name, figures in _drafters(rows):
        longest = max(figures, key=lambda row: len(row.acceptance_by_position))
        rates = [rate for rate in longest.acceptance_by_position if rate is not None]
        i %= len(_COLORS)
        style = {"color": _COLORS[i], "linestyle": _LINES[i], "marker": _MARKERS[i]}
        axes.plot(range(1, len(rates) + 1), rates, label=name, markersize=4, **style)
    axes.set(xlabel="position in the draft", ylabel="acceptance rate", ylim=(0, 1))


def _round_time(axes: Any, rows: Sequence[Figures]) -> None:
    bars = []
    for row in rows:
        scale = 1e3 * row.tokens_per_round
        times = [scale * getattr(row, f"{part}_seconds") for part in _TIME_PARTS]
        k = f", K = {row.num_draft_tokens}" if row.drafter not in ("plain", "auto") else ""
        bars.append((f"{row.drafter[:12]}{k}", times))
    stacked_bars(axes, "ms", _TIME_PARTS, bars)
