"""Allocation, sharing and release of device and pinned memory.

Over a stand-in for CUDA, where kernels compute nothing.
"""

import pytest
import standin

from gpu.conftest import PROMPT, VOCAB_SIZE, K, loaded
from specedge.bundle import Bundle
from specedge.bundle.gpu_signatures import ONE_CALL, SAMPLED
from specedge.errors import DeviceError
from specedge.runtime.backend.cuda.buffers import CudaBuffers
from specedge.runtime.backend.onnx_model import OrtModel
from specedge.runtime.backend.sessions import Device

HIDDEN = 64  # columns of the tables

if reason := standin.why_not():
    pytest.skip(reason, allow_module_level=True)


def test_slots_share_one_copy_of_draft_weights(cuda, pairs, planted, one_call):
    with (
        cuda.counted() as counts,
        loaded(pairs("fp32-fp16"), slots=2) as pipeline,
    ):
        calls = [slot.draft._draft_graphs for slot in pipeline.slots.all]
        for first, second in zip(*calls, strict=True):
            assert first._session is second._session
            assert first._cache is not second._cache
    assert counts["captures"] == 2 * (K + 1 + 2 + 2)


def test_model_with_new_cache_captures_separate_graphs(cuda, pipeline):
    twin = pipeline.target.with_new_cache()
    with cuda.counted() as counts:
        twin.forward([1])
    assert counts["captures"] == 1
    first, second = (m.cache.arrays["0.key"].value.data_ptr() for m in (pipeline.target, twin))
    assert first != second


def test_new_cache_does_not_alias_captured_buffers(cuda, pairs):
    with loaded(pairs("fp32-fp16"), ops="onnx-fp16") as pipeline:
        with cuda.counted() as counts:
            twin = pipeline.target.with_new_cache()  # the audit makes one after all is captured
        assert counts["mallocs"] >= len(twin.cache.arrays)
        twin.close()


def test_cache_allocation_failure_is_a_device_error(cuda, pairs, monkeypatch):
    bundle = Bundle.read(pairs("fp32-fp16"))
    model = OrtModel(bundle, bundle.target, Device("cuda"))
    monkeypatch.setenv("STANDIN_MEMORY_MB", "0")
    with pytest.raises(DeviceError, match="not enough memory on cuda for target"):
        model.with_new_cache()
    model.close()


def test_caches_are_updated_in_place(cuda, pipeline):
    addresses = [a.value.data_ptr() for a in pipeline.target.cache.arrays.values()]
    with cuda.counted() as counts:
        pipeline.target.truncate(0)
        pipeline.target.forward([1])
    size = pipeline.bundle.target.cache_size(pipeline.target.ops)
    assert counts["d2d_bytes"] + counts["async_d2d_bytes"] < size
    assert addresses == [a.value.data_ptr() for a in pipeline.target.cache.arrays.values()]


def test_closing_pipeline_frees_device_and_pinned_memory(cuda, pairs):
    names = ("device_bytes", "pinned_bytes", "streams", "events", "graph_execs")
    before = cuda.counts()
    for _ in range(2):
        with loaded(pairs("fp32-fp16")) as pipeline:
            pipeline.generate(PROMPT, 12, ignore_eos=True, temperature=1.0)
            held = cuda.counts()
        assert held["device_bytes"] > before["device_bytes"]
        assert held["pinned_bytes"] > before["pinned_bytes"]
        after = cuda.counts()
        assert {name: after[name] for name in names} == {name: before[name] for name in names}


def held(cuda, bundle, model, name, ops):
    """Bytes on the device of a session of a graph."""
    before = cuda.counts()["device_bytes"]
    session = Device("cuda").open(bundle.path(model.graph(name, ops).file))
    found = cuda.counts()["device_bytes"] - before
    del session
    return found


def test_tied_embedding_is_on_the_device_once(cuda, pairs):
    bundle = Bundle.read(pairs("fp32-fp16"))
    size = held(cuda, bundle, bundle.target, "scored", "gqa-fp16")
    assert size < 1.05 * bundle.files[bundle.target.weights].size + 2**16


def test_tied_int8_embedding_is_on_the_device_once(cuda, pairs):
    bundle, ops = Bundle.read(pairs("int8-fp32")), "onnx-fp32"  # a rotated head is no tied one
    table = bundle.target.padded_vocab_size * HIDDEN
    for model in (bundle.target, bundle.draft):
        twice = held(cuda, bundle, model, "decoder", ops)
        graphs = ("scored",) if model is bundle.target else ("scored", *ONE_CALL)
        for graph in graphs:
            own = 16 * VOCAB_SIZE if graph == SAMPLED else 0  # zeros and ranks of its columns
            assert held(cuda, bundle, model, graph, ops) < twice - 0.9 * table + own


def test_pinned_memory_falls_back_to_public_api(cuda, pairs, planted, monkeypatch):
    monkeypatch.setattr(CudaBuffers, "_allocate_pinned", None)
    with loaded(pairs("fp32-fp16")) as pipeline:
        found = pipeline.generate(PROMPT, 12, ignore_eos=True, num_draft_tokens=K)
        assert found.tokens == [1] * 12
        tokens = pipeline.target._passes[K + 1, K + 1].arrays["tokens"]
        assert tokens.value.numpy().tolist() == [[1] * (K + 1)]


def test_fetched_logits_outlive_a_pass_with_another_cache(cuda, pipeline):
    """Kernels may overwrite device outputs, but not the fetched host copies."""
    twin = pipeline.target.with_new_cache()
    pipeline.target.truncate(0)
    found = pipeline.target.forward([5, 6]).array()
    found[...] = 1
    twin.forward([7, 8]).array()[...] = 2
    assert (found == 1).all()
    twin.close()


def test_device_inputs_match_host_values(cuda, pipeline):
    pipeline.target.truncate(0)
    pipeline.target.forward([5, 6])
    pipeline.target.forward([7, 8])
    arrays = pipeline.target._passes[2, 2].arrays
    assert arrays["tokens"].value.numpy().tolist() == [[7, 8]]
    assert arrays["past_length"].value.numpy().tolist() == [2]
