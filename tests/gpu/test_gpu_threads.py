"""Threads that ask a GPU for passes: each pass runs in one thread, over a stand-in for CUDA."""

import threading

import pytest
import standin

from gpu.conftest import PROMPT, K
from specedge.bundle import Bundle
from specedge.errors import SpecEdgeError
from specedge.runtime.backend.onnx_model import OrtModel
from specedge.runtime.backend.sessions import Device

if reason := standin.why_not():
    pytest.skip(reason, allow_module_level=True)


def test_whichever_thread_asks_captured_passes_are_replayed(cuda, pipeline):
    def ask():
        pipeline.generate(PROMPT, 12, ignore_eos=True, num_draft_tokens=K)

    ask()
    before = cuda.counts()["graph_execs"]
    with cuda.counted() as counts:
        for _ in range(2):
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
    assert counts["captures"] == 0
    assert counts["graph_launches"] > 2 * K
    assert cuda.counts()["graph_execs"] == before


def test_a_pass_that_fails_says_so_in_the_thread_that_asked(cuda, pairs):
    bundle = Bundle.read(pairs("fp32-fp16"))
    model = OrtModel(bundle, bundle.target, Device("cuda"))
    bound = model._session.bind(model.cache, 1, 1)
    bound.binding.clear_binding_inputs()
    with pytest.raises(SpecEdgeError, match="a pass of target failed in ONNX Runtime"):
        model._session.run(bound, [1])
    assert model.length == 0
    model.forward([1])
    model.close()
