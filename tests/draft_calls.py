"""Pipelines that draft by passes, or by a multi-step graph in one call, on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import specedge
from specedge.bundle.gpu_signatures import ONE_CALL
from specedge.runtime.backend.cuda.draft_graphs import DraftGraph
from specedge.runtime.backend.sessions import Device
from specedge.runtime.requests.pipeline import Pipeline


@contextmanager
def pipelines_by_draft(folder: Path, ops: str) -> Iterator[list[Pipeline]]:
    """Load a bundle twice, to draft by passes and in one call."""
    pipelines = [specedge.load(folder, ops=ops) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftGraph, "_median", lambda self, run: 1.0)
        one = pipelines[1]
        assert one.draft.unroll(one.bundle, one.bundle.draft, Device()) is None
    assert len(one.draft._draft_graphs) == len(ONE_CALL)
    yield pipelines
    for pipeline in pipelines:
        pipeline.close()
