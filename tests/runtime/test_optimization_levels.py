"""Quantized graphs give the same logits at each optimization level, and without prepacked weights.

Releases of ONNX Runtime have fused dequantization and products wrongly, or refused 8-bit products
whose weights are not prepacked.
"""

import numpy as np
import onnxruntime
import pytest

import specedge
from quantized import Made
from specedge.bundle import Bundle, store

PROMPT = "def parse(self):\n    return [self.a"


@pytest.fixture(scope="module", params=["int8", "int4"])
def folder(request, tmp_path_factory):
    if request.param == "int8":
        return store.embedded_folder()
    return Made(tmp_path_factory.mktemp("int4"), "llama", precision="int4").bundle.folder


def scores(folder, ops, monkeypatch, level, entries=()):
    class Options(onnxruntime.SessionOptions):
        def __init__(self):
            super().__init__()
            self.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
            for entry in entries:
                self.add_session_config_entry(*entry)

    with monkeypatch.context() as patch:
        patch.setattr(onnxruntime, "SessionOptions", Options)
        with specedge.load(folder, ops=ops) as pipeline:
            logprobs = pipeline.score(pipeline.prompts.tokens(PROMPT), 3)
            return np.array([entry.logprob for entry in logprobs])


@pytest.mark.slow
def test_logits_are_the_same_at_each_level_and_without_prepacking(folder, monkeypatch):
    for ops in sorted(Bundle.read(folder).target.parity):
        expected = scores(folder, ops, monkeypatch, "ORT_ENABLE_ALL")
        # Below it, products of processors without VNNI saturate.
        assert (scores(folder, ops, monkeypatch, "ORT_ENABLE_EXTENDED") == expected).all()
        entry = ("session.disable_prepacking", "1")
        found = scores(folder, ops, monkeypatch, "ORT_ENABLE_ALL", [entry])
        # int4 is computed in float32 then, instead of with rounded inputs.
        assert np.abs(found - expected).max() < (0.5 if "int4" in str(folder) else 2e-3)
