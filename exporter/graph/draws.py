"""A row of logits as a distribution and a draw from it, in nodes that a GPU captures.

The arithmetic of `hosts/drawing.py`, without what only a CPU can run. No shape depends on a value,
so settings that are off are worked out as those that are on. The row is sorted, which takes a GPU a
few passes over it. Sums are of blocks first, as CumSum adds up to each place from the beginning
there. C columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from specedge.bundle.gpu_signatures import num_best

from ..hosts import drawing
from ..hosts.nodes import DOUBLE, END, FLOAT, INT, Nodes

_BLOCK = 512


@dataclass(frozen=True)
class Draw:
    """The column of the token [1, 1], which columns are seen after it [1, C], the weights that it
    was drawn from [1, C], and what `sampled` in `specedge/bundle/gpu_signatures.py` says of them.
    """

    column: ir.Value
    seen: ir.Value
    weights: ir.Value
    summary: ir.Value


class Draws:
    """Draws under the same settings, which the nodes are given once."""

    def __init__(self, nodes: Nodes, settings: drawing.Settings, num_columns: int) -> None:
        self._nodes, self._settings, self._size = nodes, settings, num_columns
        self._is_drawn = nodes("Greater", settings.temperature, 0.0)
        top_k = settings.top_k
        is_few = nodes("And", nodes("Greater", top_k, 0), nodes("Less", top_k, num_columns))
        self._last = nodes("Sub", nodes("Where", is_few, top_k, num_columns), 1)
        self._is_whole = nodes("GreaterOrEqual", settings.top_p, np.ones(1))
        # Both are computed when the graph is loaded, and would be long in its file.
        self._zeros = nodes("Expand", 0.0, [1, num_columns])
        ones = nodes("Expand", 1, [1, num_columns])
        self._ranks = nodes("CumSum", ones, np.array(1), exclusive=1)

    def draw(self, logits: ir.Value, seen: ir.Value, uniform: ir.Value) -> Draw:
        """The likeliest token at temperature 0, else one that is drawn. [1, C], [1, C], [1]"""
        nodes, settings = self._nodes, self._settings
        is_wrong = nodes("ReduceSum", nodes("Mul", logits, 0.0), [1])
        logits = drawing.penalised(nodes, logits, seen, settings.penalty)
        values = nodes("TopK", logits, [self._size], num_outputs=2)
        (columns,) = nodes.others(values)
        kept = self._kept(values)
        weights = nodes("ScatterElements", self._zeros, columns, kept, axis=1)
        place, total = self._place(weights, uniform, "LessOrEqual")
        column = nodes("Where", self._is_drawn, place, _first(nodes, columns, 1))
        weight = nodes("GatherElements", weights, column, axis=1)
        count = nodes("ReduceSum", self._ones(nodes("Greater", kept, 0.0)), [1])
        best = (_first(nodes, x, num_best(self._size)) for x in (kept, columns))
        parts = (column, is_wrong, count, weight, total, *best)
        wide = [x if x is total else nodes("Cast", x, to=DOUBLE) for x in parts]
        summary = nodes("Concat", *wide, axis=1)
        return Draw(column, drawing.also_seen(nodes, seen, column), weights, summary)

    def _kept(self, values: ir.Value) -> ir.Value:
        """The weights of sorted logits, 0 where a filter leaves them out. [1, C]"""
        nodes, settings = self._nodes, self._settings
        least = nodes("Gather", values, self._last, axis=1)
        largest = _first(nodes, values, 1)
        weights = nodes("Exp", drawing.cooled(nodes, values, largest, settings.temperature))
        weights = nodes("Where", nodes("Less", values, least), 0.0, weights)
        last, _ = self._place(weights, settings.top_p, "Less")
        is_in = nodes("Or", nodes("LessOrEqual", self._ranks, last), self._is_whole)
        return drawing.likely(nodes, nodes("Where", is_in, weights, 0.0), settings.min_p)

    def _place(
        self, weights: ir.Value, share: ir.Value, is_short: str
    ) -> tuple[ir.Value, ir.Value]:
        """The first place up to which weights add up to a share of all: where the sum `is_short` of
        that no more; and what all add up to, in double. [1, C], [1] -> [1, 1], [1, 1]
        """
        nodes = self._nodes
        blocks = nodes("Cast", weights, to=DOUBLE)
        if rest := -self._size % _BLOCK:
            blocks = nodes("Pad", blocks, [0, 0, 0, rest])
        blocks = nodes("Reshape", blocks, [-1, _BLOCK])
        totals = nodes("ReduceSum", blocks, [1])
        sums = nodes("CumSum", totals, np.array(0))
        total = nodes("Slice", sums, [-1], [END], [0])
        goal = nodes("Mul", total, share)
        at = nodes("ReduceSum", self._ones(nodes(is_short, sums, goal)), [0], keepdims=0)
        block = nodes("Cast", at, to=INT)
        before = nodes("Gather", nodes("CumSum", totals, np.array(0), exclusive=1), block)
        inside = nodes("CumSum", nodes("Gather", blocks, block), np.array(1))
        short = nodes(is_short, inside, nodes("Sub", goal, before))
        # Rounding may put the goal at the block's end: then it is the last place that adds to it.
        less = nodes("Less", inside, nodes("Slice", inside, [-1], [END], [1]))
        counts = (nodes("ReduceSum", self._ones(x), [1]) for x in (short, less))
        within = nodes("Cast", nodes("Min", *counts), to=INT)
        return nodes("Add", nodes("Mul", block, _BLOCK), within), total

    def _ones(self, condition: ir.Value) -> ir.Value:
        """Numbers to count with."""
        return self._nodes("Cast", condition, to=FLOAT)


def _first(nodes: Nodes, row: ir.Value, count: int) -> ir.Value:
    return nodes("Slice", row, [0], [count], [1])
