"""What matrices read while a float graph runs a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ..compare.runner import FillNoise, Pass, Runner
from ..compare.stage import Values
from ..graph.graphs import Length
from ..tracing.geometry import Geometry
from .matrices import groups

_DECODER = Length("decoder", None, prefix="calibration-")


def inputs(
    decoder: Path, geometry: Geometry, ops: str, texts: Sequence[np.ndarray]
) -> dict[tuple[int, ...], np.ndarray]:
    """The input of each group of a graph for any length, over texts that begin anew.

    None of a group that reads a cache itself. [T] each -> [all T, K] by the group's key
    """
    model = ir.load(decoder)
    found = {group.value.name: group.key for group in groups(model.graph)}
    for group in groups(model.graph):
        group.value.dtype = ir.DataType.FLOAT
        if not group.value.is_graph_output():
            model.graph.outputs.append(group.value)
    path = decoder.parent / _DECODER.file(ops)
    ir.save(model, path)
    rows: dict[tuple[int, ...], list[np.ndarray]] = {key: [] for key in found.values()}

    def told(made: Values) -> None:
        for name in made.keys() & found.keys():
            rows[found[name]].append(made[name].reshape(-1, made[name].shape[-1]))

    try:
        runner = Runner(decoder.parent, [_DECODER], geometry, ops)
        passes = [Pass("decoder", text, 0, told=told) for text in texts]
        noise = FillNoise(0, geometry.capacity)
        runner.run([], through=[noise, *passes])
    finally:
        path.unlink()
    return {key: np.concatenate(parts) for key, parts in rows.items() if parts}
