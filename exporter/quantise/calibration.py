"""What matrices read while a float graph runs a text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ..compare.runner import FillNoise, Pass, Runner
from ..compare.stage import Values
from ..graph.graphs import Length
from ..tracing.geometry import Geometry
from .experts import NOTHING, Apart, mixtures, opened
from .matrices import groups

NUM_ROWS = 48  # of the texts, that errors are measured with
_DECODER = Length("decoder", None, prefix="calibration-")


@dataclass(frozen=True)
class Seen:
    """What a group read: of each channel the largest and the mean square [K], and rows [n, K]."""

    largest: np.ndarray
    square: np.ndarray
    rows: np.ndarray

    @classmethod
    def of(cls, x: np.ndarray, num_rows: int = NUM_ROWS) -> Seen:
        """A value of a pass, and rows of it that are evenly apart. [T, K]"""
        return cls(np.abs(x).max(0), np.square(x).mean(0), x[:: max(1, len(x) // num_rows)].copy())

    @classmethod
    def all(cls, parts: Sequence[Seen]) -> Seen:
        """Of several passes over about as many tokens each."""
        return cls(
            np.max([part.largest for part in parts], axis=0),
            np.mean([part.square for part in parts], axis=0),
            np.concatenate([part.rows for part in parts]),
        )


def inputs(
    decoder: Path, geometry: Geometry, ops: str, texts: Sequence[np.ndarray], apart: Apart = NOTHING
) -> dict[tuple[int, ...], Seen]:
    """What each group of a graph for any length reads, over texts that begin anew. [T] each

    And experts. Nothing of a group that reads a cache itself. By the group's key.
    """
    model = opened(decoder, apart)
    found: defaultdict[str | None, list[tuple[int, ...]]] = defaultdict(list)
    readers = {group.key: group.value for group in groups(model.graph, apart.places)}
    readers |= {one.experts.key: one.x for one in mixtures(model.graph, apart)}
    for key, value in readers.items():
        found[value.name].append(key)
        value.dtype = ir.DataType.FLOAT
        if not value.is_graph_output():
            model.graph.outputs.append(value)
    path = decoder.parent / _DECODER.file(ops)
    ir.save(model, path)
    parts: dict[tuple[int, ...], list[Seen]] = {key: [] for key in readers}
    num_rows = max(1, NUM_ROWS // len(texts))

    def told(made: Values) -> None:
        for name in made.keys() & found.keys():
            x = made[name].reshape(-1, made[name].shape[-1])
            for key in found[name]:
                parts[key].append(Seen.of(x, num_rows))

    try:
        runner = Runner(decoder.parent, [_DECODER], geometry, ops)
        passes = [Pass("decoder", text, 0, told=told) for text in texts]
        noise = FillNoise(0, geometry.capacity)
        runner.run([], through=[noise, *passes])
    finally:
        path.unlink()
    return {key: Seen.all(seen) for key, seen in parts.items() if seen}
