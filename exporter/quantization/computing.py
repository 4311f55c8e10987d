"""Graphs of a model of floats with types of 16 bits, over the same weights file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from specedge.bundle.manifest import ModelEntry

from ..progress import Progress
from .report import reports
from .texts import Texts
from .written import Written


def add_kinds(
    kinds: Sequence[str],
    models: dict[str, ModelEntry],
    folder: Path,
    texts: Texts,
    head: Sequence[int] | None,
    progress: Progress,
) -> list[ModelEntry]:
    """Give models that share a folder op sets of further kinds, beside those in float32.

    The last one's logits are of the tokens `head` alone, if it is given.
    """
    parts = [Written(role, model, folder) for role, model in models.items()]
    parts[-1] = replace(parts[-1], head=None if head is None else np.array(head))
    made = []
    for part in parts:
        dtype = part.model.weights_dtype
        op_sets = part.rounded(dtype, kinds)
        with progress.step(f"Writing the {part.role}"):
            for ops in op_sets:
                part.write(ir.load(part.decoder(ops)), folder, ops)
        with progress.step(f"Comparing the {part.role}"):
            measured = reports(part, folder, {ops: {} for ops in op_sets}, texts, progress)
        made.append(part.with_reports(measured, dtype))
    return made
