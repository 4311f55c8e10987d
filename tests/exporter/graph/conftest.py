"""A pair whose single-call drafts are compared with passes over separate caches."""

import pytest

from cases import exhaustive


@pytest.fixture(scope="module", params=["gpt2", exhaustive("llama")])
def bundle(request, pairs):
    return pairs.bundle(request.param)


@pytest.fixture
def passes(bundle):
    return _draft(bundle)


@pytest.fixture
def cached(bundle):
    return _draft(bundle)


def _draft(bundle):
    """Return the draft in float32, which is batch-invariant."""
    from specedge.runtime.backend.onnx_model import OrtModel
    from specedge.runtime.backend.sessions import Device

    return OrtModel(bundle, bundle.draft, Device(), "onnx")


@pytest.fixture
def open_with_pruned_head(bundle, tmp_path):
    """Return a draft loop by its name whose columns stand for other tokens: ids, session, feed."""
    import shutil
    from dataclasses import replace

    import numpy as np

    from specedge.bundle.gpu_signatures import ONE_CALL
    from specedge.exporter.graph.draft_loop import add_draft_loops
    from specedge.runtime.backend.sessions import Device

    draft = bundle.draft
    ids = [3 * i % draft.num_columns for i in range(draft.num_columns)]
    shutil.copytree(bundle.folder / "draft", tmp_path / "draft")
    plain = replace(draft, graphs=tuple(g for g in draft.graphs if g.name not in ONE_CALL))
    entry = add_draft_loops(plain, tmp_path, bundle.num_draft_tokens, np.array(ids))

    def open_graph(name):
        graph = entry.graph(name, "onnx")
        inputs = entry.signatures[graph.signature].inputs
        feed = {t.name: np.zeros(t.at(1, 1, 1), t.dtype) for t in inputs}
        feed["input_ids"][:] = 5
        return ids, Device().open(tmp_path / graph.file), feed

    return open_graph
