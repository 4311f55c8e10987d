"""Draw docs/speedup.svg from the table of the embedded pair in docs/measurements.md.

python tools/draw_speedup.py
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from specedge.cli.drawing import drawn_bytes
from specedge.cli.figures import Curve, Figure

DOCS = Path(__file__).parents[1] / "docs"
HEADING = "## The embedded pair on held-out text"


def figure() -> Figure:
    """The medians of the table, by temperature; K = 0 is the target alone."""
    section = (DOCS / "measurements.md").read_text("utf-8").partition(HEADING)[2]
    table = section.partition("\n|")[2].partition("\n\n")[0]
    points: defaultdict[str, dict[int, float]] = defaultdict(lambda: {0: 1.0})
    for line in table.splitlines()[2:]:
        temperature, k, *_, speedup = (cell.strip() for cell in line.strip("|").split("|"))
        points[temperature][int(k)] = float(speedup)
    last = max(max(values) for values in points.values())
    curves = [
        Curve(f"temperature {name}", list(map(float, values)), list(values.values()), marks=True)
        for name, values in points.items()
    ]
    alone = Curve("the target alone", [0.0, float(last)], [1.0, 1.0])
    return Figure(
        name="speedup",
        title="Lossless speed-up: embedded pair, held-out prompts, one CPU thread",
        x_label="draft tokens a round, K",
        y_label="speed-up of whole requests, median",
        curves=[*curves, alone],
    )


if __name__ == "__main__":
    (DOCS / "speedup.svg").write_bytes(drawn_bytes(figure(), "svg"))
