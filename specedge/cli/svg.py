"""Two kinds of plot as inline SVG, without a library: lines over whole numbers, stacked bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

# Okabe and Ito's colours, which are told apart with any colour vision; dashes and marks differ too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_WIDTH, _HEIGHT = 760, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 190, 14, 46
_BAR, _GAP = 16, 5
_LABELS = 120  # left of the bars


@dataclass(frozen=True)
class Point:
    """A value at a whole number, perhaps with a spread."""

    x: int
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Line:
    """Points to join; `dashed` ones have no marks."""

    label: str
    points: Sequence[Point]
    colour: str
    dashed: bool = False


@dataclass(frozen=True)
class Rule:
    """A level across the plot."""

    label: str
    y: float
    colour: str


def lines(
    title: str,
    x_label: str,
    y_label: str,
    some: Sequence[Line],
    rules: Sequence[Rule] = (),
    top: float | None = None,
) -> str:
    """Lines from 0 up, with a legend at the right; `top` is the axis's end."""
    points = [point for line in some for point in line.points]
    xs = sorted({point.x for point in points}) or [1]
    highest = max([*(p.high or p.y for p in points), *(rule.y for rule in rules), 1e-9])
    step = _step(top or highest)
    end = top or math.ceil(highest * 1.02 / step) * step
    plot = _Plot(xs[0], xs[-1], end)
    ticks = [i * step for i in range(int(end / step + 1e-6) + 1)]
    parts = [plot.level(tick) for tick in ticks]
    parts += [plot.tick(x) for x in xs if len(xs) <= 20 or not x % 4]
    parts += [
        _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, x_label, "middle"),
        f'<g transform="translate(14 {(_TOP + _HEIGHT - _BOTTOM) / 2:.1f}) rotate(-90)">'
        f"{_text(0, 0, y_label, 'middle')}</g>",
    ]
    parts += [plot.rule(rule) for rule in rules]
    whole = [line for line in some if not line.dashed]
    for i, line in enumerate([line for line in some if line.dashed] + whole):
        # Spreads at one place stand side by side.
        shift = 0.0 if line.dashed else 5 * (whole.index(line) - (len(whole) - 1) / 2)
        parts.append(plot.line(line, i, shift))
    entries = [(line.label, line.colour, line.dashed) for line in some]
    entries += [(rule.label, rule.colour, True) for rule in rules]
    for i, (label, colour, dashed) in enumerate(entries):
        y = _TOP + 8 + 19 * i
        parts.append(_stroke((_WIDTH - _RIGHT + 12, y), (_WIDTH - _RIGHT + 36, y), colour, dashed))
        parts.append(_text(_WIDTH - _RIGHT + 42, y + 4, label))
    return _svg(title, max(_HEIGHT, _TOP + 19 * len(entries) + 10), parts)


def bars(
    title: str,
    unit: str,
    names: Sequence[str],
    some: Sequence[tuple[str, Sequence[float]]],
    label_width: int = _LABELS,
) -> str:
    """Stacked bars with labels and totals, one below the other; `names` are the parts'."""
    longest = max([*(sum(sizes) for _, sizes in some), 1e-9])
    scale = (_WIDTH - label_width - 130) / longest
    parts: list[str] = []
    for i, name in enumerate(names):
        parts.append(_box(label_width + 110 * i, 4, 12, 12, COLOURS[i]))
        parts.append(_text(label_width + 110 * i + 17, 14, name))
    for row, (label, sizes) in enumerate(some):
        y = 30 + row * (_BAR + _GAP)
        parts.append(_text(label_width - 8, y + 12, label, "end"))
        x = float(label_width)
        for i, size in enumerate(sizes):
            parts.append(_box(x, y, size * scale, _BAR, COLOURS[i]))
            x += size * scale
        parts.append(_text(x + 6, y + 12, f"{sum(sizes):.2f} {unit}"))
    return _svg(title, 34 + len(some) * (_BAR + _GAP), parts)


class _Plot:
    """From values to places."""

    def __init__(self, first: int, last: int, end: float) -> None:
        self.first, self.last, self.end = first, last, end

    def x(self, value: float) -> float:
        span = self.last - self.first
        share = (value - self.first) / span if span else 0.5
        return _LEFT + 14 + share * (_WIDTH - _RIGHT - _LEFT - 28)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - value / self.end * (_HEIGHT - _BOTTOM - _TOP)

    def level(self, value: float) -> str:
        y = self.y(value)
        grid = _stroke((_LEFT, y), (_WIDTH - _RIGHT, y), "#dddddd", width=1)
        return grid + _text(_LEFT - 6, y + 4, f"{value:g}", "end")

    def tick(self, value: int) -> str:
        return _text(self.x(value), _HEIGHT - _BOTTOM + 17, str(value), "middle")

    def rule(self, rule: Rule) -> str:
        y = self.y(rule.y)
        return _stroke((_LEFT, y), (_WIDTH - _RIGHT, y), rule.colour, True)

    def line(self, line: Line, index: int, shift: float) -> str:
        places = [(self.x(point.x) + shift, self.y(point.y)) for point in line.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dashes = ' stroke-dasharray="6 4"' if line.dashed else ""
        found = (
            f'<polyline points="{path}" fill="none" stroke="{line.colour}"'
            f' stroke-width="2"{dashes}/>'
        )
        for point, (x, y) in zip(line.points, places, strict=True):
            if point.low is not None and point.high is not None:
                ends = (x, self.y(point.low)), (x, self.y(point.high))
                found += _stroke(*ends, line.colour, width=1.2)
            if not line.dashed:
                found += _mark(index, x, y, line.colour)
        return found


def _step(highest: float) -> float:
    """A round distance of ticks, for four to eight of them."""
    size: float = 10.0 ** math.floor(math.log10(highest / 4))
    return next(size * n for n in (1, 2, 2.5, 5, 10) if highest / (size * n) <= 8)


def _mark(index: int, x: float, y: float, colour: str) -> str:
    if index % 3 == 1:
        return _box(x - 3.5, y - 3.5, 7, 7, colour)
    if index % 3 == 2:
        corners = f"{x:.1f},{y - 5:.1f} {x - 4.5:.1f},{y + 3.5:.1f} {x + 4.5:.1f},{y + 3.5:.1f}"
        return f'<polygon points="{corners}" fill="{colour}"/>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'


def _stroke(
    start: tuple[float, float],
    end: tuple[float, float],
    colour: str,
    dashed: bool = False,
    width: float = 2,
) -> str:
    dashes = ' stroke-dasharray="6 4"' if dashed else ""
    return (
        f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}"'
        f' stroke="{colour}" stroke-width="{width:g}"{dashes}/>'
    )


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" font-size="13"'
        f' font-family="system-ui, sans-serif"><title>{escape(title)}</title>'
        + "".join(parts)
        + "</svg>"
    )
