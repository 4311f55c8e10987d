"""A pair whose drafts of one call are held against passes, each over a cache of its own."""

import pytest


@pytest.fixture(scope="module", params=["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def bundle(request, pairs):
    return pairs.bundle(request.param)


@pytest.fixture
def passes(bundle):
    return _draft(bundle)


@pytest.fixture
def cached(bundle):
    return _draft(bundle)


def _draft(bundle):
    """The draft in float32, where rows keep their bits."""
    from specedge.runtime.backend.onnx_model import OrtModel
    from specedge.runtime.backend.sessions import Device

    return OrtModel(bundle, bundle.draft, Device(), "onnx")
