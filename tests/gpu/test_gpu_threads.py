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


def test_captured_passes_are_replayed_from_any_thread(cuda, pipeline):
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


def test_failed_pass_raises_in_the_calling_thread(cuda, pairs):
    bundle = Bundle.read(pairs("fp32-fp16"))
    model = OrtModel(bundle, bundle.target, Device("cuda"))
    bound = model._session.bind(model.cache, 1, 1)
    bound.binding.clear_binding_inputs()
    with pytest.raises(SpecEdgeError, match="a pass of target failed in ONNX Runtime"):
        model._session.run(bound, [1])
    assert model.length == 0
    model.forward([1])
    model.close()


def test_no_allocation_or_copy_during_capture_in_another_thread(cuda, pairs):
    bundle = Bundle.read(pairs("fp32-fp16"))
    first, second, third = (OrtModel(bundle, bundle.target, Device("cuda")) for _ in range(3))
    second.forward([1])
    scores = second.forward([1])
    begun, go = threading.Event(), threading.Event()

    class Session:
        """Session with slow captures."""

        def run_with_iobinding(self, binding, options):
            begun.set()
            assert go.wait(30)
            first._session._session.run_with_iobinding(binding, options)

    bound = first._session.bind(first.cache, 1, 1, captured=True)
    buffers = first._session.buffers
    capture = [lambda: buffers.run(Session(), bound.binding, bound.options)]
    others = [second.with_new_cache, scores.array, third.close]
    threads = [threading.Thread(target=one, daemon=True) for one in capture + others]
    threads[0].start()
    assert begun.wait(30)
    for thread in threads[1:]:
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
    with cuda.counted() as counts:
        go.set()
        for thread in threads:
            thread.join(30)
    assert (counts["captures"], counts["failed_captures"]) == (1, 0)
    first.close()
    second.close()


def test_replay_does_not_hold_the_capture_lock(cuda, pipeline):
    pipeline.target.truncate(0)
    pipeline.target.forward([1, 2])
    bound = pipeline.target._passes[2, 2]
    assert not bound.options.captures
    buffers = pipeline.target._session.buffers

    class Session:
        def run_with_iobinding(self, binding, options):
            with buffers.release():  # would admit a waiting allocation
                pass

    buffers.run(Session(), bound.binding, bound.options)
